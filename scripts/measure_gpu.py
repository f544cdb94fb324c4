"""The table of docs/benchmarks/h200.md: one GPU, an 8B in dummy weights, engine alone and over HTTP through the router.

Needs only Python and the binary: python3 scripts/measure_gpu.py --binary thalweg --model tests/gpu-models/llama-3.1-8b
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time

VOCABULARY = 128_000
# Weights without the embedding, and attention: the count of floating-point operations.
WEIGHTS, LAYERS, HIDDEN = 6.98e9, 32, 4096


def engine(options, *flags):
    """Figures of `thalweg bench engine`."""
    command = [options.binary, "bench", "engine", "--model", options.model, "--device", "cuda", "--load-format", "dummy"]
    command += ["--json", "--log-level", "warn", "--repeat", "2", *map(str, flags)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def engine_rows(options):
    """Rows that need no HTTP: (name, value, unit)."""
    decode = [("decode, batch 1", 1, 512), ("decode, batch 1 at 32k context", 1, 32_000), ("step, 64 sequences", 64, 512)]
    decode += [("step, 256 sequences", 256, 512), ("step, 64 sequences at 4k context", 64, 4096)]
    for name, batch, prompt in decode:
        if not options.wants(name):
            continue
        flags = ["--prompt", prompt, "--output", 128, "--batch", batch, "--max-num-seqs", batch]
        flags += ["--max-model-len", prompt + 256, "--max-num-batched-tokens", 8192]
        figures = engine(options, *flags)
        yield name, figures["step_ms"], "ms"
        if batch == 256:
            yield "host, engine thread, 256 sequences", figures["host_us"], "us"
    for prompt in (512, 2048, 8192, 32_768):
        if not options.wants(f"time to first token, {prompt}"):
            continue
        flags = ["--prompt", prompt, "--output", 4, "--batch", 1, "--max-num-seqs", 8, "--max-model-len", prompt + 64]
        figures = engine(options, *flags, "--max-num-batched-tokens", 8192)
        yield f"time to first token, {prompt}", prompt / figures["prefill_tokens_per_second"] * 1e3, "ms"
    if options.wants("prefill 16 x 2048"):
        flags = ["--prompt", 2048, "--output", 16, "--batch", 16, "--max-num-seqs", 16, "--max-model-len", 4096]
        figures = engine(options, *flags, "--max-num-batched-tokens", 8192)
        operations = 2 * WEIGHTS + 4 * HIDDEN * LAYERS * 1024
        yield "prefill 16 x 2048", figures["prefill_tokens_per_second"] * operations / 1e12, "TFLOP/s"
    for batch in (1, 64):
        if not options.wants(f"--deterministic, {batch} sequences"):
            continue
        flags = ["--prompt", 512, "--output", 128, "--batch", batch, "--max-num-seqs", batch, "--max-model-len", 1024]
        yield f"--deterministic, {batch} sequences", engine(options, *flags, "--deterministic")["step_ms"], "ms"


class Completion(asyncio.Protocol):
    """One streamed completion; little work an event, since hundreds of streams share this thread with the clock."""

    def __init__(self, request):
        self.request, self.begin, self.first = request, time.perf_counter(), None
        self.head, self.tail, self.ended = b"", b"", asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        transport.write(self.request)

    def data_received(self, data):
        if self.first is None:
            self.head += data
            if b"data:" in self.head:
                self.first = time.perf_counter()
        self.tail = (self.tail + data[-64:])[-64:]

    def connection_lost(self, _error):
        self.ended.set_result(time.perf_counter())


async def complete(port, prompt, output):
    """Streams one completion; seconds to the first and last token."""
    body = {"model": "m", "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True, "temperature": 0}
    body["return_token_ids"] = True  # an event a token, though random tokens spell no text
    body = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    request = head.encode() + b"connection: close\r\n\r\n" + body
    loop = asyncio.get_running_loop()
    _, stream = await loop.create_connection(lambda: Completion(request), "127.0.0.1", port)
    end = await stream.ended
    if b" 200 " not in stream.head[:20] or b"[DONE]" not in stream.tail:
        raise RuntimeError(stream.head[:300])
    return stream.first - stream.begin, end - stream.begin


async def load(port, prompts, output, clients):
    """All prompts by so many clients: seconds in all, and each one's times."""
    queue, times = list(enumerate(prompts)), []

    async def client():
        while queue:
            times.append(await complete(port, queue.pop()[1], output))

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - begin, times


def prompts(seed, count, tokens, shared=0):
    draw = random.Random(seed)
    ids = lambda n: [draw.randrange(VOCABULARY) for _ in range(n)]
    common = ids(shared)
    return [common + ids(tokens) for _ in range(count)]


def http_rows(options):
    """Rows through router and worker: a first start, and a second that finds the plans of the first."""
    command = [options.binary, "up", "--model", options.model, "--device", "cuda", "--load-format", "dummy", "--http", "127.0.0.1:0"]
    command += ["--served-model-name", "m", "--max-num-seqs", "256", "--max-model-len", "4096", "--log-level", "warn"]
    with tempfile.TemporaryDirectory() as plans:
        environment = os.environ | {"THALWEG_CUDA_PLAN_CACHE": plans}
        begin = time.perf_counter()
        if options.wants("first start to ready, no plans kept"):
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
                server.stdout.readline()
                yield "first start to ready, no plans kept", time.perf_counter() - begin, "s"
                server.terminate()
        yield from served_rows(options, command, environment)


def served_rows(options, command, environment):
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            line = server.stdout.readline()
            yield "start to ready", time.perf_counter() - begin, "s"
            port = int(re.search(r":(\d+)/v1", line).group(1))
            run = lambda *arguments: asyncio.run(load(port, *arguments))
            run(prompts(0, 8, 512), 16, 8)
            for clients, count in ((64, 192), (256, 512)):
                if not options.wants(f"HTTP, {clients} clients"):
                    continue
                seconds, times = run(prompts(clients, count, 512), 256, clients)
                yield f"HTTP, {clients} clients", count * 256 / seconds, "tokens/s"
                yield f"HTTP, {clients} clients, TPOT p50", statistics.median((e - f) / 255 for f, e in times) * 1e3, "ms"
            if options.wants("512 requests of 1024 in, 128 out"):
                seconds, _ = run(prompts(1, 512, 1024), 128, 512)
                yield "512 requests of 1024 in, 128 out", 512 / seconds, "requests/s"
            if options.wants("256 requests sharing 2048, 128 own, 64 out"):
                seconds, _ = run(prompts(2, 256, 128, shared=2048), 64, 256)
                yield "256 requests sharing 2048, 128 own, 64 out", 256 / seconds, "requests/s"
        finally:
            server.terminate()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", choices=["engine", "http"])
    parser.add_argument("--rows", default="", metavar="REGEX", help="rows whose name it finds, instead of all")
    options = parser.parse_args()
    options.wants = lambda name: re.search(options.rows, name) is not None
    table = {}
    for _ in range(options.runs):
        for kind, rows in (("engine", engine_rows), ("http", http_rows)):
            if options.only in (None, kind):
                for name, value, unit in rows(options):
                    table.setdefault((name, unit), []).append(value)
                    print(f"{name:<46} {value:10.2f} {unit}", flush=True)
    print("\n| | " + " | ".join(f"run {i + 1}" for i in range(options.runs)) + " |\n|---|" + "---|" * options.runs)
    for (name, unit), values in table.items():
        print(f"| {name}, {unit} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


if __name__ == "__main__":
    main()
