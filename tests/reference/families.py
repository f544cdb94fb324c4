"""The tiny models: one config.json of every family that the decoder covers."""

VOCAB = 320
BOS, EOS = 256, 257

COMMON = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def family(architecture, model_type, layers, **changes):
    return COMMON | {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": layers} | changes


CONFIGS = {
    "llama2": family(
        "LlamaForCausalLM", "llama", 3, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    # Groups of three query heads, and a rope whose frequencies are kept, smoothed and stretched within 32 pairs.
    "llama3": family(
        "LlamaForCausalLM", "llama", 2, hidden_size=192, num_attention_heads=6, hidden_act="silu", rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=False,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": family(
        "MistralForCausalLM", "mistral", 2, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10000.0,
        sliding_window=8, tie_word_embeddings=False,
    ),
    "qwen2": family(
        "Qwen2ForCausalLM", "qwen2", 2, hidden_size=512, hidden_act="silu", rms_norm_eps=1e-6,
        rope_theta=1000000.0, use_sliding_window=False, sliding_window=8, max_window_layers=1, tie_word_embeddings=True,
    ),
    "qwen3": family(
        "Qwen3ForCausalLM", "qwen3", 2, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1000000.0,
        attention_bias=False, use_sliding_window=False, sliding_window=None, tie_word_embeddings=False,
    ),
    "gemma3": family(
        "Gemma3ForCausalLM", "gemma3_text", 7, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6,
        query_pre_attn_scalar=48, sliding_window=8, rope_theta=1000000.0, rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=True,
    ),
}

# Written in shards named by an index; the others in one file.
SHARDED = {"mistral": 3}
# A plain prompt gets the beginning of sequence in front.
ADDS_BOS = {"llama2", "llama3", "mistral", "gemma3"}
