"""A plain decoder in numpy: float64 throughout, one sequence, no cache, no batching. Written to be read beside the
papers and checked against transformers (check_transformers.py), not to be fast."""

import numpy as np


def logits(config, weights, ids):
    """`[len(ids), vocab]`: row i scores the token behind ids[: i + 1]."""
    name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return hidden(config, weights, ids) @ weights[name].astype(np.float64).T


def embedding(config, weights, ids, pooling):
    """Of length 1: the last token's hidden state, or the mean of all tokens'."""
    states = hidden(config, weights, ids)
    pooled = {"last": states[-1], "mean": states.mean(0)}[pooling]
    return pooled / np.linalg.norm(pooled)


def hidden(config, weights, ids):
    """`[len(ids), hidden]`, behind the final norm."""
    embedding = weights["model.embed_tokens.weight"].astype(np.float64)
    x = embedding[np.asarray(ids)]
    if is_gemma(config):
        x = x * np.float64(np.float32(config["hidden_size"] ** 0.5))
    for layer in range(config["num_hidden_layers"]):
        x = block(config, Layer(weights, layer), kind_of(config, layer), x)
    return rms_norm(config, x, weights["model.norm.weight"])


class Layer:
    def __init__(self, weights, layer):
        self.weights, self.prefix = weights, f"model.layers.{layer}."

    def __getitem__(self, name):
        return self.weights[self.prefix + name].astype(np.float64)

    def __contains__(self, name):
        return self.prefix + name in self.weights


def block(config, layer, kind, x):
    attended = attention(config, layer, kind, rms_norm(config, x, layer["input_layernorm.weight"]))
    if is_gemma(config):
        x = x + rms_norm(config, attended, layer["post_attention_layernorm.weight"])
        inner = mlp(config, layer, rms_norm(config, x, layer["pre_feedforward_layernorm.weight"]))
        return x + rms_norm(config, inner, layer["post_feedforward_layernorm.weight"])
    x = x + attended
    return x + mlp(config, layer, rms_norm(config, x, layer["post_attention_layernorm.weight"]))


def attention(config, layer, kind, x):
    heads, kv_heads, width = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q = project(layer, "q", x).reshape(len(x), heads, width)
    k = project(layer, "k", x).reshape(len(x), kv_heads, width)
    v = project(layer, "v", x).reshape(len(x), kv_heads, width)
    if "self_attn.q_norm.weight" in layer:
        q = rms_norm(config, q, layer["self_attn.q_norm.weight"])
        k = rms_norm(config, k, layer["self_attn.k_norm.weight"])
    angles = np.arange(len(x))[:, None] * frequencies(config, kind)[None, :]
    q, k = rotate(q, angles), rotate(k, angles)
    scale = config.get("query_pre_attn_scalar", width) ** -0.5
    seen = visible(config, kind, len(x))
    out = np.empty_like(q)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = np.where(seen, q[:, head] @ k[:, shared].T * scale, -np.inf)
        out[:, head] = softmax(scores) @ v[:, shared]
    return out.reshape(len(x), heads * width) @ layer["self_attn.o_proj.weight"].T


def project(layer, name, x):
    out = x @ layer[f"self_attn.{name}_proj.weight"].T
    bias = f"self_attn.{name}_proj.bias"
    return out + layer[bias] if bias in layer else out


def visible(config, kind, length):
    """Causal; a sliding layer sees the last `sliding_window` tokens, the current one included."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    seen = distance >= 0
    return seen & (distance < config["sliding_window"]) if kind == "sliding_attention" else seen


def kind_of(config, layer):
    if "layer_types" in config:
        return config["layer_types"][layer]
    return "sliding_attention" if config["model_type"] == "mistral" else "full_attention"


def frequencies(config, kind):
    local = is_gemma(config) and kind == "sliding_attention"
    theta = config["rope_local_base_freq"] if local else config["rope_theta"]
    plain = theta ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    scaling = config.get("rope_scaling")
    if local or not scaling:
        return plain
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"]
    return np.array([llama3(scaling, frequency) for frequency in plain])


def llama3(scaling, frequency):
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1's model card)."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling["factor"]


def rotate(x, angles):
    """Dimension i pairs with i + width / 2."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mlp(config, layer, x):
    gate = x @ layer["mlp.gate_proj.weight"].T
    gate = gelu_tanh(gate) if is_gemma(config) else gate / (1 + np.exp(-gate))
    return (gate * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def rms_norm(config, x, weight):
    weight = weight.astype(np.float64) + (1.0 if is_gemma(config) else 0.0)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weight


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def is_gemma(config):
    return config["model_type"] == "gemma3_text"
