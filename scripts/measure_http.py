"""The table of docs/benchmarks/http.md: CPU time of router and worker per request, with a simulated engine behind them.

Binaries are measured in turns, so that what else the machine does falls on all of them alike:

    python3 scripts/measure_http.py --model .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf old=PATH new=target/release/thalweg
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request

from measure_gpu import load

# As an H200 runs an 8B: 6.2 ms at 64 sequences, 12.7 ms at 256, a prompt of 512 tokens in 11.6 ms.
H200 = "step: {base_seconds: 0.004, decode_sequence_seconds: 0.0000339, prefill_token_seconds: 0.0000225}"
# name: profile, clients, requests, prompt tokens, output tokens
LOADS = {
    "64 clients, 512 in, 256 out": (H200, 64, 192, 512, 256),
    "256 clients, 512 in, 256 out": (H200, 256, 512, 512, 256),
    "8 clients, 16 in, 64 out, 12 ms a step": ("step: {base_seconds: 0.012}", 8, 96, 16, 64),
    "64 clients, 16 in, 64 out, no pause": ("step: {}", 64, 1000, 16, 64),
}
VOCABULARY = 40_000


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cpu_seconds(process):
    """User and system time of all threads."""
    with open(f"/proc/{process.pid}/stat") as stat:
        fields = stat.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_seconds(process, name):
    """CPU time of the threads of this name."""
    seconds = 0
    for task in os.listdir(f"/proc/{process.pid}/task"):
        folder = f"/proc/{process.pid}/task/{task}"
        with open(f"{folder}/comm") as comm, open(f"{folder}/schedstat") as stat:
            seconds += int(stat.read().split()[0]) / 1e9 if comm.read().strip() == name else 0
    return seconds


def start(binary, model, profile):
    grpc, metrics, http = free_port(), free_port(), free_port()
    quiet = {"stdout": subprocess.DEVNULL}
    worker = [binary, "worker", "--engine", "sim", "--profile", profile, "--model", model, "--served-model-name", "m"]
    worker += ["--grpc", f"127.0.0.1:{grpc}", "--metrics", f"127.0.0.1:{metrics}", "--max-num-seqs", "256"]
    worker += ["--max-model-len", "4096", "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", "16GiB"]
    worker += ["--log-level", "warn"]
    router = [binary, "router", "--http", f"127.0.0.1:{http}", "--worker", f"grpc://127.0.0.1:{grpc}", "--log-level", "warn"]
    processes = subprocess.Popen(worker, **quiet), subprocess.Popen(router, **quiet)
    for _ in range(600):
        try:
            if b'"m"' in urllib.request.urlopen(f"http://127.0.0.1:{http}/v1/models", timeout=2).read():
                return *processes, http
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"{binary} is not ready after 30 s")


def prompts(seed, count, tokens):
    draw = random.Random(seed)
    return [[draw.randrange(1000, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def measure(binary, model, name, seed):
    profile, clients, count, tokens, output = LOADS[name]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(profile)
        file.flush()
        worker, router, port = start(binary, model, file.name)
        try:
            asyncio.run(load(port, prompts(0, 16, 32), 16, 8))
            before = cpu_seconds(router), cpu_seconds(worker), thread_seconds(worker, "engine")
            seconds, times = asyncio.run(load(port, prompts(seed, count, tokens), output, clients))
            after = cpu_seconds(router), cpu_seconds(worker), thread_seconds(worker, "engine")
        finally:
            for process in (router, worker):
                process.terminate()
                process.wait()
    cpu = [(b - a) / count * 1e3 for a, b in zip(before, after)]
    return *cpu, count * output / seconds, statistics.median((e - f) / (output - 1) for f, e in times) * 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("binaries", nargs="+", metavar="NAME=BINARY")
    options = parser.parse_args()
    binaries = [binary.split("=", 1) for binary in options.binaries]
    print("| load | | router CPU, ms a request | worker CPU | of it the engine's thread | tokens/s | TPOT p50, ms |")
    print("|---|---|---|---|---|---|---|")
    for name in LOADS:
        runs = {binary: [] for binary, _ in binaries}
        for run in range(options.runs):
            for binary, path in binaries if run % 2 == 0 else reversed(binaries):
                runs[binary].append(measure(path, options.model, name, run + 1))
        for binary, figures in runs.items():
            router, worker, engine, rate, tpot = (statistics.median(column) for column in zip(*figures))
            print(f"| {name} | {binary} | {router:.2f} | {worker:.2f} | {engine:.2f} | {rate:,.0f} | {tpot:.2f} |", flush=True)


if __name__ == "__main__":
    main()
