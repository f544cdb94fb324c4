//! A writer of model folders: config.json and safetensors.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

/// Name, shape, dtype and bytes of a tensor.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: &'static str,
    pub(crate) bytes: Vec<u8>,
}

/// A folder before it is written.
#[derive(Clone)]
pub(crate) struct Folder {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl Folder {
    /// A sound model of Llama's architecture: hidden 32, 2 heads, 1 KV head, MLP 64, vocabulary 32, 2 layers.
    pub(crate) fn tiny() -> Self {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "vocab_size": 32,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": true,
        });
        let mut folder = Self { config, tensors: BTreeMap::new() };
        folder.add("model.embed_tokens.weight", &[32, 32]);
        folder.add("model.norm.weight", &[32]);
        for layer in 0..2 {
            let shapes: [(&str, &[usize]); 9] = [
                ("input_layernorm", &[32]),
                ("self_attn.q_proj", &[32, 32]),
                ("self_attn.k_proj", &[16, 32]),
                ("self_attn.v_proj", &[16, 32]),
                ("self_attn.o_proj", &[32, 32]),
                ("post_attention_layernorm", &[32]),
                ("mlp.gate_proj", &[64, 32]),
                ("mlp.up_proj", &[64, 32]),
                ("mlp.down_proj", &[32, 64]),
            ];
            for (name, shape) in shapes {
                folder.add(&format!("model.layers.{layer}.{name}.weight"), shape);
            }
        }
        folder
    }

    /// Turns the tiny model into one of Gemma 3's architecture.
    pub(crate) fn gemma() -> Self {
        let mut folder = Self::tiny();
        folder.set("architectures", json!(["Gemma3ForCausalLM"]));
        folder.set("head_dim", json!(16));
        folder.set("query_pre_attn_scalar", json!(64));
        folder.set("sliding_window", json!(8));
        for layer in 0..2 {
            let shapes: [(&str, &[usize]); 4] = [
                ("pre_feedforward_layernorm", &[32]),
                ("post_feedforward_layernorm", &[32]),
                ("self_attn.q_norm", &[16]),
                ("self_attn.k_norm", &[16]),
            ];
            for (name, shape) in shapes {
                folder.add(&format!("model.layers.{layer}.{name}.weight"), shape);
            }
        }
        folder
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.config[key] = value;
    }

    /// Adds a tensor of halves.
    pub(crate) fn add(&mut self, name: &str, shape: &[usize]) {
        let elements = shape.iter().product::<usize>();
        let bytes = (0..elements).flat_map(|_| 0.5f32.to_le_bytes()).collect();
        self.tensors.insert(name.to_owned(), Tensor { shape: shape.to_vec(), dtype: "F32", bytes });
    }

    pub(crate) fn write_config(&self, folder: &Path) {
        std::fs::write(folder.join("config.json"), self.config.to_string()).expect("a writable folder");
    }

    pub(crate) fn write(&self, folder: &Path) {
        self.write_config(folder);
        std::fs::write(folder.join("model.safetensors"), file(self.tensors.iter()))
            .expect("a writable folder");
    }

    /// Writes three shards `model-0000N-of-00003.safetensors` and their index.
    pub(crate) fn write_sharded(&self, folder: &Path) {
        self.write_config(folder);
        let mut weight_map = Map::new();
        let names: Vec<&String> = self.tensors.keys().collect();
        for (number, names) in names.chunks(names.len().div_ceil(3)).enumerate() {
            let shard = format!("model-{:05}-of-00003.safetensors", number + 1);
            let tensors = names.iter().map(|name| (*name, &self.tensors[*name]));
            std::fs::write(folder.join(&shard), file(tensors)).expect("a writable folder");
            weight_map.extend(names.iter().map(|name| ((*name).clone(), json!(shard))));
        }
        let index = json!({ "metadata": {}, "weight_map": weight_map });
        let path = folder.join("model.safetensors.index.json");
        std::fs::write(path, index.to_string()).expect("a writable folder");
    }
}

/// A safetensors file of these.
pub(crate) fn file<'a>(tensors: impl Iterator<Item = (&'a String, &'a Tensor)>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let info =
            json!({ "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}
