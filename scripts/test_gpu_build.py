"""A folder of stripped test binaries and the files that they read, for a machine with a GPU and without Rust."""

import argparse
import json
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = {"gpu": "gpu-tests", "schedules": "schedule-tests"}
FILES = ["tests/golden", "tests/gpu-models", ".cache/tiny", ".cache/models"]

RUN = """#!/bin/bash
# Runs everything on the first GPU. Arguments filter the kernel and model tests by name.
cd "$(dirname "$0")"
export THALWEG_TEST_ROOT="$PWD" THALWEG_TINY_MODELS="$PWD/.cache/tiny" THALWEG_TEST_MODELS="$PWD/.cache/models"
failed=0
run() {
  echo "== $*"
  "$@" || failed=1
}
run ./gpu-tests --test-threads=4 --skip adapters:: --skip embeddings:: --skip faults:: --skip golden:: --skip layers:: --skip memory:: --skip models:: --skip plan_search:: "$@"
# One backend at a time, as processes have it: some take the whole GPU, some end their process.
run ./gpu-tests --test-threads=1 --skip attention:: --skip clusters:: --skip draws:: --skip few:: --skip gemm:: --skip golden:: --skip large:: --skip lora:: --skip pool:: --skip rows:: --skip sampling:: --skip shared:: "$@"
if [ $# -eq 0 ]; then
  run ./schedule-tests --test-threads=1 cuda::tiny
  if [ -d "$THALWEG_TEST_MODELS" ]; then
    run ./gpu-tests --test-threads=1 --nocapture golden::
    run ./schedule-tests --test-threads=1 cuda::smollm
  else
    echo "== golden files NOT RUN: put what make test-models fetches into $THALWEG_TEST_MODELS"
    failed=1
  fi
fi
[ $failed = 0 ] && echo "== all passed" || echo "== FAILED"
exit $failed
"""


def build(cargo, arguments):
    """Executables by target name."""
    command = cargo.split() + arguments + ["--message-format=json-render-diagnostics"]
    output = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    messages = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cargo", default="cargo")
    parser.add_argument("--profile", default="dev")
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    common = ["--features", "cuda", "--locked", "--profile", options.profile]
    tests = [argument for name in TESTS for argument in ("--test", name)]
    found = build(options.cargo, ["test", "-p", "thalweg-worker", "--no-run", *common, *tests])
    found |= build(options.cargo, ["build", "--bin", "thalweg", *common])
    for name, target in {**TESTS, "thalweg": "thalweg"}.items():
        subprocess.run(["strip", "-o", folder / target, found[name]], check=True)
    for name in FILES:
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    script = folder / "run.sh"
    script.write_text(RUN)
    script.chmod(0o755)
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:8.1f} MiB  {path.name}")


main()
