//! Prompts that are embedded: a sum of hidden states in each slot, and the step's vectors of those that end.

use super::buffers::Buffers;
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::PoolArgs;

impl CudaBackend {
    pub(super) fn pool_rows(&mut self) -> Result<(), CudaError> {
        let rows = self.shape.capacities.pooled;
        if rows == 0 {
            return Ok(());
        }
        debug_assert!(!self.is_narrowed, "states may be wanted of every token");
        let Buffers { residual, scales, sums, .. } = self.buffers;
        let args = PoolArgs {
            counts: self.at(self.layout.counts),
            rows: self.at(self.layout.pooled),
            residual,
            weight: self.model.output_norm(),
            epsilon: self.model.config().rms_norm_eps,
            scales,
            sums,
            vectors: self.staging.vectors(),
            hidden: self.widths.hidden,
        };
        // SAFETY: rows were made when the step was loaded, of its own tokens and of slots that there are; there is a vector for each slot.
        unsafe { self.kernels.pool(self.launcher(), (self.tokens(), rows), args) }
    }
}
