//! One description for every decoder family; readers of GGUF and config.json both end here.

pub(crate) mod limits;
mod rope;

pub use rope::{FrequencyFactors, Rope, RopeScaling};

/// Widest head that is served.
pub const HEAD_DIM_MAX: usize = 256;

/// The families that the one decoder covers. Differences are fields of [`ModelConfig`]; the name is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// Llama 2 and 3, and what shares their layout (SmolLM2).
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Qwen2 and 2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: q/k norm, no biases.
    Qwen3,
    /// Gemma 3 text: sandwich norms, GeGLU, scaled embeddings, local and global layers.
    Gemma3,
}

/// A decoder-only transformer.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct ModelConfig {
    /// Family, for logs and `Describe`.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of one head: even, at most [`HEAD_DIM_MAX`].
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context that the model was made for, in tokens.
    pub max_position: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Scale of q.k before the softmax.
    pub attention_scale: f32,
    /// Factor on embedding rows (Gemma: sqrt(hidden_size), rounded to bf16 by the reference), else 1.
    pub embedding_scale: f32,
    /// The output matrix is the embedding.
    pub tied_embeddings: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// q and k heads are RMS-normed before rope.
    pub qk_norm: bool,
    /// Norms after attention and after the MLP, before the residual is added (Gemma).
    pub post_norms: bool,
    /// Activation of the gate.
    pub activation: Activation,
    /// What kind each layer is, in order; its length is the number of layers.
    pub layers: Vec<LayerKind>,
    /// Tokens that a sliding layer sees, the current one included. Set when any layer slides.
    pub sliding_window: Option<usize>,
    /// Rotary embedding of full layers.
    pub rope: Rope,
    /// Rotary embedding of sliding layers.
    pub local_rope: Rope,
}

/// Activation of the MLP's gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// x * sigmoid(x).
    Silu,
    /// The tanh approximation of GELU.
    GeluTanh,
}

/// Reach of a layer's attention; also its KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// The whole context.
    Full,
    /// The last `sliding_window` tokens.
    Sliding,
}

impl ModelConfig {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Query heads per key/value head.
    pub fn gqa_group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Layers of one kind.
    pub fn layers_of(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|k| **k == kind).count()
    }

    /// Rotary embedding of one kind of layer.
    pub fn rope_of(&self, kind: LayerKind) -> Rope {
        match kind {
            LayerKind::Full => self.rope,
            LayerKind::Sliding => self.local_rope,
        }
    }
}
