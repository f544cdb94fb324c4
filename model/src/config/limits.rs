//! What any configuration must satisfy, checked before anything is allocated by it.

use std::path::Path;

use super::{HEAD_DIM_MAX, LayerKind, ModelConfig, Rope, RopeScaling};
use crate::error::ModelError;

const LAYERS_MAX: usize = 1024;
const HEADS_MAX: usize = 1024;
const WIDTH_MAX: usize = 1 << 20;
const VOCAB_MAX: usize = 1 << 24;
const POSITION_MAX: usize = 1 << 28;

/// Where a configuration came from: errors name the file, and its own word for a field.
#[derive(Clone, Copy)]
pub(crate) struct Origin<'a> {
    pub(crate) path: &'a Path,
    /// The format's key for a field, given by the name that config.json has for it.
    pub(crate) key: &'a dyn Fn(&str) -> String,
}

impl Origin<'_> {
    /// The number of layers, once it is known to be small enough to allocate by.
    pub(crate) fn layer_count(&self, count: usize) -> Result<usize, ModelError> {
        self.within("num_hidden_layers", count, LAYERS_MAX)?;
        Ok(count)
    }

    /// hidden_size / num_attention_heads, for models that do not give the width of a head.
    pub(crate) fn derived_head_dim(&self, hidden: usize, heads: usize) -> Result<usize, ModelError> {
        self.within("num_attention_heads", heads, HEADS_MAX)?;
        if hidden.is_multiple_of(heads) {
            return Ok(hidden / heads);
        }
        Err(self.wrong("hidden_size", hidden, &format!("a multiple of the {heads} attention heads")))
    }

    /// Every rule that holds across fields.
    pub(crate) fn check(&self, config: &ModelConfig) -> Result<(), ModelError> {
        self.layer_count(config.num_layers())?;
        self.within("hidden_size", config.hidden_size, WIDTH_MAX)?;
        self.within("intermediate_size", config.intermediate_size, WIDTH_MAX)?;
        self.within("vocab_size", config.vocab_size, VOCAB_MAX)?;
        self.within("max_position_embeddings", config.max_position, POSITION_MAX)?;
        self.within("num_attention_heads", config.num_heads, HEADS_MAX)?;
        self.within("num_key_value_heads", config.num_kv_heads, HEADS_MAX)?;
        self.within("head_dim", config.head_dim, HEAD_DIM_MAX)?;
        if !config.head_dim.is_multiple_of(2) {
            return Err(self.wrong("head_dim", config.head_dim, "an even number"));
        }
        if !config.num_heads.is_multiple_of(config.num_kv_heads) {
            let expected = format!("a divisor of the {} attention heads", config.num_heads);
            return Err(self.wrong("num_key_value_heads", config.num_kv_heads, &expected));
        }
        self.positive("rms_norm_eps", config.rms_norm_eps)?;
        self.positive("query_pre_attn_scalar", config.attention_scale)?;
        self.rope(&config.rope)?;
        self.rope(&config.local_rope)?;
        self.window(config)
    }

    fn window(&self, config: &ModelConfig) -> Result<(), ModelError> {
        if config.layers_of(LayerKind::Sliding) == 0 {
            return Ok(());
        }
        self.within("sliding_window", config.sliding_window.unwrap_or(0), POSITION_MAX)
    }

    fn rope(&self, rope: &Rope) -> Result<(), ModelError> {
        self.positive("rope_theta", rope.theta)?;
        match rope.scaling {
            RopeScaling::None | RopeScaling::Factors(_) => Ok(()),
            RopeScaling::Linear { factor } => self.positive("rope_scaling.factor", factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                self.positive("rope_scaling.factor", factor)?;
                self.positive("rope_scaling.low_freq_factor", low_freq_factor)?;
                self.positive("rope_scaling.high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    let expected = format!("more than low_freq_factor, {low_freq_factor}");
                    return Err(self.wrong("rope_scaling.high_freq_factor", high_freq_factor, &expected));
                }
                let key = "rope_scaling.original_max_position_embeddings";
                self.within(key, original_max_position, POSITION_MAX)
            }
        }
    }

    fn within(&self, field: &str, value: usize, max: usize) -> Result<(), ModelError> {
        if (1..=max).contains(&value) {
            return Ok(());
        }
        Err(self.wrong(field, value, &format!("1 to {max}")))
    }

    fn positive(&self, field: &str, value: f32) -> Result<(), ModelError> {
        if value.is_finite() && value > 0.0 {
            return Ok(());
        }
        Err(self.wrong(field, value, "a positive finite number"))
    }

    fn wrong(&self, field: &str, value: impl std::fmt::Display, expected: &str) -> ModelError {
        ModelError::malformed(self.path, format!("`{}` is {value}, expected {expected}", (self.key)(field)))
    }
}
