//! A model's weights on a GPU, in bf16: where each stands, and how it gets there.

use std::sync::Arc;

use thalweg_model::adapter::Adapter;
use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Weight};
use thalweg_model::config::ModelConfig;

use super::config::{Widths, check_shape};
use super::context::{Gpu, Stream};
use super::error::CudaError;
use super::kernels::Kernels;
use super::launch::Launcher;
use super::lora::CudaAdapters;
use super::memory::{ALIGNMENT, Address, DeviceMemory};
use super::upload::Uploader;
use crate::backend::cpu::KvDtype;

/// Weights of a model on one GPU.
#[derive(Debug)]
pub struct CudaModel {
    gpu: Arc<Gpu>,
    config: ModelConfig,
    memory: DeviceMemory,
    map: Map,
    adapters: Option<CudaAdapters>,
}

/// Where weights come from.
#[derive(Debug)]
pub enum WeightSource<'a> {
    /// As stored, whatever the type, rounded to bf16.
    Checkpoint(&'a Checkpoint),
    /// Random numbers, the same for a seed; norms are 1.
    Dummy {
        /// Of the random numbers.
        seed: u64,
    },
}

/// Offsets, then addresses, of one layer's weights; 0 for what this model has not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Address,
    /// Rows of q, then k, then v.
    pub(super) qkv: Address,
    pub(super) qkv_bias: Address,
    pub(super) q_norm: Address,
    pub(super) k_norm: Address,
    pub(super) o: Address,
    pub(super) post_attention_norm: Address,
    pub(super) mlp_norm: Address,
    /// Rows of gate, then up.
    pub(super) gate_up: Address,
    pub(super) down: Address,
    pub(super) post_mlp_norm: Address,
}

/// Everything that is stored, and where.
#[derive(Clone, Debug, Default)]
struct Map {
    parts: Vec<Part>,
    embedding: u64,
    output: u64,
    output_norm: u64,
    layers: Vec<LayerWeights>,
    bytes: u64,
}

/// One stored tensor: its role, shape and offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    weight: Weight,
    rows: usize,
    /// None for a vector.
    cols: Option<usize>,
    offset: u64,
}

impl Part {
    fn elements(&self) -> u64 {
        self.rows as u64 * self.cols.unwrap_or(1) as u64
    }
}

/// Bytes that the weights of such a model take on the GPU.
pub fn weight_bytes(config: &ModelConfig) -> u64 {
    Map::of(config).bytes
}

/// Largest of dummy matrices' numbers: a standard deviation of 0.02, as models are initialised with.
const DUMMY_SCALE: f32 = 0.034_641;

impl CudaModel {
    /// Allocates and fills the weights. The calling thread must be bound.
    pub fn load(
        gpu: &Arc<Gpu>,
        config: &ModelConfig,
        source: &WeightSource<'_>,
    ) -> Result<Arc<Self>, CudaError> {
        Self::load_with(gpu, config, source, &[])
    }

    /// The same with LoRA adapters: the first has slot 1.
    pub fn load_with(
        gpu: &Arc<Gpu>,
        config: &ModelConfig,
        source: &WeightSource<'_>,
        adapters: &[Adapter],
    ) -> Result<Arc<Self>, CudaError> {
        check_shape(config)?;
        let mut map = Map::of(config);
        let memory = DeviceMemory::new(gpu, map.bytes, "weights")?;
        let stream = Stream::new(gpu)?;
        match source {
            WeightSource::Checkpoint(checkpoint) => {
                upload(&stream, checkpoint, config, &memory, &map.parts)?;
            }
            WeightSource::Dummy { seed } => fill(&stream, config, &memory, &map.parts, *seed)?,
        }
        let adapters = CudaAdapters::load(&stream, adapters, config)?;
        stream.synchronize()?;
        map.relocate(memory.address());
        Ok(Arc::new(Self { gpu: gpu.clone(), config: config.clone(), memory, map, adapters }))
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Where it lies.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Bytes of all weights, adapters included.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() + self.adapters.as_ref().map_or(0, CudaAdapters::bytes)
    }

    pub(super) fn adapters(&self) -> Option<&CudaAdapters> {
        self.adapters.as_ref()
    }

    pub(super) fn embedding(&self) -> Address {
        self.map.embedding
    }

    pub(super) fn output(&self) -> Address {
        self.map.output
    }

    pub(super) fn output_norm(&self) -> Address {
        self.map.output_norm
    }

    pub(super) fn layer(&self, layer: usize) -> &LayerWeights {
        &self.map.layers[layer]
    }
}

impl Map {
    fn of(config: &ModelConfig) -> Self {
        let widths = Widths::of(config);
        let mut map = Self::default();
        map.embedding = map.group(&[(Weight::Embedding, config.vocab_size, Some(widths.hidden))]);
        map.output = match config.tied_embeddings {
            true => map.embedding,
            false => map.group(&[(Weight::Output, config.vocab_size, Some(widths.hidden))]),
        };
        map.output_norm = map.group(&[(Weight::OutputNorm, widths.hidden, None)]);
        for layer in 0..config.num_layers() {
            let weights = map.layer(config, layer);
            map.layers.push(weights);
        }
        map
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> LayerWeights {
        use LayerWeight as W;
        let Widths { hidden, query, qkv, mlp } = Widths::of(config);
        let kv = (qkv - query) / 2;
        let at = |weight| Weight::Layer(layer, weight);
        let vector = |weight, len| vec![(at(weight), len, None)];
        let matrix = |weight, rows, cols| (at(weight), rows, Some(cols));
        let none: Vec<(Weight, usize, Option<usize>)> = Vec::new();
        let optional = |wanted: bool, weight, len| if wanted { vector(weight, len) } else { none.clone() };
        let biases = [(at(W::QBias), query, None), (at(W::KBias), kv, None), (at(W::VBias), kv, None)];
        LayerWeights {
            attention_norm: self.group(&vector(W::AttentionNorm, hidden)),
            qkv: self.group(&[
                matrix(W::Q, query, hidden),
                matrix(W::K, kv, hidden),
                matrix(W::V, kv, hidden),
            ]),
            qkv_bias: self.group(if config.qkv_bias { &biases } else { &[] }),
            q_norm: self.group(&optional(config.qk_norm, W::QNorm, config.head_dim)),
            k_norm: self.group(&optional(config.qk_norm, W::KNorm, config.head_dim)),
            o: self.group(&[matrix(W::O, hidden, query)]),
            post_attention_norm: self.group(&optional(config.post_norms, W::PostAttentionNorm, hidden)),
            mlp_norm: self.group(&vector(W::MlpNorm, hidden)),
            gate_up: self.group(&[matrix(W::Gate, mlp, hidden), matrix(W::Up, mlp, hidden)]),
            down: self.group(&[matrix(W::Down, hidden, mlp)]),
            post_mlp_norm: self.group(&optional(config.post_norms, W::PostMlpNorm, hidden)),
        }
    }

    /// Parts one behind the other, from a boundary on; its offset, or 0 where there are none. Nothing else has offset 0 but the
    /// embedding, which is no layer's.
    fn group(&mut self, parts: &[(Weight, usize, Option<usize>)]) -> u64 {
        if parts.is_empty() {
            return 0;
        }
        let begin = self.bytes.next_multiple_of(ALIGNMENT);
        self.bytes = begin;
        for (weight, rows, cols) in parts {
            let part = Part { weight: *weight, rows: *rows, cols: *cols, offset: self.bytes };
            self.bytes += 2 * part.elements();
            self.parts.push(part);
        }
        begin
    }

    /// From offsets to addresses.
    fn relocate(&mut self, base: Address) {
        self.embedding += base;
        self.output += base;
        self.output_norm += base;
        for layer in &mut self.layers {
            for address in layer.all_mut() {
                if *address != 0 {
                    *address += base;
                }
            }
        }
    }
}

impl LayerWeights {
    fn all_mut(&mut self) -> [&mut Address; 11] {
        [
            &mut self.attention_norm,
            &mut self.qkv,
            &mut self.qkv_bias,
            &mut self.q_norm,
            &mut self.k_norm,
            &mut self.o,
            &mut self.post_attention_norm,
            &mut self.mlp_norm,
            &mut self.gate_up,
            &mut self.down,
            &mut self.post_mlp_norm,
        ]
    }
}

fn upload(
    stream: &Stream,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    memory: &DeviceMemory,
    parts: &[Part],
) -> Result<(), CudaError> {
    let mut uploader = Uploader::new(stream, memory)?;
    for part in parts {
        let missing = || CudaError::Missing(format!("{:?}", part.weight));
        match part.cols {
            Some(cols) => {
                let matrix = checkpoint.matrix(part.weight)?;
                if (matrix.rows, matrix.cols) != (part.rows, cols) {
                    return Err(missing());
                }
                uploader.matrix(part.offset, &matrix, config.head_dim)?;
                checkpoint.release(&matrix);
            }
            None => {
                let vector = checkpoint.vector(part.weight)?.ok_or_else(missing)?;
                if vector.len() != part.rows {
                    return Err(missing());
                }
                uploader.vector(part.offset, &vector)?;
            }
        }
    }
    uploader.finish()
}

/// Random matrices; norms of one, biases of nothing.
fn fill(
    stream: &Stream,
    config: &ModelConfig,
    memory: &DeviceMemory,
    parts: &[Part],
    seed: u64,
) -> Result<(), CudaError> {
    let kernels = Kernels::load(stream.gpu(), config.head_dim, KvDtype::Bf16)?;
    let launcher = Launcher { stream, overlapped: false };
    for (index, part) in parts.iter().enumerate() {
        let (address, count) = (memory.address() + part.offset, part.elements());
        let is_bias = matches!(
            part.weight,
            Weight::Layer(_, LayerWeight::QBias | LayerWeight::KBias | LayerWeight::VBias)
        );
        // SAFETY: the part lies within the memory, which the caller keeps until the stream has been waited for.
        unsafe {
            match part.cols {
                Some(_) => {
                    let seed = seed.wrapping_mul(1_000_003).wrapping_add(index as u64);
                    kernels.fill_random(launcher, address, count, seed, DUMMY_SCALE)?;
                }
                None => kernels.fill_value(launcher, address, count, if is_bias { 0.0 } else { 1.0 })?,
            }
        }
    }
    stream.synchronize()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_apart_and_groups_are_aligned() {
        let config = super::super::testing::config(4, 2, 64, Some(100));
        let map = Map::of(&config);
        let mut end = 0;
        for part in &map.parts {
            assert!(part.offset >= end, "{part:?} begins before {end}");
            end = part.offset + 2 * part.elements();
        }
        assert_eq!((map.bytes, map.layers.len(), map.output), (end, 2, map.embedding));
        assert!(map.layers.iter().all(|layer| layer.qkv.is_multiple_of(ALIGNMENT) && layer.qkv_bias == 0));
    }
}
