//! LoRA adapters as PEFT writes them: adapter_config.json, and pairs of low-rank matrices in adapter_model.safetensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::{LayerWeight, fingerprint};
use crate::config::ModelConfig;
use crate::dequantize::dequantize_row;
use crate::error::ModelError;
use crate::hub::{Keys, read_object, read_safetensors};
use crate::tensors::{Tensor, TensorTable};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
const NAMES_BEGIN: &str = "base_model.model.model.layers.";

/// Products that an adapter may change, and what PEFT calls them.
pub const TARGETS: [(LayerWeight, &str); 7] = [
    (LayerWeight::Q, "self_attn.q_proj"),
    (LayerWeight::K, "self_attn.k_proj"),
    (LayerWeight::V, "self_attn.v_proj"),
    (LayerWeight::O, "self_attn.o_proj"),
    (LayerWeight::Gate, "mlp.gate_proj"),
    (LayerWeight::Up, "mlp.up_proj"),
    (LayerWeight::Down, "mlp.down_proj"),
];

/// An adapter that fits a model: each of its products becomes `W x + scale * B (A x)`.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    rank: usize,
    scale: f32,
    fingerprint: [u8; 32],
    tensors: TensorTable,
    pairs: BTreeMap<(usize, usize), Pair>,
}

/// Halves of one product's change.
#[derive(Debug, Default)]
struct Pair {
    a: Option<Tensor>,
    b: Option<Tensor>,
}

/// One product's change.
#[derive(Clone, Debug, PartialEq)]
pub struct LowRank {
    /// `[rank][inputs]`.
    pub a: Vec<f32>,
    /// `[outputs][rank]`.
    pub b: Vec<f32>,
}

impl Adapter {
    /// Opens an adapter's folder and holds it against the model that it is for.
    pub fn open(folder: &Path, model: &ModelConfig) -> Result<Self, ModelError> {
        let config = folder.join(CONFIG);
        if !config.exists() {
            let reason = format!("has no {CONFIG}: give the folder that PEFT's save_pretrained has written");
            return Err(ModelError::malformed(folder, reason));
        }
        let object = read_object(&config)?;
        let keys = Keys { path: &config, object: &object };
        refuse_what_is_not_served(keys)?;
        let (rank, scale) = rank_and_scale(keys)?;
        let path = folder.join(WEIGHTS);
        if !path.exists() {
            let reason = format!("has no {WEIGHTS}: save the adapter with safe_serialization=True");
            return Err(ModelError::malformed(folder, reason));
        }
        let mut tensors = TensorTable::default();
        read_safetensors(&path, &mut tensors)?;
        let pairs = pairs(&path, &tensors, rank, model)?;
        let fingerprint = fingerprint::of_adapter(scale, &tensors)?;
        Ok(Self { path: folder.to_owned(), rank, scale, fingerprint, tensors, pairs })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tells adapters apart that bear one name: of its scale, and of each tensor's name, type, shape and sampled bytes.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// Rows of A, and columns of B.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Numbers of all its matrices.
    pub fn elements(&self) -> u64 {
        let elements = |tensor: &Tensor| tensor.shape.dims().iter().product::<usize>() as u64;
        self.pairs.values().flat_map(|pair| [&pair.a, &pair.b]).flatten().map(elements).sum()
    }

    /// Factor on B (A x).
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// What it changes of a product; None where it leaves it as it is.
    pub fn low_rank(&self, layer: usize, target: LayerWeight) -> Option<LowRank> {
        let index = TARGETS.iter().position(|(weight, _)| *weight == target)?;
        let Pair { a, b } = self.pairs.get(&(layer, index))?;
        let (a, b) = (a.as_ref()?, b.as_ref()?);
        Some(LowRank { a: self.values(a), b: self.values(b) })
    }

    fn values(&self, tensor: &Tensor) -> Vec<f32> {
        let mut values = vec![0.0; tensor.shape.dims().iter().product()];
        dequantize_row(tensor.dtype, self.tensors.bytes(tensor), &mut values);
        values
    }
}

/// Settings that change the arithmetic in ways that are not served: better refused than answered wrongly.
fn refuse_what_is_not_served(keys: Keys<'_>) -> Result<(), ModelError> {
    let kind: String = keys.get_or("peft_type", "LORA".to_owned())?;
    if kind != "LORA" {
        return Err(keys.unsupported(format!("`peft_type` {kind}"), "use a LoRA adapter"));
    }
    let plain = "train the adapter without it, or merge it into the model";
    for flag in ["use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"] {
        if keys.get_or(flag, false)? {
            return Err(keys.unsupported(format!("`{flag}`: true"), plain));
        }
    }
    let bias: String = keys.get_or("bias", "none".to_owned())?;
    if bias != "none" {
        return Err(keys.unsupported(format!("`bias`: {bias}"), plain));
    }
    for key in [
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "target_parameters",
        "trainable_token_indices",
        "layer_replication",
        "alora_invocation_tokens",
        "megatron_config",
    ] {
        if !is_empty(keys.object.get(key)) {
            return Err(keys.unsupported(format!("`{key}`"), plain));
        }
    }
    match keys.object.get("init_lora_weights") {
        // Their base is not the model's, but what is left of it.
        Some(Value::String(init))
            if ["pissa", "olora", "corda"].iter().any(|name| init.starts_with(name)) =>
        {
            let instead = "save it with path_initial_model_for_weight_conversion";
            Err(keys.unsupported(format!("`init_lora_weights`: {init}"), instead))
        }
        _ => Ok(()),
    }
}

fn is_empty(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => true,
        Some(Value::Array(values)) => values.is_empty(),
        Some(Value::Object(values)) => values.is_empty(),
        Some(_) => false,
    }
}

fn rank_and_scale(keys: Keys<'_>) -> Result<(usize, f32), ModelError> {
    let rank: usize = keys.required("r")?;
    if rank == 0 {
        return Err(keys.wrong("r", "is 0, expected 1 or more"));
    }
    let alpha: f64 = keys.get_or("lora_alpha", 8.0)?;
    let divisor = if keys.get_or("use_rslora", false)? { (rank as f64).sqrt() } else { rank as f64 };
    let scale = (alpha / divisor) as f32;
    if !scale.is_finite() {
        return Err(keys.wrong("lora_alpha", &format!("is {alpha}, expected a number")));
    }
    Ok((rank, scale))
}

/// Every tensor by layer and product; one that would be left out is refused, and so is half a pair.
fn pairs(
    path: &Path,
    tensors: &TensorTable,
    rank: usize,
    model: &ModelConfig,
) -> Result<BTreeMap<(usize, usize), Pair>, ModelError> {
    let mut pairs: BTreeMap<(usize, usize), Pair> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let Some((layer, target, half)) = parse(name) else {
            let instead = "LoRA is served for q, k, v, o, gate, up and down projections of layers; train the \
                           adapter with these target_modules alone, or merge it into the model";
            return Err(ModelError::unsupported(path, format!("tensor `{name}`"), instead));
        };
        if layer >= model.num_layers() {
            let reason = format!("tensor `{name}` is of layer {layer}, the model has {}", model.num_layers());
            return Err(ModelError::malformed(path, reason));
        }
        let (outputs, inputs) = dims(model, TARGETS[target].0);
        let expected = if half == Half::A { [rank, inputs] } else { [outputs, rank] };
        if tensor.shape.dims() != expected {
            let reason = format!(
                "tensor `{name}` has shape {:?}, expected {expected:?} by r and the model: it is an adapter of another \
                 model",
                tensor.shape
            );
            return Err(ModelError::malformed(path, reason));
        }
        let pair = pairs.entry((layer, target)).or_default();
        *(if half == Half::A { &mut pair.a } else { &mut pair.b }) = Some(tensor.clone());
    }
    if pairs.is_empty() {
        return Err(ModelError::malformed(path, "has no tensors: save the adapter again"));
    }
    for ((layer, target), pair) in &pairs {
        if let Some(missing) = pair.missing() {
            let of = format!("{NAMES_BEGIN}{layer}.{}", TARGETS[*target].1);
            let reason = format!("tensor `{of}.{missing}.weight` is missing, its other half is there");
            return Err(ModelError::malformed(path, reason));
        }
    }
    Ok(pairs)
}

impl Pair {
    fn missing(&self) -> Option<&'static str> {
        match (&self.a, &self.b) {
            (None, _) => Some("lora_A"),
            (_, None) => Some("lora_B"),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Half {
    A,
    B,
}

/// Layer, index of the product and half that a name says; None for any other name.
fn parse(name: &str) -> Option<(usize, usize, Half)> {
    let (layer, rest) = name.strip_prefix(NAMES_BEGIN)?.split_once('.')?;
    let rest = rest.strip_suffix(".weight")?;
    // Some tools keep the adapter's name within PEFT's dictionary.
    let rest = rest.strip_suffix(".default").unwrap_or(rest);
    let (module, half) = rest.rsplit_once('.')?;
    let half = match half {
        "lora_A" => Half::A,
        "lora_B" => Half::B,
        _ => return None,
    };
    let target = TARGETS.iter().position(|(_, name)| *name == module)?;
    Some((layer.parse().ok()?, target, half))
}

/// Outputs and inputs of a product.
pub fn dims(model: &ModelConfig, target: LayerWeight) -> (usize, usize) {
    let (hidden, inner) = (model.hidden_size, model.intermediate_size);
    let query = model.num_heads * model.head_dim;
    match target {
        LayerWeight::Q => (query, hidden),
        LayerWeight::K | LayerWeight::V => (model.num_kv_heads * model.head_dim, hidden),
        LayerWeight::O => (hidden, query),
        LayerWeight::Gate | LayerWeight::Up => (inner, hidden),
        LayerWeight::Down => (hidden, inner),
        // No target of an adapter.
        _ => (0, 0),
    }
}
