//! Which tensors a configuration needs, of what shape, and what each format calls them.

use super::{LayerWeight, Weight};
use crate::config::{Architecture, ModelConfig};

/// Where names come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Gguf,
    Hub,
}

/// A tensor's shape: `[rows, cols]`, or `[rows]`.
pub(super) type Dims = (usize, Option<usize>);

/// Every tensor that the model must have.
pub(super) fn required(config: &ModelConfig) -> Vec<(Weight, Dims)> {
    let hidden = config.hidden_size;
    let mut roles =
        vec![(Weight::Embedding, (config.vocab_size, Some(hidden))), (Weight::OutputNorm, (hidden, None))];
    if !config.tied_embeddings {
        roles.push((Weight::Output, (config.vocab_size, Some(hidden))));
    }
    for layer in 0..config.num_layers() {
        roles.extend(layer_roles(config).map(|(role, dims)| (Weight::Layer(layer, role), dims)));
    }
    roles
}

fn layer_roles(config: &ModelConfig) -> impl Iterator<Item = (LayerWeight, Dims)> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let q = config.num_heads * config.head_dim;
    let kv = config.num_kv_heads * config.head_dim;
    let always = [
        (LayerWeight::AttentionNorm, (hidden, None)),
        (LayerWeight::Q, (q, Some(hidden))),
        (LayerWeight::K, (kv, Some(hidden))),
        (LayerWeight::V, (kv, Some(hidden))),
        (LayerWeight::O, (hidden, Some(q))),
        (LayerWeight::MlpNorm, (hidden, None)),
        (LayerWeight::Gate, (inner, Some(hidden))),
        (LayerWeight::Up, (inner, Some(hidden))),
        (LayerWeight::Down, (hidden, Some(inner))),
    ];
    let biases =
        [(LayerWeight::QBias, (q, None)), (LayerWeight::KBias, (kv, None)), (LayerWeight::VBias, (kv, None))];
    let qk_norms =
        [(LayerWeight::QNorm, (config.head_dim, None)), (LayerWeight::KNorm, (config.head_dim, None))];
    let post_norms =
        [(LayerWeight::PostAttentionNorm, (hidden, None)), (LayerWeight::PostMlpNorm, (hidden, None))];
    let biases = biases.into_iter().filter(|_| config.qkv_bias);
    let qk_norms = qk_norms.into_iter().filter(|_| config.qk_norm);
    let post_norms = post_norms.into_iter().filter(|_| config.post_norms);
    always.into_iter().chain(biases).chain(qk_norms).chain(post_norms)
}

impl Naming {
    /// The tensor's name in the file.
    pub(super) fn name(self, weight: Weight, architecture: Architecture) -> String {
        match (self, weight) {
            (Self::Gguf, Weight::Embedding) => "token_embd.weight".to_owned(),
            (Self::Gguf, Weight::Output) => "output.weight".to_owned(),
            (Self::Gguf, Weight::OutputNorm) => "output_norm.weight".to_owned(),
            (Self::Gguf, Weight::Layer(layer, role)) => format!("blk.{layer}.{}", gguf_name(role)),
            (Self::Hub, Weight::Embedding) => "model.embed_tokens.weight".to_owned(),
            (Self::Hub, Weight::Output) => "lm_head.weight".to_owned(),
            (Self::Hub, Weight::OutputNorm) => "model.norm.weight".to_owned(),
            (Self::Hub, Weight::Layer(layer, role)) => {
                format!("model.layers.{layer}.{}", hub_name(role, architecture))
            }
        }
    }

    /// The tensor belongs to a layer, and leaving it out would change answers.
    pub(super) fn matters(self, name: &str) -> bool {
        match self {
            Self::Gguf => name.starts_with("blk."),
            Self::Hub => name.starts_with("model.layers.") && !name.ends_with(".rotary_emb.inv_freq"),
        }
    }
}

fn gguf_name(role: LayerWeight) -> &'static str {
    match role {
        LayerWeight::AttentionNorm => "attn_norm.weight",
        LayerWeight::Q => "attn_q.weight",
        LayerWeight::K => "attn_k.weight",
        LayerWeight::V => "attn_v.weight",
        LayerWeight::QBias => "attn_q.bias",
        LayerWeight::KBias => "attn_k.bias",
        LayerWeight::VBias => "attn_v.bias",
        LayerWeight::QNorm => "attn_q_norm.weight",
        LayerWeight::KNorm => "attn_k_norm.weight",
        LayerWeight::O => "attn_output.weight",
        LayerWeight::PostAttentionNorm => "post_attention_norm.weight",
        LayerWeight::MlpNorm => "ffn_norm.weight",
        LayerWeight::Gate => "ffn_gate.weight",
        LayerWeight::Up => "ffn_up.weight",
        LayerWeight::Down => "ffn_down.weight",
        LayerWeight::PostMlpNorm => "post_ffw_norm.weight",
    }
}

/// Gemma's norm behind attention has the name that others give to the norm before the MLP.
fn hub_name(role: LayerWeight, architecture: Architecture) -> &'static str {
    match role {
        LayerWeight::AttentionNorm => "input_layernorm.weight",
        LayerWeight::Q => "self_attn.q_proj.weight",
        LayerWeight::K => "self_attn.k_proj.weight",
        LayerWeight::V => "self_attn.v_proj.weight",
        LayerWeight::QBias => "self_attn.q_proj.bias",
        LayerWeight::KBias => "self_attn.k_proj.bias",
        LayerWeight::VBias => "self_attn.v_proj.bias",
        LayerWeight::QNorm => "self_attn.q_norm.weight",
        LayerWeight::KNorm => "self_attn.k_norm.weight",
        LayerWeight::O => "self_attn.o_proj.weight",
        LayerWeight::PostAttentionNorm => "post_attention_layernorm.weight",
        LayerWeight::MlpNorm if architecture == Architecture::Gemma3 => "pre_feedforward_layernorm.weight",
        LayerWeight::MlpNorm => "post_attention_layernorm.weight",
        LayerWeight::Gate => "mlp.gate_proj.weight",
        LayerWeight::Up => "mlp.up_proj.weight",
        LayerWeight::Down => "mlp.down_proj.weight",
        LayerWeight::PostMlpNorm => "post_feedforward_layernorm.weight",
    }
}
