//! Keys and values of all layers: addresses from the start, memory once it is known how much is left.

use std::sync::Arc;

use thalweg_model::config::{LayerKind, ModelConfig};

use super::config::layer_block_bytes;
use super::context::{Gpu, Stream};
use super::error::CudaError;
use super::memory::{Address, DeviceMemory};
use super::reserved::Reserved;
use crate::backend::cpu::{KvDtype, kv_block_bytes};
use crate::plan::KV_GROUPS;

/// Per layer `[block][kv_head][16][head_dim]`, keys, then values.
#[derive(Debug)]
pub(super) struct KvCache {
    memory: Memory,
    /// Of keys and values, by layer; empty while there are no addresses.
    layers: Vec<[Address; 2]>,
    pub(super) block_bytes: u64,
}

#[derive(Debug)]
enum Memory {
    /// Keys and values of each layer in ranges of their own.
    Mapped(Vec<[Reserved; 2]>),
    /// All in one piece, where the GPU maps no memory; None until the number of blocks is known.
    Whole(Option<DeviceMemory>),
}

impl KvCache {
    /// Addresses for as many blocks as the whole GPU could hold, and memory for the first few.
    pub(super) fn reserve(gpu: &Arc<Gpu>, model: &ModelConfig, dtype: KvDtype) -> Result<Self, CudaError> {
        let block_bytes = layer_block_bytes(model, dtype);
        let Some(granule) = Reserved::granule(gpu)? else {
            return Ok(Self { memory: Memory::Whole(None), layers: Vec::new(), block_bytes });
        };
        let (_, total) = gpu.memory()?;
        let most = kv_block_bytes(model, dtype).map(|bytes| total / (bytes as u64).max(1) * block_bytes);
        let side = |kind: LayerKind| {
            let mut side = Reserved::new(gpu, most[group_of(kind)], granule)?;
            // A first granule, so that no launch of the start can meet an address without memory.
            side.grow(1, WHAT)?;
            Ok::<_, CudaError>(side)
        };
        let sides = model.layers.iter().map(|kind| Ok([side(*kind)?, side(*kind)?]));
        let sides = sides.collect::<Result<Vec<_>, CudaError>>()?;
        let layers = sides.iter().map(|sides| sides.each_ref().map(Reserved::address)).collect();
        Ok(Self { memory: Memory::Mapped(sides), layers, block_bytes })
    }

    /// Launches can be recorded before there is memory.
    pub(super) fn has_addresses(&self) -> bool {
        matches!(self.memory, Memory::Mapped(_))
    }

    /// Takes memory for so many blocks of each group.
    pub(super) fn grow(
        &mut self,
        gpu: &Arc<Gpu>,
        model: &ModelConfig,
        blocks: [usize; KV_GROUPS],
    ) -> Result<(), CudaError> {
        let bytes = |kind: &LayerKind| blocks[group_of(*kind)] as u64 * self.block_bytes;
        match &mut self.memory {
            Memory::Mapped(sides) => {
                let sides = sides.iter_mut().zip(&model.layers);
                sides
                    .flat_map(|(sides, kind)| sides.iter_mut().map(move |side| (side, kind)))
                    .try_for_each(|(side, kind)| side.grow(bytes(kind), WHAT))
            }
            Memory::Whole(memory) => {
                let total = model.layers.iter().map(|kind| 2 * bytes(kind)).sum();
                let whole = DeviceMemory::new(gpu, total, WHAT)?;
                let mut next = whole.address();
                let mut take = |bytes: u64| {
                    next += bytes;
                    next - bytes
                };
                self.layers = model.layers.iter().map(|kind| [0; 2].map(|_| take(bytes(kind)))).collect();
                *memory = Some(whole);
                Ok(())
            }
        }
    }

    /// Keys and values of a layer.
    pub(super) fn layer(&self, layer: usize) -> (Address, Address) {
        let [keys, values] = self.layers[layer];
        (keys, values)
    }

    /// Sets every byte.
    pub(super) fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        match &self.memory {
            Memory::Mapped(sides) => sides.iter().flatten().try_for_each(|side| side.fill(stream, byte)),
            Memory::Whole(memory) => memory.iter().try_for_each(|memory| memory.fill(stream, byte)),
        }
    }
}

const WHAT: &str = "the KV cache";

/// KV group of a kind of layer.
pub(super) fn group_of(kind: LayerKind) -> usize {
    match kind {
        LayerKind::Full => 0,
        LayerKind::Sliding => 1,
    }
}
