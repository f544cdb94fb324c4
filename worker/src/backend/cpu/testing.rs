//! What the backend's tests share.

use std::sync::Arc;

use thalweg_model::config::{Activation, Architecture, LayerKind, ModelConfig, Rope, RopeScaling};

use crate::plan::{SlotId, SlotInit};
use crate::sampling::SamplingParams;

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

/// A slot for a new sequence.
pub(super) fn slot(slot: u32, sampling: SamplingParams) -> SlotInit {
    let (prompt, output) = (Arc::from([]), Vec::new());
    SlotInit { slot: SlotId(slot), sampling: Arc::new(sampling), choice: 0, prompt, output }
}

/// Numbers between -1 and 1, the same for a seed.
pub(super) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
