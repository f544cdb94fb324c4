"""Runs schemathesis over /openapi.json of a simulated cluster: no 5xx, and no reply but what the document says."""

import argparse
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
]
# Short answers; the context is small so that none is long by its limit.
PROFILE = "{ tokens: { seed: 7 }, output_tokens: { uniform: { min: 1, max: 12 } } }"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--examples", type=int, default=20, help="of each operation")
    parser.add_argument("--phases", default="fuzzing")
    parser.add_argument("--cases-min", type=int, default=0, help="fail if fewer were made")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        profile = pathlib.Path(folder) / "profile.yaml"
        profile.write_text(PROFILE)
        command = [options.binary, "up", "--model", options.model, "--engine", "sim", "--profile", str(profile)]
        command += ["--http", "127.0.0.1:0", "--max-model-len", "512", "--log-level", "warn"]
        cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            ready = re.match(r"ready: (\S+) at (\S+)/v1$", cluster.stdout.readline().strip())
            done = schemathesis(folder, options, *ready.groups())
        finally:
            cluster.send_signal(signal.SIGTERM)
            ended = cluster.wait(timeout=60)
    made = re.search(r"^\s*(\d+) generated", done.stdout, re.MULTILINE)
    cases = int(made[1]) if made else 0
    if done.returncode or ended or cases < options.cases_min:
        sys.exit(f"{done.stdout}{done.stderr}schemathesis ended with {done.returncode}, the cluster with {ended}, {cases} cases")
    print(f"schemathesis: {cases} cases, no fault")


def schemathesis(folder, options, model, url):
    binary = pathlib.Path(sys.executable).parent.absolute() / "schemathesis"
    command = [binary, "run", f"{url}/openapi.json", "--max-examples", str(options.examples), "--seed", str(options.seed)]
    command += ["--checks", ",".join(CHECKS), "--phases", options.phases, "--continue-on-failure", "--no-color"]
    environment = os.environ | {"THALWEG_MODEL": model, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(HERE)}
    # What it remembers of former runs stays out of this one, and out of the tree.
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


main()
