//! Hidden states of prompts, pooled. A mean grows token by token in the order of the prompt, in f32, so that it is the same
//! however the prompt was cut into rows; slots hold it between them.

use super::memory::{OutOfMemory, Zeroed};
use super::step::{PooledRow, StepRow};
use crate::pooling::{Pooling, normalise};

/// Sums of every slot, and the vectors of the step in work.
pub(super) struct Pooled {
    width: usize,
    /// `[slot][hidden]`.
    sums: Zeroed<f32>,
    /// Row of the step, and its vector.
    ended: Vec<(usize, Vec<f32>)>,
}

/// Bytes of all sums.
pub(super) fn bytes(slots: usize, width: usize) -> u64 {
    4 * (slots as u64).saturating_mul(width as u64)
}

impl Pooled {
    pub(super) fn new(slots: usize, width: usize) -> Result<Self, OutOfMemory> {
        Ok(Self { width, sums: Zeroed::new(slots.saturating_mul(width), "embeddings")?, ended: Vec::new() })
    }

    /// Takes in a row's normed hidden states, `[token][hidden]`.
    pub(super) fn take(&mut self, pooled: PooledRow, row: &StepRow, hidden: &[f32]) {
        let PooledRow { row: index, pooling, ends } = pooled;
        let mut vector = match pooling {
            Pooling::Last => hidden[hidden.len() - self.width..].to_vec(),
            Pooling::Mean => {
                let sum = &mut self.sums[row.slot * self.width..][..self.width];
                if row.context == 0 {
                    sum.fill(0.0);
                }
                for token in hidden.chunks_exact(self.width) {
                    sum.iter_mut().zip(token).for_each(|(sum, x)| *sum += x);
                }
                if !ends {
                    return;
                }
                // The direction of the sum is that of the mean.
                sum.to_vec()
            }
        };
        if ends {
            normalise(&mut vector);
            self.ended.push((index, vector));
        }
    }

    /// Vectors of the rows that ended their prompts.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (usize, Vec<f32>)> {
        self.ended.drain(..)
    }
}
