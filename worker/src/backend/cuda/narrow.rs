//! Behind the last layer's keys and values only the rows whose logits are wanted matter: of a prompt, one of thousands. They are brought
//! together, and the rest of the layer is done for them alone.

use super::abi::{N_LOGIT_ROWS, N_TOKENS};
use super::buffers::Buffers;
use super::device::CudaBackend;
use super::error::CudaError;
use super::layout::Capacities;
use super::memory::Address;

/// Whether a step has so much fewer logit rows than tokens that it pays, and `room` for them. Hidden states that are pooled are wanted of
/// every token.
pub(super) fn narrows(capacities: &Capacities, room: usize) -> bool {
    capacities.pooled == 0 && capacities.logit_rows < capacities.tokens && capacities.logit_rows <= room
}

impl CudaBackend {
    /// Whether it is done behind this layer's attention. Adapters are by token, and rows would lose theirs.
    pub(super) fn narrows_behind(&self, layer: usize) -> bool {
        let is_last = layer + 1 == self.model.config().num_layers();
        is_last && !self.has_adapters() && narrows(&self.shape.capacities, self.narrow_rows)
    }

    pub(super) fn narrow(&mut self) -> Result<(), CudaError> {
        // What attention has read is free.
        let Buffers { residual, attended, narrowed, qkv, .. } = self.buffers;
        let (counts, rows) = (self.at(self.layout.counts), self.at(self.layout.logit_rows));
        let addresses = [counts, rows, attended, residual, qkv, narrowed];
        let widths = (self.widths.query, self.widths.hidden);
        self.is_narrowed = true;
        // SAFETY: logit rows name tokens of this step; there is room for as many, as `narrows` has it.
        unsafe { self.kernels.narrow(self.launcher(), self.tokens(), addresses, widths) }
    }

    /// Rows that operations on every token work on now.
    pub(super) fn tokens(&self) -> usize {
        let capacities = &self.shape.capacities;
        if self.is_narrowed { capacities.logit_rows } else { capacities.tokens }
    }

    /// Where the GPU has their true number; kernels on tokens find it as the first of the counts.
    pub(super) fn tokens_at(&self) -> Address {
        let index = if self.is_narrowed { N_LOGIT_ROWS } else { N_TOKENS };
        self.at(self.layout.counts) + 4 * index as u64
    }

    /// Their residual stream.
    pub(super) fn residual(&self) -> Address {
        if self.is_narrowed { self.buffers.narrowed } else { self.buffers.residual }
    }

    /// What attention gave them.
    pub(super) fn attended(&self) -> Address {
        if self.is_narrowed { self.buffers.qkv } else { self.buffers.attended }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_narrowed_and_decode_or_pooled_steps_are_not() {
        let step = |tokens, logit_rows| Capacities { tokens, logit_rows, ..Capacities::default() };
        assert!(narrows(&step(8192, 4), 256));
        assert!(narrows(&step(8192, 0), 256));
        assert!(narrows(&step(512, 256), 256));
        assert!(!narrows(&step(512, 257), 256));
        assert!(!narrows(&step(256, 256), 256));
        assert!(!narrows(&Capacities { pooled: 1, ..step(8192, 4) }, 256));
    }
}
