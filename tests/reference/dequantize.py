"""Writes model/tests/checkpoint/data/dequantize.json: random blocks of every GGUF type and their weights as the `gguf`
package of llama.cpp's authors decodes them. Run once, in an environment with `pip install gguf==0.19.0`."""

import json
import pathlib

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

BLOCKS = 2
# Where each type keeps its half-precision scales: random bytes there would give infinities.
SCALES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.F16: [0], Type.BF16: [], Type.F32: [],
}


def cases():
    rng = np.random.Generator(np.random.PCG64(20))
    for kind, scales in SCALES.items():
        _, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = BLOCKS if block_bytes > 4 else 16
        data = rng.integers(0, 256, size=(blocks, block_bytes), dtype=np.uint8)
        for at in scales:
            data[:, at:at + 2] = rng.uniform(-2, 2, size=(blocks, 1)).astype("<f2").view(np.uint8)
        if kind == Type.F32:
            data = rng.normal(size=(blocks, 1)).astype("<f4").view(np.uint8)
        if kind == Type.BF16:
            data[:, 1] = (data[:, 1] & 0x80) | 0x3F
        flat = data.reshape(-1)
        values = flat.view("<f2" if kind == Type.F16 else "<f4") if kind in (Type.F16, Type.F32) else dequantize(flat, kind)
        yield {"dtype": kind.name, "bytes": flat.tobytes().hex(), "bits": values.astype("<f4").tobytes().hex()}


path = pathlib.Path(__file__).parents[2] / "model/tests/checkpoint/data/dequantize.json"
path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases()) + "\n]\n")
