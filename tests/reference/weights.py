"""Seeded weights by their names in a hub's checkpoints, bit for bit the same on every machine."""

import numpy as np


def tensors(config, seed):
    """Name to float32 array, in the order in which they are drawn."""
    draw = Draw(seed)
    out = {"model.embed_tokens.weight": embedding(config, draw)}
    for layer in range(config["num_hidden_layers"]):
        for name, value in layer_tensors(config, draw):
            out[f"model.layers.{layer}.{name}"] = value
    out["model.norm.weight"] = norm(config, draw, config["hidden_size"])
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = draw.matrix(config["vocab_size"], config["hidden_size"])
    return out


def embedding(config, draw):
    """A tied one is the output matrix too, so that its size decides that of the logits."""
    rows, cols = config["vocab_size"], config["hidden_size"]
    return draw.matrix(rows, cols) if config["tie_word_embeddings"] else draw.uniform((rows, cols), 1.0)


def layer_tensors(config, draw):
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    kind = config["model_type"]
    rows = {"q": config["num_attention_heads"] * head}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * head
    yield "input_layernorm.weight", norm(config, draw, hidden)
    for name, count in rows.items():
        yield f"self_attn.{name}_proj.weight", draw.matrix(count, hidden)
        if kind == "qwen2":
            yield f"self_attn.{name}_proj.bias", draw.uniform((count,), 0.5)
    if kind in ("qwen3", "gemma3_text"):
        yield "self_attn.q_norm.weight", norm(config, draw, head)
        yield "self_attn.k_norm.weight", norm(config, draw, head)
    yield "self_attn.o_proj.weight", draw.matrix(hidden, rows["q"])
    yield "post_attention_layernorm.weight", norm(config, draw, hidden)
    if kind == "gemma3_text":
        yield "pre_feedforward_layernorm.weight", norm(config, draw, hidden)
        yield "post_feedforward_layernorm.weight", norm(config, draw, hidden)
    yield "mlp.gate_proj.weight", draw.matrix(inner, hidden)
    yield "mlp.up_proj.weight", draw.matrix(inner, hidden)
    yield "mlp.down_proj.weight", draw.matrix(hidden, inner)


def norm(config, draw, size):
    """Around 1, or around 0 for Gemma, which adds the 1 itself."""
    centre = 0.0 if config["model_type"] == "gemma3_text" else 1.0
    return (centre + draw.uniform((size,), 0.3)).astype(np.float32)


class Draw:
    """Uniform numbers from the raw bits of PCG64, which numpy keeps stable across versions, unlike its
    distributions."""

    def __init__(self, seed):
        self.bits = np.random.PCG64(seed)

    def uniform(self, shape, half_width):
        raw = self.bits.random_raw(int(np.prod(shape))) >> np.uint64(40)
        unit = raw.astype(np.float64) / 2**23 - 1.0
        return (unit * half_width).astype(np.float32).reshape(shape)

    def matrix(self, rows, cols):
        """Keeps the size of what it is multiplied with."""
        return self.uniform((rows, cols), (3.0 / cols) ** 0.5)
