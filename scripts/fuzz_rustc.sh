#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of `make fuzz`: libFuzzer's coverage in the workspace's own crates. What they depend on is as in
# any other build and is not compiled anew.
set -euo pipefail
case " $* " in *" --crate-name build_script_"*) exec "$@" ;; esac
exec "$@" --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
