//! A writer of GGUF files, wrong ones included.

use std::path::{Path, PathBuf};

pub(crate) const ALIGNMENT: usize = 32;
pub(crate) const F32: u32 = 0;

/// A metadata value.
#[derive(Clone)]
pub(crate) enum Value {
    U16(u16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Strings(Vec<String>),
    Ints(Vec<i32>),
    /// A type id and what follows it.
    Raw(u32, Vec<u8>),
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Innermost first, as GGUF has it.
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
    /// Instead of the next free place.
    pub(crate) offset: Option<u64>,
}

#[derive(Clone)]
pub(crate) struct Gguf {
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) key_count: Option<u64>,
    pub(crate) keys: Vec<(String, Value)>,
    pub(crate) tensors: Vec<Tensor>,
}

/// Shape of the tiny model.
pub(crate) const LAYERS: usize = 2;
pub(crate) const HIDDEN: usize = 32;
pub(crate) const HEADS: usize = 2;
pub(crate) const KV_HEADS: usize = 1;
pub(crate) const HEAD_DIM: usize = 16;
pub(crate) const INNER: usize = 64;
pub(crate) const VOCAB: usize = 32;

impl Gguf {
    /// A sound model of Llama's architecture; `seed` changes its weights.
    pub(crate) fn tiny(seed: u32) -> Self {
        let u32s = [
            ("block_count", LAYERS),
            ("context_length", 128),
            ("embedding_length", HIDDEN),
            ("feed_forward_length", INNER),
            ("attention.head_count", HEADS),
            ("attention.head_count_kv", KV_HEADS),
            ("rope.dimension_count", HEAD_DIM),
        ];
        let mut keys = vec![("general.architecture".to_owned(), Value::String("llama".to_owned()))];
        keys.extend(u32s.map(|(key, value)| (format!("llama.{key}"), Value::U32(value as u32))));
        keys.push(("llama.attention.layer_norm_rms_epsilon".to_owned(), Value::F32(1e-5)));
        keys.push(("tokenizer.ggml.model".to_owned(), Value::String("gpt2".to_owned())));
        let tokens: Vec<String> = (0..VOCAB as u8).map(|id| char::from(b'A' + id).to_string()).collect();
        keys.push(("tokenizer.ggml.tokens".to_owned(), Value::Strings(tokens)));
        keys.push(("tokenizer.ggml.token_type".to_owned(), Value::Ints(vec![1; VOCAB])));
        keys.push(("tokenizer.ggml.merges".to_owned(), Value::Strings(Vec::new())));
        Self { version: 3, tensor_count: None, key_count: None, keys, tensors: tiny_tensors(seed) }
    }

    pub(crate) fn set(&mut self, key: &str, value: Value) {
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, _)| name != key);
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).expect("a tensor of the tiny model")
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            put_string(&mut out, key);
            value.put(&mut out);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
        }
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(data);
        out
    }

    pub(crate) fn write(&self, path: &Path) {
        std::fs::write(path, self.bytes()).expect("a writable folder");
    }

    /// Writes it as parts, the first of which has all metadata; returns their paths.
    pub(crate) fn write_split(&self, folder: &Path, name: &str, count: usize) -> Vec<PathBuf> {
        let per_part = self.tensors.len().div_ceil(count);
        let parts = self.tensors.chunks(per_part).enumerate();
        let write = |(number, tensors): (usize, &[Tensor])| {
            let keys = if number == 0 { self.keys.clone() } else { Vec::new() };
            let mut part = Self { keys, tensors: tensors.to_vec(), ..self.clone() };
            part.set("split.no", Value::U16(number as u16));
            part.set("split.count", Value::U16(count as u16));
            part.set("split.tensors.count", Value::I32(self.tensors.len() as i32));
            let path = folder.join(format!("{name}-{:05}-of-{count:05}.gguf", number + 1));
            part.write(&path);
            path
        };
        parts.map(write).collect()
    }
}

fn tiny_tensors(seed: u32) -> Vec<Tensor> {
    let mut shapes = vec![
        ("token_embd.weight".to_owned(), vec![HIDDEN, VOCAB]),
        ("output_norm.weight".to_owned(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let layer_shapes = [
            ("attn_norm", vec![HIDDEN]),
            ("attn_q", vec![HIDDEN, HEADS * HEAD_DIM]),
            ("attn_k", vec![HIDDEN, KV_HEADS * HEAD_DIM]),
            ("attn_v", vec![HIDDEN, KV_HEADS * HEAD_DIM]),
            ("attn_output", vec![HEADS * HEAD_DIM, HIDDEN]),
            ("ffn_norm", vec![HIDDEN]),
            ("ffn_gate", vec![HIDDEN, INNER]),
            ("ffn_up", vec![HIDDEN, INNER]),
            ("ffn_down", vec![INNER, HIDDEN]),
        ];
        shapes.extend(layer_shapes.map(|(name, dims)| (format!("blk.{layer}.{name}.weight"), dims)));
    }
    let mut state = seed;
    shapes.into_iter().map(|(name, dims)| f32_tensor(name, &dims, &mut state)).collect()
}

/// A tensor of small pseudo-random numbers.
pub(crate) fn f32_tensor(name: impl Into<String>, dims: &[usize], state: &mut u32) -> Tensor {
    let mut next = || {
        *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (*state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    let data = (0..dims.iter().product::<usize>()).flat_map(|_| next().to_le_bytes()).collect();
    let dims = dims.iter().map(|dim| *dim as u64).collect();
    Tensor { name: name.into(), dims, kind: F32, data, offset: None }
}

pub(crate) fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Value {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::U16(value) => put(out, 2, &value.to_le_bytes()),
            Self::U32(value) => put(out, 4, &value.to_le_bytes()),
            Self::I32(value) => put(out, 5, &value.to_le_bytes()),
            Self::F32(value) => put(out, 6, &value.to_le_bytes()),
            Self::Bool(value) => put(out, 7, &[u8::from(*value)]),
            Self::String(text) => {
                put(out, 8, &[]);
                put_string(out, text);
            }
            Self::Strings(texts) => {
                put(out, 9, &8u32.to_le_bytes());
                out.extend((texts.len() as u64).to_le_bytes());
                texts.iter().for_each(|text| put_string(out, text));
            }
            Self::Ints(values) => {
                put(out, 9, &5u32.to_le_bytes());
                out.extend((values.len() as u64).to_le_bytes());
                values.iter().for_each(|value| out.extend(value.to_le_bytes()));
            }
            Self::Raw(kind, bytes) => put(out, *kind, bytes),
        }
    }
}

fn put(out: &mut Vec<u8>, kind: u32, bytes: &[u8]) {
    out.extend(kind.to_le_bytes());
    out.extend(bytes);
}
