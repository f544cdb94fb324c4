//! A token's projections between the product and attention.

use super::config::Widths;
use super::isa::Isa;
use super::kv::KvWriter;
use super::model::{CpuModel, Layer};
use super::rows::{add, rms_norm_in_place, rotate};
use super::step::Step;

/// What becomes of a token's projections before attention.
pub(super) struct Heads<'a> {
    pub(super) isa: Isa,
    pub(super) model: &'a CpuModel,
    pub(super) weights: &'a Layer,
    pub(super) widths: Widths,
}

impl Heads<'_> {
    /// Biases, q/k norm, rope; in place.
    pub(super) fn finish(&self, row: &mut [f32], (cos, sin): (&[f32], &[f32])) {
        if let Some(bias) = &self.weights.qkv_bias {
            add(self.isa, bias, row);
        }
        let config = &self.model.config;
        let (q, rest) = row.split_at_mut(self.widths.query);
        let k = &mut rest[..self.widths.kv];
        for (heads, norm) in [(q, &self.weights.q_norm), (k, &self.weights.k_norm)] {
            for head in heads.chunks_exact_mut(config.head_dim) {
                if let Some(norm) = norm {
                    rms_norm_in_place(self.isa, head, norm, config.rms_norm_eps);
                }
                rotate(self.isa, head, cos, sin);
            }
        }
    }

    /// Keys and values into the cache.
    ///
    /// # Safety
    /// Nobody else touches this token's place.
    pub(super) unsafe fn keep(
        &self,
        row: &[f32],
        step: &Step,
        token: usize,
        group: usize,
        writer: &KvWriter,
    ) {
        let (block, place) = step.place(token, group);
        let (keys, values) = row[self.widths.query..].split_at(self.widths.kv);
        // SAFETY: the caller's promise.
        unsafe { writer.write(block, place, keys, values) };
    }
}
