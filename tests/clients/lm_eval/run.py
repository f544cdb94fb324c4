"""Runs lm-evaluation-harness against a cluster of this machine: both tasks, by every way in which it asks servers."""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

TASKS = pathlib.Path(__file__).resolve().parent / "tasks"
# Which model type asks, of what path, in batches of how many, and how else, for which tasks. The tokenizer is the server's own.
BOTH = "thalweg_facts,thalweg_copy"
RUNS = [
    ("local-completions", "/completions", 1, "tokenizer_backend=remote,tokenized_requests=False", BOTH),
    ("local-completions", "/completions", 8, "tokenizer_backend=remote,tokenized_requests=False", BOTH),
    ("local-completions", "/completions", 8, "tokenizer_backend=remote,tokenized_requests=True", BOTH),
    ("local-chat-completions", "/chat/completions", 1, "tokenizer_backend=None,num_concurrent=4", "thalweg_copy"),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    command = [options.binary, "up", "--model", options.model, "--http", "127.0.0.1:0", "--log-level", "warn"]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = re.match(r"ready: (\S+) at (\S+)$", cluster.stdout.readline().strip())
        with tempfile.TemporaryDirectory() as folder:
            evaluate(pathlib.Path(folder), *ready.groups())
    finally:
        cluster.send_signal(signal.SIGTERM)
    assert cluster.wait(timeout=60) == 0


def evaluate(folder, model, url):
    for path in TASKS.iterdir():
        (folder / path.name).write_text(path.read_text().replace("FOLDER", str(folder)))
    answers = {}
    for at, (kind, path, batch, how, tasks) in enumerate(RUNS):
        arguments = f"model={model},base_url={url}{path},{how}"
        for task, result in lm_eval(folder, at, kind, batch, arguments, tasks).items():
            print(f"{kind} {batch} {how} {task}: {result}", flush=True)
            assert answers.setdefault((kind, task), result) == result, "the way of asking changed the result"


def lm_eval(folder, at, kind, batch, arguments, tasks):
    out = folder / f"results-{at}"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", tasks, "--batch_size", str(batch)]
    command += ["--include_path", str(folder), "--output_path", str(out)]
    command += ["--apply_chat_template"] if "chat" in kind else []
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets"), "OPENAI_API_KEY": "unused"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    (report,) = out.rglob("results*.json")
    results = json.loads(report.read_text())["results"]
    return {task: {key: value for key, value in of.items() if key.endswith(",none")} for task, of in results.items()}


main()
