//! What the backend's tests share.

use thalweg_model::config::{Activation, Architecture, LayerKind, ModelConfig, Rope, RopeScaling};

/// A model of two layers, one of each kind where there is a window.
pub(super) fn config(heads: usize, kv_heads: usize, head_dim: usize, window: Option<usize>) -> ModelConfig {
    let rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: heads * head_dim,
        intermediate_size: 64,
        num_heads: heads,
        num_kv_heads: kv_heads,
        head_dim,
        vocab_size: 100,
        max_position: 4096,
        rms_norm_eps: 1e-5,
        attention_scale: 0.1,
        embedding_scale: 1.0,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        post_norms: false,
        activation: Activation::Silu,
        layers: vec![LayerKind::Full, if window.is_some() { LayerKind::Sliding } else { LayerKind::Full }],
        sliding_window: window,
        rope,
        local_rope: rope,
    }
}
