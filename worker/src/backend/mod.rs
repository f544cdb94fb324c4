//! What a device does for a forward pass. Operations have the grain of a fused kernel, enqueue only and read nothing back;
//! the pass itself is written once, in `runner/forward.rs`, over this trait.

use crate::plan::{BlockId, StepMasks, StepOutput, StepPlan};

#[allow(
    unsafe_code,
    reason = "vector instructions, mapped memory, threads that write to their own parts of one buffer"
)]
pub mod cpu;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "calls of NVIDIA's libraries, and memory that the GPU reads and writes")]
pub mod cuda;

/// A device with the model's weights, a KV cache and slots. A row's result never depends on the other rows of its step.
pub trait Backend: Send {
    /// Number of the model's layers.
    fn layers(&self) -> usize;
    /// Takes a step's metadata and token ids; operations below work on it until `finish`. A refused step has run nothing.
    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError>;
    /// Runs the step that was begun as one that was recorded before; false: its operations have to be enqueued one by one.
    fn replay(&mut self) -> bool {
        false
    }
    /// What may be drawn in the begun step's constrained rows; before the first `sample`, if it has such rows.
    fn set_masks(&mut self, masks: StepMasks) -> Result<(), BackendError>;
    /// Draws as a step that was recorded before; false: they have to be enqueued one by one.
    fn replay_draws(&mut self) -> bool {
        false
    }
    /// Residual stream from token ids.
    fn embed(&mut self);
    /// Norm, q/k/v projections and biases, q/k norm, rope, KV write.
    fn norm_qkv(&mut self, layer: usize);
    /// Attention of every row over its paged KV.
    fn attention(&mut self, layer: usize);
    /// Output projection of attention or MLP, post-norm where the model has one, added to the residual.
    fn project_residual(&mut self, layer: usize, projection: Projection);
    /// Norm, gate and up projections, activation, product.
    fn norm_gate_up_act(&mut self, layer: usize);
    /// Final norm of the rows that are pooled; adds to the means that their slots hold, or keeps the last token's. Called once, and
    /// only for steps with such rows.
    fn pool(&mut self);
    /// Times that `logits` and `sample` are called for this step: logits of a long prompt's every position are too many to hold
    /// at once. 0 where no row wants any.
    fn logit_passes(&self) -> usize;
    /// Final norm and output matrix, for the wanted positions of one pass.
    fn logits(&mut self, pass: usize);
    /// Penalties, masks, draw; logprobs; of the pass whose logits were computed last.
    fn sample(&mut self, pass: usize);
    /// Copies whole blocks within a KV group, in order, in every layer of it.
    fn copy_blocks(&mut self, group: usize, pairs: &[(BlockId, BlockId)]);
    /// All of the step is enqueued. A device that works by itself may then take the next one.
    fn end(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits for the oldest step that has ended so, and reads back what its rows wanted.
    fn finish(&mut self) -> Result<StepOutput, BackendError>;
}

/// The two projections back into the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    /// Behind attention.
    Attention,
    /// Behind the MLP.
    Mlp,
}

/// The device failed; its state is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{device}: {reason}")]
pub struct BackendError {
    /// Which device.
    pub device: String,
    /// What it said.
    pub reason: String,
}
