#!/usr/bin/env python3
"""What serving costs beside the model: start, memory, a reused prefix, and the router's own CPU time.

    measure_serving.py --thalweg target/release/thalweg [--requests 100] MODEL...

For each model: seconds from start to ready of `thalweg up` with two workers and its resident memory once both have
served; time to first token of a 1,000-token prompt, cold and with its prefix cached; then a router and a worker as two
processes, 64-token streams, 8 at once, and the router's CPU time over the number of requests.
"""

import argparse
import http.client
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import threading
import time

KV_BYTES = 128 << 20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--thalweg", required=True)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("models", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    print("| model | file MiB | ready s | resident MiB | limit MiB | TTFT cold ms | TTFT shared ms | ratio | router CPU us a request |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in args.models:
        ready, resident, cold, shared = up(args.thalweg, model)
        cpu = router_cpu(args.thalweg, model, args.requests)
        file = model.stat().st_size / 2**20
        limit = file + 2 * KV_BYTES / 2**20 + 150
        print(
            f"| {model.stem} | {file:.0f} | {ready:.2f} | {resident:.0f} | {limit:.0f} | {cold:.0f} | {shared:.0f}"
            f" | {shared / cold:.2f} | {cpu:.0f} |",
            flush=True,
        )


def up(thalweg, model):
    port = free_port()
    started = time.monotonic()
    command = [thalweg, "up", "--model", model, "--http", f"127.0.0.1:{port}", "--workers", "2"]
    process = start([*command, "--kv-cache-memory-bytes", str(KV_BYTES)])
    try:
        wait_ready(port)
        ready = time.monotonic() - started
        cold, shared = [], []
        for round in range(5):
            prefix = [(round * 7919 + i * 31) % 20000 + 100 for i in range(1000)]
            cold.append(first_token_ms(port, [*prefix, 5, 6, 7]))
            shared.append(first_token_ms(port, [*prefix, 8, 9, 10]))
        return ready, resident_mib(process.pid), statistics.median(cold), statistics.median(shared)
    finally:
        stop(process)


def router_cpu(thalweg, model, requests):
    grpc, metrics, port = free_port(), free_port(), free_port()
    worker = start([thalweg, "worker", "--model", model, "--grpc", f"127.0.0.1:{grpc}", "--metrics", f"127.0.0.1:{metrics}"])
    router = start([thalweg, "router", "--http", f"127.0.0.1:{port}", "--worker", f"grpc://127.0.0.1:{grpc}"])
    try:
        wait_ready(port)
        stream_all(port, 8)
        before = cpu_seconds(router.pid)
        stream_all(port, requests)
        return (cpu_seconds(router.pid) - before) / requests * 1e6
    finally:
        stop(router)
        stop(worker)


def stream_all(port, requests):
    turns = iter(range(requests))
    lock = threading.Lock()

    def client():
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                return
            first_token_ms(port, [100 + turn, *range(200, 215)], 64)

    clients = [threading.Thread(target=client) for _ in range(8)]
    [thread.start() for thread in clients]
    [thread.join() for thread in clients]


def first_token_ms(port, prompt, tokens=4):
    body = {"model": served(port), "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    started = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    first, ended = None, False
    for line in reply:
        if line.startswith(b"data: ") and first is None:
            first = time.monotonic() - started
        ended = ended or line.startswith(b"data: [DONE]")
    if reply.status != 200 or not ended:
        raise SystemExit(f"a stream ended early, status {reply.status}")
    return first * 1e3


NAMES = {}


def served(port):
    if port not in NAMES:
        NAMES[port] = json.loads(get(port, "/v1/models"))["data"][0]["id"]
    return NAMES[port]


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    reply = connection.getresponse()
    body = reply.read()
    if reply.status != 200:
        raise OSError(reply.status)
    return body


def wait_ready(port):
    deadline = time.monotonic() + 60
    while True:
        try:
            return get(port, "/ready")
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit("not ready within 60 s")
            time.sleep(0.01)


def start(command):
    return subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def stop(process):
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=60)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def resident_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
