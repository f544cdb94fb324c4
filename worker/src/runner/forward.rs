//! One step of a decoder, whatever the device.

use crate::backend::{Backend, BackendError, Projection};
use crate::plan::{StepOutput, StepPlan};

/// Runs a step to its end.
pub fn forward<B: Backend>(device: &mut B, plan: &StepPlan) -> Result<StepOutput, BackendError> {
    enqueue(device, plan)?;
    device.finish()
}

/// Hands a step to the device. On one that works by itself it runs from then on; `Backend::finish` has its result.
pub fn enqueue<B: Backend>(device: &mut B, plan: &StepPlan) -> Result<(), BackendError> {
    device.begin(plan)?;
    if !plan.rows.is_empty() && !device.replay() {
        operations(device);
    }
    device.end()
}

/// Every operation of the step that was begun.
pub fn operations<B: Backend>(device: &mut B) {
    layers(device);
    for pass in 0..device.logit_passes() {
        device.logits(pass);
        device.sample(pass);
    }
}

/// From token ids to the last layer's residual stream.
pub fn layers<B: Backend>(device: &mut B) {
    device.embed();
    for layer in 0..device.layers() {
        device.norm_qkv(layer);
        device.attention(layer);
        device.project_residual(layer, Projection::Attention);
        device.norm_gate_up_act(layer);
        device.project_residual(layer, Projection::Mlp);
    }
}
