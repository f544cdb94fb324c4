"""Writes the tiny seeded checkpoints of every family, and what the numpy decoder answers for them.

    python tests/reference/tiny.py [FOLDER, default .cache/tiny]

Needs numpy. Each model is a folder as model hubs have it, with reference.json beside its weights:
  {"prompts": [{"ids": [...], "positions": [...], "logits": [[...] for each position],
                "greedy": [...], "greedy_gaps": [...]}]}
`logits` are those behind the token at each position; `greedy` continues the prompt by the best token, `greedy_gaps` says
by how much each was better than the second. `embeddings` has {"ids": [...], "last": [...], "mean": [...]}. `adapters/NAME` below a model's folder has a LoRA adapter, and a reference.json
of the model with it merged in.
"""

import hashlib
import json
import os
import pathlib
import struct
import sys

# These matrices are too small to be worth a second thread. numpy reads it once, when it is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

import adapters
import decoder
import families
import tokenizer
import weights

PROMPT_LENGTHS = [1, 5, 17, 48, 300]
# Longer prompts keep the logits of these: ends of blocks of 16, of chunks of 256, and of the prompt.
KEPT_POSITIONS = [0, 15, 16, 63, 64, 255, 256, 299]
ALL_POSITIONS_MAX = 48
GREEDY_TOKENS = 12
GREEDY_PROMPT_MAX = 48
# Around ends of blocks of 16 and of chunks of attention.
EMBEDDED_LENGTHS = [1, 15, 16, 17, 63, 65, 300]


def main():
    default = pathlib.Path(__file__).parents[2] / ".cache/tiny"
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for seed, name in enumerate(families.CONFIGS):
        config, tensors = families.CONFIGS[name], weights.tensors(families.CONFIGS[name], seed)
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in tokenizer.files(name).items():
            write_json(folder / file, content)
        write_json(folder / "reference.json", reference(config, tensors, seed))
        digest = write_weights(folder, tensors, families.SHARDED.get(name, 1))
        for number, (adapter, about) in enumerate(adapters.ADAPTERS.get(name, {}).items()):
            write_adapter(folder / "adapters" / adapter, (name, config, tensors), about, 100 + number)
        # Last, so that a folder with a config.json is whole.
        write_json(folder / "config.json", config)
        print(f"{name}: {digest}")


def write_adapter(folder, base, about, seed):
    name, config, tensors = base
    folder.mkdir(parents=True, exist_ok=True)
    changes = adapters.tensors(tensors, about, seed)
    write_json(folder / "adapter_config.json", adapters.config(name, about))
    write_safetensors(folder / "adapter_model.safetensors", changes)
    write_json(folder / "reference.json", reference(config, adapters.merged(tensors, about, changes), seed))


def reference(config, tensors, seed):
    draw = np.random.PCG64(1000 + seed)
    prompts = []
    for length in PROMPT_LENGTHS:
        ids = [int(raw % 256) for raw in draw.random_raw(length)]
        rows = decoder.logits(config, tensors, ids)
        every = range(length) if length <= ALL_POSITIONS_MAX else KEPT_POSITIONS
        prompt = {"ids": ids, "positions": list(every), "logits": [rounded(rows[at]) for at in every]}
        prompts.append(prompt | (greedy(config, tensors, ids) if length <= GREEDY_PROMPT_MAX else {}))
    return {"prompts": prompts, "embeddings": embeddings(config, tensors, draw)}


def embeddings(config, tensors, draw):
    out = []
    for length in EMBEDDED_LENGTHS:
        ids = [int(raw % 256) for raw in draw.random_raw(length)]
        pooled = {kind: rounded(decoder.embedding(config, tensors, ids, kind)) for kind in ("last", "mean")}
        out.append({"ids": ids} | pooled)
    return out


def greedy(config, tensors, prompt):
    ids, gaps = list(prompt), []
    for _ in range(GREEDY_TOKENS):
        row = decoder.logits(config, tensors, ids)[-1]
        second, best = np.argsort(row)[-2:]
        ids.append(int(best))
        gaps.append(round(float(row[best] - row[second]), 6))
    return {"greedy": ids[len(prompt):], "greedy_gaps": gaps}


def rounded(row):
    return [round(float(value), 7) for value in row]


def write_json(path, content):
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n")


def write_weights(folder, tensors, shards):
    """Writes safetensors; returns a digest of all weights."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        names = list(tensors)
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            write_safetensors(folder / file, part)
            weight_map |= dict.fromkeys(part, file)
        total = sum(value.nbytes for value in tensors.values())
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    digest = hashlib.sha256()
    for value in tensors.values():
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]


def write_safetensors(path, tensors):
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for name, value in tensors.items():
        offsets = [start, start + value.nbytes]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        start += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value, "<f4").tobytes())


if __name__ == "__main__":
    main()
