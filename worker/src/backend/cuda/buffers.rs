//! Memory of one worker on its GPU for steps: taken at the start, never more.

use thalweg_model::config::ModelConfig;

use super::abi::{Sampled, bytes_of};
use super::config::{ActivationBytes, CudaBackendConfig, GROUP_KINDS, partial_bytes, partials, slot_bytes};
use super::context::Stream;
use super::error::CudaError;
use super::memory::{ALIGNMENT, Address, DeviceMemory};
use crate::plan::KV_GROUPS;

/// Activations, logits, partial results, slots, results; one allocation.
#[derive(Debug)]
pub(super) struct Buffers {
    _memory: DeviceMemory,
    pub(super) residual: Address,
    pub(super) normed: Address,
    pub(super) qkv: Address,
    pub(super) attended: Address,
    pub(super) gate_up: Address,
    pub(super) activated: Address,
    pub(super) projected: Address,
    pub(super) narrowed: Address,
    pub(super) squares: Address,
    pub(super) last: Address,
    pub(super) logits: Address,
    pub(super) scales: Address,
    pub(super) partial_o: Address,
    pub(super) partial_ml: Address,
    pub(super) slot_params: Address,
    pub(super) slot_bias: Address,
    pub(super) slot_ends: Address,
    pub(super) last_token: Address,
    pub(super) seen: Address,
    pub(super) sums: Address,
    /// Zero between steps.
    pub(super) tickets: Address,
}

impl Buffers {
    /// All zero.
    pub(super) fn new(
        stream: &Stream,
        model: &ModelConfig,
        config: &CudaBackendConfig,
    ) -> Result<Self, CudaError> {
        let (sums, weights) = partial_bytes(model);
        let partials = partials(model, config) as u64;
        let slots = slot_bytes(model).map(|bytes| bytes * config.max_slots as u64);
        let mut sizes = ActivationBytes::of(model, config).all().to_vec();
        sizes.extend([partials * sums, partials * weights]);
        sizes.extend(slots);
        sizes.push((config.max_slots * model.num_kv_heads * 4) as u64);
        let total = sizes.iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum();
        let memory = DeviceMemory::new(stream.gpu(), total, "activations")?;
        memory.fill(stream, 0)?;
        let mut next = memory.address();
        let mut taken = sizes.iter().map(|bytes| {
            let begin = next;
            next += bytes.next_multiple_of(ALIGNMENT);
            begin
        });
        let mut take = || taken.next().unwrap_or_default();
        Ok(Self {
            residual: take(),
            normed: take(),
            qkv: take(),
            attended: take(),
            gate_up: take(),
            activated: take(),
            projected: take(),
            narrowed: take(),
            squares: take(),
            last: take(),
            logits: take(),
            scales: take(),
            partial_o: take(),
            partial_ml: take(),
            slot_params: take(),
            slot_bias: take(),
            slot_ends: take(),
            last_token: take(),
            seen: take(),
            sums: take(),
            tickets: take(),
            _memory: memory,
        })
    }
}

/// Cosines and sines of every position: `[position][head_dim / 2]` pairs, for each kind of layer that there is.
#[derive(Debug)]
pub(super) struct Rope {
    _memory: DeviceMemory,
    tables: [Address; KV_GROUPS],
}

impl Rope {
    /// Angles in f64, rounded once.
    pub(super) fn new(stream: &Stream, model: &ModelConfig, positions: usize) -> Result<Self, CudaError> {
        let memory = DeviceMemory::new(stream.gpu(), super::config::rope_bytes(model, positions), "rope")?;
        let (mut offset, mut tables) = (0, [0; KV_GROUPS]);
        for (group, kind) in GROUP_KINDS.iter().enumerate() {
            if model.layers_of(*kind) == 0 {
                continue;
            }
            let table = rope_table(&model.rope_of(*kind).frequencies(model.head_dim), positions);
            let bytes = bytes_of(&table);
            memory.write(stream, offset, bytes)?;
            tables[group] = memory.address() + offset;
            offset += bytes.len() as u64;
        }
        Ok(Self { _memory: memory, tables })
    }

    pub(super) fn table(&self, group: usize) -> Address {
        self.tables[group]
    }
}

fn rope_table(frequencies: &[f64], positions: usize) -> Vec<[f32; 2]> {
    let angles = (0..positions).flat_map(|position| frequencies.iter().map(move |f| position as f64 * f));
    angles.map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect()
}

/// Bytes of `rows` results.
pub(super) fn result_bytes(rows: usize) -> usize {
    rows * size_of::<Sampled>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rope_begins_unturned() {
        let table = rope_table(&[1.0, 0.01], 3);
        assert_eq!(table[..2], [[1.0, 0.0]; 2]);
        assert_eq!(table[2], [1f64.cos() as f32, 1f64.sin() as f32]);
        assert_eq!(table[5], [0.02f64.cos() as f32, 0.02f64.sin() as f32]);
    }
}
