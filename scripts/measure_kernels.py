#!/usr/bin/env python3
"""Checks and times the prompt attention kernel by itself on a Hopper GPU: the figures per kernel of docs/benchmarks/h200.md.

    python3 scripts/measure_kernels.py --fatbin target/release/build/thalweg-worker-*/out/prefill.fatbin

Needs PyTorch and the driver. Ragged prompts are compared with a softmax in float32 first. Then each shape is timed in rounds, ours and
PyTorch's cuDNN attention (contiguous keys and values, not paged) in turn, so that both meet the same clocks; medians are told.
"""

import argparse
import ctypes
import math
import random
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BLOCK, ROWS, THREADS, CHUNK, ROUNDS = 16, 128, 384, 256, 9
SHARED_BYTES = {64: 114_848, 128: 229_536}
CUDA = ctypes.CDLL("libcuda.so.1")
RAGGED = [(0, 17), (3, 63), (0, 65), (200, 130), (512, 33), (255, 20), (0, 300), (700, 1), (15, 2), (128, 128), (1111, 777)]
# Head size, query and KV heads, window, rows of (context, new tokens).
SHAPES = {
    "8192": (128, (32, 8), 0, [(0, 8192)]),
    "2048": (128, (32, 8), 0, [(0, 2048)]),
    "4 x 2048": (128, (32, 8), 0, [(0, 2048)] * 4),
    "16 x 2048": (128, (32, 8), 0, [(0, 2048)] * 16),
    "8 x 1024": (128, (32, 8), 0, [(0, 1024)] * 8),
    "six of 100 to 4000": (128, (32, 8), 0, [(0, new) for new in (100, 4000, 700, 1500, 900, 300)]),
    "8192 behind 24576": (128, (32, 8), 0, [(24576, 8192)]),
    "8192, window of 1024": (128, (32, 8), 1024, [(0, 8192)]),
    "8192, 32 on 32 heads": (128, (32, 32), 0, [(0, 8192)]),
    "8192, heads of 64": (64, (32, 8), 0, [(0, 8192)]),
}


def call(name, *args):
    if code := getattr(CUDA, name)(*args):
        raise SystemExit(f"{name} failed with CUDA error {code}")


class Kernel:
    def __init__(self, fatbin, dim):
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoad", ctypes.byref(module), fatbin.encode())
        call("cuModuleGetFunction", ctypes.byref(self.function), module, f"attn_prefill_{dim}".encode())
        self.shared = SHARED_BYTES[dim]
        call("cuFuncSetAttribute", self.function, 8, self.shared)

    def launch(self, case):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call("cuLaunchKernel", self.function, case.blocks, 1, 1, THREADS, 1, 1, self.shared, stream, case.args, None)


def tensor_map(tensor, sizes, strides, box):
    """The driver's layout of a bf16 array; returns what keeps it alive, and its address."""
    memory = ctypes.create_string_buffer(2 * 128)
    address = ctypes.addressof(memory) + -ctypes.addressof(memory) % 128
    rank, at = len(sizes), ctypes.c_void_p(tensor.data_ptr())
    arrays = [(ctypes.c_uint64 * len(x))(*x) for x in (sizes, strides)]
    arrays += [(ctypes.c_uint32 * len(x))(*x) for x in (box, [1] * rank)]
    # bf16, no interleave, 128-byte swizzle, 256 bytes to L2, zeros outside.
    call("cuTensorMapEncodeTiled", ctypes.c_void_p(address), 9, rank, at, *arrays, 0, 3, 3, 0)
    return memory, address


class Case:
    """Rows of (context, new tokens) of one layer: blocks in any order, NaN where nothing was written."""

    def __init__(self, dim, heads, rows, window=0, sharpness=1.0):
        self.dim, (self.q_heads, self.kv_heads), self.rows, self.window = dim, heads, rows, window
        self.scale, self.group = sharpness / math.sqrt(dim), heads[0] // heads[1]
        self.tokens, all_heads = sum(new for _, new in rows), heads[0] + 2 * heads[1]
        nan = {"dtype": torch.bfloat16, "device": "cuda"}
        self.qkv = torch.full((self.tokens, all_heads, dim), math.nan, **nan)
        self.qkv[:, : self.q_heads] = torch.randn((self.tokens, self.q_heads, dim), **nan)
        self.out = torch.full((self.tokens, self.q_heads, dim), math.nan, **nan)
        needed = [(self.first(context), -(-(context + new) // BLOCK)) for context, new in rows]
        order = random.sample(range(2 * sum(end for _, end in needed)), sum(end - first for first, end in needed))
        self.cache = [torch.full((max(order) + 1, self.kv_heads, BLOCK, dim), math.nan, **nan) for _ in range(2)]
        self.contents, meta, tables, start = [], [], [], 0
        for index, ((context, new), (first, end)) in enumerate(zip(rows, needed)):
            meta += [start, new, context, index, len(tables), 0, first, 0]
            blocks, start = order[len(tables) : len(tables) + end - first], start + new
            tables += blocks
            self.contents.append([self.fill(cache, blocks, context + new - first * BLOCK) for cache in self.cache])
        self.prepare(meta, tables, self.items())

    def first(self, position):
        return max(0, position + 1 - self.window) // BLOCK if self.window else 0

    def fill(self, cache, blocks, keys):
        x = torch.randn((len(blocks) * BLOCK, self.kv_heads, self.dim), dtype=torch.bfloat16, device="cuda")
        x[keys:] = math.nan
        cache[torch.tensor(blocks, device="cuda")] = x.view(-1, BLOCK, self.kv_heads, self.dim).transpose(1, 2)
        return x[:keys]

    def items(self):
        """As worker/src/backend/cuda/items.rs has them."""
        tile, items = ROWS // self.group, []
        for row, (context, new) in enumerate(self.rows):
            for start in range(0, new, tile):
                last = context + min(start + tile, new) - 1
                items.append((row, start, self.first(context + start) * BLOCK // CHUNK, last // CHUNK + 1))
        return sorted(items, key=lambda i: (-(i[3] - i[2] - 1).bit_length(), i[0], -i[1]))

    def prepare(self, meta, tables, items):
        counts = [self.tokens] + [0] * 5 + [len(items)] + [0] * 9
        self.kept = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (counts, meta, tables, items)]
        counts, *others = (ctypes.c_void_p(x.data_ptr()) for x in [*self.kept, self.out])
        numbers = [counts, ctypes.c_int(0), *others, ctypes.c_int(self.q_heads), ctypes.c_int(self.kv_heads)]
        numbers += [ctypes.c_float(self.scale), ctypes.c_int(self.window)]
        row, all_heads, box = self.dim * 2, self.qkv.shape[1], (64, self.group, ROWS // self.group)
        maps = [tensor_map(self.qkv, (self.dim, all_heads, self.tokens), (row, all_heads * row), box)]
        maps += [tensor_map(cache, (self.dim, 2**31 - BLOCK), (row,), (64, BLOCK)) for cache in self.cache]
        self.kept += numbers + maps
        addresses = [ctypes.addressof(x) for x in numbers] + [address for _, address in maps]
        self.args = (ctypes.c_void_p * len(addresses))(*addresses)
        self.blocks = min(torch.cuda.get_device_properties(0).multi_processor_count, len(items) * self.kv_heads)

    def expected(self):
        out, start = torch.empty(self.out.shape, device="cuda"), 0
        for (context, new), (keys, values) in zip(self.rows, self.contents):
            seen = torch.arange(len(keys), device="cuda") + self.first(context) * BLOCK
            own = torch.arange(context, context + new, device="cuda")[:, None]
            hidden = seen > own if not self.window else (seen > own) | (seen <= own - self.window)
            for head in range(self.q_heads):
                scores = self.qkv[start : start + new, head].float() @ keys[:, head // self.group].float().T * self.scale
                weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
                out[start : start + new, head] = weights @ values[:, head // self.group].float()
            start += new
        return out

    def operations(self):
        seen = (min(p, self.window or p) for context, new in self.rows for p in range(context + 1, context + new + 1))
        return 4 * self.dim * self.q_heads * sum(seen)

    def library(self):
        """The same by cuDNN, where it has such a mask; None where not."""
        if self.window or len(set(self.rows)) > 1 or self.rows[0][0]:
            return None
        sizes = [(len(self.rows), heads, self.rows[0][1], self.dim) for heads in (self.q_heads, self.kv_heads)]
        q, k = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in sizes)

        def run():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

        return run


def check(kernels):
    ratios = []
    for dim, kernel in kernels.items():
        for heads in ((4, 4), (3, 1), (8, 2), (8, 1), (16, 1)):
            for window, sharpness in ((0, 1.0), (0, 12.0), (1, 1.0), (16, 1.0), (100, 1.0), (128, 12.0), (300, 1.0)):
                case = Case(dim, heads, RAGGED, window, sharpness)
                kernel.launch(case)
                expected = case.expected()
                of_tolerance = ((case.out.float() - expected).abs() / (expected.abs() / 100 + 0.01)).max().item()
                if not of_tolerance <= 1:
                    raise SystemExit(f"{heads} heads of {dim}, window {window}, times {sharpness}: {of_tolerance} of the tolerance")
                ratios.append(of_tolerance)
    print(f"{len(ratios)} ragged cases are right, the worst at {max(ratios):.3f} of the tolerance")


def measure(kernel, name, case):
    ways, operations = {"ours": lambda: kernel.launch(case)}, case.operations()
    if library := case.library():
        ways["cuDNN"] = library
    repeats, times = max(1, int(2e12 / operations)), {way: [] for way in ways}
    for _ in range(ROUNDS + 1):
        for way, run in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            times[way].append(begin.elapsed_time(end) / repeats)
    medians = {way: statistics.median(of[1:]) for way, of in times.items()}
    told = (f"{way} {ms * 1e3:8.1f} us {operations / ms / 1e9:5.0f} TFLOP/s" for way, ms in medians.items())
    print(f"{name:22}", "   ".join(told), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fatbin", required=True, help="prefill.fatbin of a build with the feature cuda")
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    kernels = {dim: Kernel(args.fatbin, dim) for dim in SHARED_BYTES}
    check(kernels)
    for name, (dim, heads, window, rows) in SHAPES.items():
        measure(kernels[dim], name, Case(dim, heads, rows, window))


if __name__ == "__main__":
    main()
