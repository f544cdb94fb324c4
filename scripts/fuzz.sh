#!/usr/bin/env bash
# Runs one fuzz target: fuzz.sh TARGET_DIR NAME SECONDS. New inputs stay in TARGET_DIR/fuzz; what fails is shown and kept there.
set -euo pipefail
name=$2
found=$1/fuzz/$name
mkdir -p "$found"
if "$1/debug/fuzz_$name" -max_total_time="$3" -rss_limit_mb=1024 -timeout=10 -artifact_prefix="$found-" \
  "$found" "fuzz/corpus/$name" >"$found.log" 2>&1; then
  echo "$name: $(tail -1 "$found.log")"
else
  grep -v '^#' "$found.log" | tail -60
  echo "$name failed; run it again with $1/debug/fuzz_$name and the file that is named above" >&2
  exit 255
fi
