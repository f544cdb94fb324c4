"""Writes tests/golden/smollm2-135m-instruct-q4_1-embeddings.json: embeddings of the served GGUF file by the numpy decoder, with the
weights as the `gguf` package of llama.cpp's authors decodes them. Run once, in an environment with `pip install gguf==0.19.0`:

    python tests/reference/embeddings.py .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import pathlib
import sys

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

import decoder

LENGTHS = [1, 15, 16, 17, 63, 65]
# Names of a layer's tensors in GGUF and in hubs' checkpoints.
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def main():
    reader = GGUFReader(sys.argv[1])
    config = read_config(reader)
    weights = dict(read_weights(reader, config))
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    draw, out = np.random.PCG64(7), []
    for length in LENGTHS:
        ids = [int(raw % config["vocab_size"]) for raw in draw.random_raw(length)]
        pooled = {kind: rounded(decoder.embedding(config, weights, ids, kind)) for kind in ("last", "mean")}
        out.append({"ids": ids} | pooled)
    path = pathlib.Path(__file__).parents[1] / "golden/smollm2-135m-instruct-q4_1-embeddings.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in out) + "\n]\n")


def read_config(reader):
    def field(name):
        return reader.fields[f"llama.{name}"].contents()

    heads = field("attention.head_count")
    return {
        "model_type": "llama",
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv"),
        "head_dim": field("embedding_length") // heads,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
    }


def read_weights(reader, config):
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        value = dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])
        if stem in WHOLE:
            yield f"{WHOLE[stem]}.weight", value
            continue
        _, layer, part = stem.split(".")
        if part in ("attn_q", "attn_k"):
            value = half_split(value, config["head_dim"])
        yield f"model.layers.{layer}.{LAYER[part]}.weight", value


def half_split(rows, width):
    """GGUF keeps the rows of each head in the order of interleaved rope: 2i and 2i + 1 belong at i and i + width / 2."""
    heads = rows.reshape(-1, width // 2, 2, rows.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(rows.shape)


def rounded(row):
    return [round(float(value), 7) for value in row]


if __name__ == "__main__":
    main()
