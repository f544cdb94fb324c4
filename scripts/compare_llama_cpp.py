#!/usr/bin/env python3
"""Decode and prefill speed of `thalweg bench engine` and of llama.cpp, in turn, on one machine.

    compare_llama_cpp.py --thalweg target/release/thalweg --llama FOLDER_OF_LLAMA_BENCH [--rounds 5] MODEL...

Each round runs both engines on every case, one after the other. Printed are medians over the rounds, the median of
the rounds' ratios, and CPU seconds of the whole process, loading included.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess

CASES = [
    # name, prompt tokens, output tokens, sequences
    ("prefill 512", 512, 2, 1),
    ("decode 1", 16, 128, 1),
    ("decode 8", 64, 64, 8),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thalweg", required=True)
    parser.add_argument("--llama", required=True, type=pathlib.Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    print("| model | case | thalweg tokens/s | llama.cpp tokens/s | ratio | CPU s, thalweg / llama.cpp |")
    print("|---|---|---|---|---|---|")
    for model in args.models:
        for case in CASES:
            rounds = [(ours(args, model, *case), theirs(args, model, *case)) for _ in range(args.rounds)]
            print(row(pathlib.Path(model).stem, case[0], rounds), flush=True)


def row(model, case, rounds):
    ours, theirs = zip(*rounds)
    ratio = statistics.median(a[0] / b[0] for a, b in rounds)
    speed = [statistics.median(run[0] for run in runs) for runs in (ours, theirs)]
    cpu = [statistics.median(run[1] for run in runs) for runs in (ours, theirs)]
    return f"| {model} | {case} | {speed[0]:.0f} | {speed[1]:.0f} | {ratio:.2f} | {cpu[0]:.1f} / {cpu[1]:.1f} |"


def ours(args, model, name, prompt, output, batch):
    command = [args.thalweg, "bench", "engine", "--model", model, "--threads", str(args.threads), "--repeat", "1"]
    command += ["--prompt", str(prompt), "--output", str(output), "--batch", str(batch), "--json"]
    report, cpu = run(command)
    field = "prefill_tokens_per_second" if name.startswith("prefill") else "decode_tokens_per_second"
    return json.loads(report)[field], cpu


def theirs(args, model, name, prompt, output, batch):
    if batch > 1:
        command = [args.llama / "llama-batched-bench", "-m", model, "-t", str(args.threads), "-c", "4096"]
        command += ["-npp", str(prompt), "-ntg", str(output), "-npl", str(batch), "--output-format", "jsonl"]
        report, cpu = run(command)
        return json.loads(report.strip().splitlines()[-1])["speed_tg"], cpu
    sizes = (prompt, 0) if name.startswith("prefill") else (0, output)
    command = [args.llama / "llama-bench", "-m", model, "-t", str(args.threads), "-r", "1", "-o", "json"]
    report, cpu = run([*command, "-p", str(sizes[0]), "-n", str(sizes[1])])
    return json.loads(report)[0]["avg_ts"], cpu


def run(command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{command[0]} ended with status {status}")
    return output, usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
