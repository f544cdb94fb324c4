//! The paged KV cache: per layer, keys and values as `[block][kv_head][16][head_dim]`.

use thalweg_model::config::ModelConfig;

use super::config::{BLOCK_TOKENS, CpuBackendConfig, group_of, layer_block_bytes};
use super::kv_dtype::{KvDtype, KvElement, with_kv_element};
use super::memory::{OutOfMemory, Zeroed};
use super::pool::SendPtr;

/// Keys and values of all layers. Pages are resident once a block in them was written.
pub(super) struct KvCache {
    layers: Vec<Layer>,
    dtype: KvDtype,
    head_dim: usize,
    kv_heads: usize,
    block_bytes: usize,
}

struct Layer {
    group: usize,
    keys: Zeroed<u8>,
    values: Zeroed<u8>,
}

impl KvCache {
    pub(super) fn new(model: &ModelConfig, config: &CpuBackendConfig) -> Result<Self, OutOfMemory> {
        let block_bytes = layer_block_bytes(model, config.kv_dtype);
        let layer = |group: usize| {
            let bytes = config.kv_blocks[group].saturating_mul(block_bytes);
            let keys = Zeroed::new(bytes, "the KV cache")?;
            Ok(Layer { group, keys, values: Zeroed::new(bytes, "the KV cache")? })
        };
        let layers = model.layers.iter().map(|kind| layer(group_of(*kind))).collect::<Result<_, _>>()?;
        let (head_dim, kv_heads) = (model.head_dim, model.num_kv_heads);
        Ok(Self { layers, dtype: config.kv_dtype, head_dim, kv_heads, block_bytes })
    }

    /// One layer's cache, to read.
    pub(super) fn layer(&self, layer: usize) -> LayerKv<'_> {
        let Layer { keys, values, .. } = &self.layers[layer];
        let head_bytes = self.block_bytes / self.kv_heads;
        LayerKv { keys, values, dtype: self.dtype, block_bytes: self.block_bytes, head_bytes }
    }

    /// One layer's cache, for tasks that write distinct tokens.
    pub(super) fn writer(&mut self, layer: usize) -> KvWriter {
        let Layer { keys, values, .. } = &mut self.layers[layer];
        KvWriter {
            bytes: keys.len(),
            keys: SendPtr::new(keys.as_mut_ptr()),
            values: SendPtr::new(values.as_mut_ptr()),
            dtype: self.dtype,
            head_dim: self.head_dim,
            kv_heads: self.kv_heads,
        }
    }

    /// Copies block `from` onto block `to` in every layer of a group.
    pub(super) fn copy_block(&mut self, group: usize, from: usize, to: usize) {
        let size = self.block_bytes;
        for layer in self.layers.iter_mut().filter(|layer| layer.group == group) {
            for half in [&mut layer.keys, &mut layer.values] {
                half.copy_within(from * size..(from + 1) * size, to * size);
            }
        }
    }

    /// Bytes of everything, touched or not.
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| 2 * layer.keys.len() as u64).sum()
    }

    /// Fills all of it with a byte: tests mark what nobody may read.
    #[cfg(test)]
    pub(super) fn fill(&mut self, byte: u8) {
        for layer in &mut self.layers {
            layer.keys.fill(byte);
            layer.values.fill(byte);
        }
    }
}

/// Keys and values of one layer.
#[derive(Clone, Copy)]
pub(super) struct LayerKv<'a> {
    keys: &'a [u8],
    values: &'a [u8],
    pub(super) dtype: KvDtype,
    block_bytes: usize,
    head_bytes: usize,
}

impl<'a> LayerKv<'a> {
    /// `[16][head_dim]` keys of one head in one block.
    pub(super) fn keys(&self, block: usize, kv_head: usize) -> &'a [u8] {
        &self.keys[block * self.block_bytes + kv_head * self.head_bytes..][..self.head_bytes]
    }

    /// `[16][head_dim]` values of one head in one block.
    pub(super) fn values(&self, block: usize, kv_head: usize) -> &'a [u8] {
        &self.values[block * self.block_bytes + kv_head * self.head_bytes..][..self.head_bytes]
    }
}

/// Writes tokens of one layer, from several threads at once.
pub(super) struct KvWriter {
    keys: SendPtr<u8>,
    values: SendPtr<u8>,
    bytes: usize,
    dtype: KvDtype,
    head_dim: usize,
    kv_heads: usize,
}

impl KvWriter {
    /// Writes a token's keys and values, `[kv_head][head_dim]` each, at its place in a block.
    ///
    /// # Safety
    /// No other thread reads or writes this place, and the cache outlives the writer.
    pub(super) unsafe fn write(&self, block: usize, place: usize, keys: &[f32], values: &[f32]) {
        with_kv_element!(self.dtype, E => {
            let row = self.head_dim * E::BYTES;
            for head in 0..self.kv_heads {
                let at = ((block * self.kv_heads + head) * BLOCK_TOKENS + place) * row;
                assert!(at + row <= self.bytes, "block {block} lies outside of the KV cache");
                let part = head * self.head_dim..(head + 1) * self.head_dim;
                // SAFETY: the range was just checked against the allocation, and the place is the caller's alone.
                unsafe {
                    E::store(&keys[part.clone()], self.keys.get().add(at));
                    E::store(&values[part], self.values.get().add(at));
                }
            }
        });
    }
}
