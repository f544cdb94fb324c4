//! The configuration that a GGUF file's metadata gives, completed by its tensors.

use super::Metadata;
use crate::config::limits::Origin;
use crate::config::{Activation, Architecture, FrequencyFactors, LayerKind, ModelConfig, Rope, RopeScaling};
use crate::dequantize::dequantize_row;
use crate::error::ModelError;
use crate::tensors::TensorTable;

/// Gemma 3's base of the sliding layers, which older files leave out.
const GEMMA3_LOCAL_THETA: f32 = 10_000.0;
/// Gemma 3: every sixth layer sees the whole context, which older files leave out.
const GEMMA3_PATTERN: usize = 6;
/// Gemma 3 27B, the only one whose attention scale is not that of its head width.
const GEMMA3_27B_LAYERS: usize = 62;
/// Rope base of files that give none.
const THETA_DEFAULT: f32 = 10_000.0;
/// Per-frequency factors of Llama 3.1 and later.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// config.json's names of what [`Origin`] checks, with the key's end in GGUF.
const KEYS: [(&str, &str); 14] = [
    ("num_hidden_layers", "block_count"),
    ("hidden_size", "embedding_length"),
    ("intermediate_size", "feed_forward_length"),
    ("num_attention_heads", "attention.head_count"),
    ("num_key_value_heads", "attention.head_count_kv"),
    ("head_dim", "attention.key_length"),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
    ("max_position_embeddings", "context_length"),
    ("sliding_window", "attention.sliding_window"),
    ("sliding_window_pattern", "attention.sliding_window_pattern"),
    ("rope_theta", "rope.freq_base"),
    ("rope_local_base_freq", "rope.freq_base_swa"),
    ("rope_scaling.factor", "rope.scaling.factor"),
    ("vocab_size", "vocab_size"),
];

/// Reads and checks the configuration.
pub(super) fn read(metadata: &Metadata, tensors: &TensorTable) -> Result<ModelConfig, ModelError> {
    let (architecture, prefix) = architecture(metadata)?;
    let reader = Reader { metadata, tensors, architecture, prefix };
    let key = |field: &str| reader.key(field);
    let origin = Origin { path: metadata.path(), key: &key };
    reader.refuse_what_is_not_served()?;
    let config = reader.config(origin)?;
    origin.check(&config)?;
    Ok(config)
}

/// The served architectures, by the name in `general.architecture`, which begins the model's keys.
fn architecture(metadata: &Metadata) -> Result<(Architecture, &'static str), ModelError> {
    let name = metadata.string("general.architecture")?.unwrap_or_default();
    match name {
        "llama" if metadata.contains("llama.attention.sliding_window") => {
            Ok((Architecture::Mistral, "llama"))
        }
        "llama" => Ok((Architecture::Llama, "llama")),
        "qwen2" => Ok((Architecture::Qwen2, "qwen2")),
        "qwen3" => Ok((Architecture::Qwen3, "qwen3")),
        "gemma3" => Ok((Architecture::Gemma3, "gemma3")),
        "" => Err(ModelError::malformed(metadata.path(), "metadata key `general.architecture` is missing")),
        _ => Err(ModelError::unsupported(
            metadata.path(),
            format!("architecture `{name}`"),
            "use a model of llama, qwen2, qwen3 or gemma3",
        )),
    }
}

struct Reader<'a> {
    metadata: &'a Metadata,
    tensors: &'a TensorTable,
    architecture: Architecture,
    prefix: &'static str,
}

impl Reader<'_> {
    fn config(&self, origin: Origin<'_>) -> Result<ModelConfig, ModelError> {
        let gemma = self.architecture == Architecture::Gemma3;
        let layer_count = origin.layer_count(self.size("num_hidden_layers")?)?;
        let hidden_size = self.size("hidden_size")?;
        let num_heads = self.size("num_attention_heads")?;
        let head_dim = self.head_dim(origin, hidden_size, num_heads)?;
        let scaled_dim = if gemma && layer_count == GEMMA3_27B_LAYERS {
            origin.derived_head_dim(hidden_size, num_heads)?
        } else {
            head_dim
        };
        let rope = Rope {
            theta: self.theta("rope_theta")?.unwrap_or(THETA_DEFAULT),
            scaling: self.scaling(head_dim)?,
        };
        let local_rope = if gemma {
            let theta = self.theta("rope_local_base_freq")?.unwrap_or(GEMMA3_LOCAL_THETA);
            Rope { theta, scaling: RopeScaling::None }
        } else {
            rope
        };
        Ok(ModelConfig {
            architecture: self.architecture,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_heads,
            num_kv_heads: self.optional_size("num_key_value_heads")?.unwrap_or(num_heads),
            head_dim,
            vocab_size: self.vocab_size()?,
            max_position: self.size("max_position_embeddings")?,
            rms_norm_eps: self.epsilon()?,
            attention_scale: (scaled_dim as f32).sqrt().recip(),
            embedding_scale: if gemma { (hidden_size as f32).sqrt() } else { 1.0 },
            tied_embeddings: self.tensors.get("output.weight").is_none(),
            qkv_bias: self.architecture == Architecture::Qwen2
                || self.tensors.get("blk.0.attn_q.bias").is_some(),
            qk_norm: matches!(self.architecture, Architecture::Qwen3 | Architecture::Gemma3),
            post_norms: gemma,
            activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
            layers: self.layers(layer_count)?,
            sliding_window: self.optional_size("sliding_window")?.filter(|_| self.slides()),
            rope,
            local_rope,
        })
    }

    fn head_dim(&self, origin: Origin<'_>, hidden: usize, heads: usize) -> Result<usize, ModelError> {
        let head_dim = match self.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None => origin.derived_head_dim(hidden, heads)?,
        };
        for end in ["attention.value_length", "rope.dimension_count"] {
            let key = format!("{}.{end}", self.prefix);
            match self.metadata.u64(&key)? {
                Some(other) if other != head_dim as u64 => {
                    let what = format!("`{key}` of {other} where a head has {head_dim}");
                    return Err(
                        self.unsupported(what, "use a model whose keys, values and rope have one width")
                    );
                }
                _ => {}
            }
        }
        Ok(head_dim)
    }

    /// Keys that change the arithmetic in ways that the decoder does not have, where they are set at all.
    fn refuse_what_is_not_served(&self) -> Result<(), ModelError> {
        let key = format!("{}.expert_count", self.prefix);
        if self.metadata.u64(&key)?.is_some_and(|experts| experts > 0) {
            return Err(self.unsupported("a mixture of experts".to_owned(), "use a dense model"));
        }
        let key = format!("{}.attention.causal", self.prefix);
        if self.metadata.bool(&key)? == Some(false) {
            return Err(self
                .unsupported(format!("`{key}` of false"), "use a model whose tokens see only those before"));
        }
        for end in ["attn_logit_softcapping", "final_logit_softcapping"] {
            let key = format!("{}.{end}", self.prefix);
            if self.metadata.f32(&key)?.is_some_and(|cap| cap != 0.0) {
                return Err(self.unsupported(format!("`{key}`"), "use a model without it, such as Gemma 3"));
            }
        }
        Ok(())
    }

    /// Rows of the embedding.
    fn vocab_size(&self) -> Result<usize, ModelError> {
        let embedding = self.tensors.get("token_embd.weight");
        let rows = embedding.and_then(|tensor| tensor.shape.dims().first().copied());
        let Some(rows) = rows else {
            return Err(ModelError::malformed(self.metadata.path(), "tensor `token_embd.weight` is missing"));
        };
        match self.optional_size("vocab_size")? {
            Some(said) if said != rows => {
                let key = self.key("vocab_size");
                Err(self
                    .malformed(format!("`{key}` is {said}, but tensor `token_embd.weight` has {rows} rows")))
            }
            _ => Ok(rows),
        }
    }

    fn slides(&self) -> bool {
        matches!(self.architecture, Architecture::Mistral | Architecture::Gemma3)
    }

    fn layers(&self, count: usize) -> Result<Vec<LayerKind>, ModelError> {
        let pattern = match self.architecture {
            Architecture::Mistral => return Ok(vec![LayerKind::Sliding; count]),
            Architecture::Gemma3 => self.gemma3_pattern(count)?,
            _ => return Ok(vec![LayerKind::Full; count]),
        };
        let kind = |layer| if pattern(layer) { LayerKind::Sliding } else { LayerKind::Full };
        Ok((0..count).map(kind).collect())
    }

    /// Whether a layer slides: by a period or, in newer files, by a flag for each layer.
    fn gemma3_pattern(&self, count: usize) -> Result<Box<dyn Fn(usize) -> bool>, ModelError> {
        let key = self.key("sliding_window_pattern");
        if let Ok(Some(flags)) = self.metadata.ints(&key) {
            let flags: Vec<bool> = flags.take(count).map(|flag| flag != 0).collect();
            if flags.len() != count {
                return Err(self.malformed(format!("`{key}` has {} flags for {count} layers", flags.len())));
            }
            return Ok(Box::new(move |layer| flags[layer]));
        }
        let period = self.optional_size("sliding_window_pattern")?.unwrap_or(GEMMA3_PATTERN);
        if period == 0 {
            return Err(self.malformed(format!("`{key}` is 0, expected 1 or more")));
        }
        Ok(Box::new(move |layer| !(layer + 1).is_multiple_of(period)))
    }

    fn scaling(&self, head_dim: usize) -> Result<RopeScaling, ModelError> {
        if let Some(factors) = self.factors(head_dim)? {
            return Ok(RopeScaling::Factors(factors));
        }
        let key = format!("{}.rope.scaling.type", self.prefix);
        match self.metadata.string(&key)? {
            None | Some("none") => Ok(RopeScaling::None),
            Some("linear") => match self.metadata.f32(&self.key("rope_scaling.factor"))? {
                Some(factor) => Ok(RopeScaling::Linear { factor }),
                None => Err(self.malformed(format!("`{}` is missing", self.key("rope_scaling.factor")))),
            },
            Some(kind) => Err(self.unsupported(
                format!("`{key}` of {kind}"),
                "use a model with linear or Llama 3 rope scaling, or none",
            )),
        }
    }

    fn factors(&self, head_dim: usize) -> Result<Option<FrequencyFactors>, ModelError> {
        let Some(tensor) = self.tensors.get(ROPE_FACTORS) else { return Ok(None) };
        let pairs = head_dim / 2;
        if tensor.shape.dims() != [pairs] {
            let reason = format!("tensor `{ROPE_FACTORS}` has shape {:?}, expected [{pairs}]", tensor.shape);
            return Err(ModelError::malformed(self.tensors.path(tensor), reason));
        }
        let mut factors = vec![0.0; pairs];
        dequantize_row(tensor.dtype, self.tensors.bytes(tensor), &mut factors);
        match FrequencyFactors::new(&factors) {
            Some(factors) => Ok(Some(factors)),
            None => {
                let reason =
                    format!("tensor `{ROPE_FACTORS}` holds factors that are not positive and finite");
                Err(ModelError::malformed(self.tensors.path(tensor), reason))
            }
        }
    }

    fn epsilon(&self) -> Result<f32, ModelError> {
        let key = self.key("rms_norm_eps");
        self.metadata.f32(&key)?.ok_or_else(|| self.malformed(format!("metadata key `{key}` is missing")))
    }

    fn theta(&self, field: &str) -> Result<Option<f32>, ModelError> {
        self.metadata.f32(&self.key(field))
    }

    fn size(&self, field: &str) -> Result<usize, ModelError> {
        self.optional_size(field)?
            .ok_or_else(|| self.malformed(format!("metadata key `{}` is missing", self.key(field))))
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        Ok(self.metadata.u32(&self.key(field))?.map(|value| value as usize))
    }

    fn key(&self, field: &str) -> String {
        let end = KEYS.iter().find(|(name, _)| *name == field).map_or(field, |(_, end)| end);
        format!("{}.{end}", self.prefix)
    }

    fn malformed(&self, reason: String) -> ModelError {
        ModelError::malformed(self.metadata.path(), reason)
    }

    fn unsupported(&self, what: String, instead: &str) -> ModelError {
        ModelError::unsupported(self.metadata.path(), what, instead)
    }
}
