//! The configuration that a folder's config.json gives, with the defaults of transformers' classes.

use std::path::Path;

use super::json::{Keys, read_object};
use super::rope::{self, DefaultThetas};
use crate::config::limits::Origin;
use crate::config::{Activation, Architecture, LayerKind, ModelConfig};
use crate::error::ModelError;

/// What transformers assumes where config.json is silent.
struct Defaults {
    architecture: Architecture,
    head_dim: Option<usize>,
    kv_heads: Option<usize>,
    max_position: Option<usize>,
    sliding_window: Option<usize>,
    tied: bool,
    thetas: DefaultThetas,
    activation: Activation,
}

/// Reads and checks config.json.
pub(super) fn read(path: &Path) -> Result<ModelConfig, ModelError> {
    let object = read_object(path)?;
    let keys = Keys { path, object: &object };
    let defaults = Defaults::of(keys)?;
    refuse_what_is_not_served(keys, &defaults)?;
    let key = |field: &str| field.to_owned();
    let origin = Origin { path, key: &key };
    let config = read_fields(keys, &defaults, origin)?;
    origin.check(&config)?;
    Ok(config)
}

impl Defaults {
    fn of(keys: Keys<'_>) -> Result<Self, ModelError> {
        let names: Vec<String> = keys.required("architectures")?;
        let plain = |architecture| Self {
            architecture,
            head_dim: None,
            kv_heads: None,
            max_position: None,
            sliding_window: None,
            tied: false,
            thetas: DefaultThetas { full: 10_000.0, sliding: None },
            activation: Activation::Silu,
        };
        match names.first().map(String::as_str) {
            Some("LlamaForCausalLM") => Ok(plain(Architecture::Llama)),
            Some("MistralForCausalLM") => Ok(Self {
                kv_heads: Some(8),
                max_position: Some(131_072),
                sliding_window: Some(4096),
                ..plain(Architecture::Mistral)
            }),
            Some("Qwen2ForCausalLM") => Ok(Self { sliding_window: Some(4096), ..plain(Architecture::Qwen2) }),
            Some("Qwen3ForCausalLM") => {
                Ok(Self { head_dim: Some(128), sliding_window: Some(4096), ..plain(Architecture::Qwen3) })
            }
            Some("Gemma3ForCausalLM") => Ok(Self {
                head_dim: Some(256),
                max_position: Some(131_072),
                sliding_window: Some(4096),
                tied: true,
                thetas: DefaultThetas { full: 1_000_000.0, sliding: Some(10_000.0) },
                activation: Activation::GeluTanh,
                ..plain(Architecture::Gemma3)
            }),
            other => Err(keys.unsupported(
                format!("architecture `{}`", other.unwrap_or_default()),
                "use a Llama, Mistral, Qwen2, Qwen3 or Gemma 3 text model (...ForCausalLM)",
            )),
        }
    }
}

fn read_fields(keys: Keys<'_>, defaults: &Defaults, origin: Origin<'_>) -> Result<ModelConfig, ModelError> {
    let gemma = defaults.architecture == Architecture::Gemma3;
    let layer_count = origin.layer_count(keys.required("num_hidden_layers")?)?;
    let hidden_size: usize = keys.required("hidden_size")?;
    let num_heads: usize = keys.required("num_attention_heads")?;
    let head_dim = match keys.get("head_dim")?.or(defaults.head_dim) {
        Some(head_dim) => head_dim,
        None => origin.derived_head_dim(hidden_size, num_heads)?,
    };
    let scaled_dim: f32 = if gemma { keys.get_or("query_pre_attn_scalar", 256.0)? } else { head_dim as f32 };
    let (rope, local_rope) = rope::read(keys, defaults.thetas)?;
    let max_position = match keys.get("max_position_embeddings")?.or(defaults.max_position) {
        Some(max_position) => max_position,
        None => keys.required("max_position_embeddings")?,
    };
    let sliding_window = sliding_window(keys, defaults)?;
    Ok(ModelConfig {
        architecture: defaults.architecture,
        hidden_size,
        intermediate_size: keys.required("intermediate_size")?,
        num_heads,
        num_kv_heads: keys.get("num_key_value_heads")?.or(defaults.kv_heads).unwrap_or(num_heads),
        head_dim,
        vocab_size: keys.required("vocab_size")?,
        max_position,
        rms_norm_eps: keys.get_or("rms_norm_eps", 1e-6)?,
        attention_scale: scaled_dim.sqrt().recip(),
        embedding_scale: if gemma { (hidden_size as f32).sqrt() } else { 1.0 },
        tied_embeddings: keys.get_or("tie_word_embeddings", defaults.tied)?,
        qkv_bias: defaults.architecture == Architecture::Qwen2,
        qk_norm: matches!(defaults.architecture, Architecture::Qwen3 | Architecture::Gemma3),
        post_norms: gemma,
        activation: defaults.activation,
        layers: layers(keys, defaults.architecture, layer_count, sliding_window)?,
        sliding_window,
        rope,
        local_rope,
    })
}

/// The window, where the family has one and the config does not turn it off.
fn sliding_window(keys: Keys<'_>, defaults: &Defaults) -> Result<Option<usize>, ModelError> {
    let switched = match defaults.architecture {
        Architecture::Llama => false,
        Architecture::Mistral | Architecture::Gemma3 => true,
        Architecture::Qwen2 | Architecture::Qwen3 => keys.get_or("use_sliding_window", false)?,
    };
    match keys.object.get("sliding_window") {
        _ if !switched => Ok(None),
        None => Ok(defaults.sliding_window),
        Some(_) => keys.get("sliding_window"),
    }
}

fn layers(
    keys: Keys<'_>,
    architecture: Architecture,
    count: usize,
    window: Option<usize>,
) -> Result<Vec<LayerKind>, ModelError> {
    if window.is_none() && architecture != Architecture::Gemma3 {
        return Ok(vec![LayerKind::Full; count]);
    }
    if let Some(names) = keys.get::<Vec<String>>("layer_types")? {
        return named_layers(keys, &names, count);
    }
    let slides_from = match architecture {
        Architecture::Qwen2 | Architecture::Qwen3 => keys.get_or("max_window_layers", 28)?,
        _ => 0,
    };
    let period: usize = match architecture {
        Architecture::Gemma3 => {
            let older = keys.get_or("sliding_window_pattern", 6)?;
            keys.get_or("_sliding_window_pattern", older)?
        }
        _ => usize::MAX,
    };
    if period == 0 {
        return Err(keys.wrong("sliding_window_pattern", "is 0, expected 1 or more"));
    }
    let slides = |layer: usize| layer >= slides_from && !(layer + 1).is_multiple_of(period);
    Ok((0..count).map(|layer| if slides(layer) { LayerKind::Sliding } else { LayerKind::Full }).collect())
}

fn named_layers(keys: Keys<'_>, names: &[String], count: usize) -> Result<Vec<LayerKind>, ModelError> {
    if names.len() != count {
        return Err(keys.wrong("layer_types", &format!("names {} layers of {count}", names.len())));
    }
    let kind = |name: &String| match name.as_str() {
        "full_attention" => Ok(LayerKind::Full),
        "sliding_attention" => Ok(LayerKind::Sliding),
        other => Err(keys.unsupported(
            format!("layer type `{other}`"),
            "use a model of full_attention and sliding_attention layers",
        )),
    };
    names.iter().map(kind).collect()
}

/// Settings that change the arithmetic in ways that the decoder does not have: better refused than answered wrongly.
fn refuse_what_is_not_served(keys: Keys<'_>, defaults: &Defaults) -> Result<(), ModelError> {
    if let Some(quantization) = keys.below("quantization_config")? {
        let method = quantization.get_or("quant_method", "an unnamed method".to_owned())?;
        return Err(keys.unsupported(
            format!("quantization_config of {method}"),
            "use the unquantised (bf16) model, or a GGUF file of it",
        ));
    }
    for flag in ["attention_bias", "mlp_bias", "use_bidirectional_attention"] {
        if keys.get_or(flag, false)? && defaults.architecture != Architecture::Qwen2 {
            return Err(keys.unsupported(format!("`{flag}`: true"), "use a model without it"));
        }
    }
    if !keys.get_or("is_causal", true)? {
        return Err(keys
            .unsupported("`is_causal`: false".to_owned(), "use a model whose tokens see only those before"));
    }
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if keys.get::<f32>(key)?.is_some() {
            return Err(keys.unsupported(format!("`{key}`"), "use a model without it, such as Gemma 3"));
        }
    }
    let (expected, found): (&[&str], _) = match defaults.activation {
        Activation::Silu => (&["silu", "swish"], keys.get_or("hidden_act", "silu".to_owned())?),
        Activation::GeluTanh => {
            (&["gelu_pytorch_tanh"], keys.get_or("hidden_activation", "gelu_pytorch_tanh".to_owned())?)
        }
    };
    if !expected.contains(&found.as_str()) {
        return Err(
            keys.unsupported(format!("activation `{found}`"), &format!("this family has {}", expected[0]))
        );
    }
    Ok(())
}
