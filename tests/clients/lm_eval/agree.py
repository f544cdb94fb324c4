"""Holds log-likelihoods of a server in float32 to Hugging Face transformers on the same weights, dequantised.

    pip install torch transformers accelerate gguf
    python tests/clients/lm_eval/agree.py --binary target/release/thalweg --model MODEL.gguf TEXT

Not part of `make test`, as torch is large. The text is cut into pieces, whose tokens are sent as ids and echoed.
"""

import argparse
import json
import pathlib
import re
import signal
import subprocess
import urllib.request

import torch
import transformers

PIECE_CHARS = 1200
TOLERANCE = 0.02


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--pieces", type=int, default=12)
    parser.add_argument("text", type=pathlib.Path)
    options = parser.parse_args()
    text = options.text.read_text()
    pieces = [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)][: options.pieces]
    command = [options.binary, "up", "--model", options.model, "--http", "127.0.0.1:0", "--log-level", "warn"]
    command += ["--dtype", "float32", "--kv-cache-dtype", "float32"]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        model, url = re.match(r"ready: (\S+) at (\S+)/v1$", cluster.stdout.readline().strip()).groups()
        ids = [post(url, "/tokenize", {"prompt": piece})["tokens"] for piece in pieces]
        served = [echoed(url, model, piece) for piece in ids]
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(timeout=60)
    compare(served, reference(options.model, ids))


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def echoed(url, model, ids):
    body = {"model": model, "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    logprobs = post(url, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    assert logprobs[0] is None and len(logprobs) == len(ids) + 1
    return torch.tensor(logprobs[1 : len(ids)], dtype=torch.float64)


def reference(path, pieces):
    options = dict(gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    for ids in pieces:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()
        yield logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def compare(served, references):
    worst, total, sums, tokens = 0.0, 0.0, 0.0, 0
    for ours, theirs in zip(served, references, strict=True):
        difference = (ours - theirs).abs()
        worst, total, tokens = max(worst, difference.max().item()), total + difference.sum().item(), tokens + len(ours)
        sums = max(sums, abs((ours.sum() - theirs.sum()).item()) / len(ours))
    print(f"{tokens} tokens: largest difference {worst:.5f}, mean {total / tokens:.6f}, of a piece's mean {sums:.6f}")
    assert worst <= TOLERANCE, f"over {TOLERANCE}"


main()
