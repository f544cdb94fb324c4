//! One step of a decoder, whatever the device.

use crate::backend::{Backend, BackendError, Projection};
use crate::plan::{StepMasks, StepOutput, StepPlan};

/// Runs a step without constrained rows to its end.
pub fn forward<B: Backend>(device: &mut B, plan: &StepPlan) -> Result<StepOutput, BackendError> {
    enqueue(device, plan)?;
    device.finish()
}

/// Runs a step to its end. `masks` is called once there is something to draw from, if the step has constrained rows.
pub fn forward_masked<B: Backend>(
    device: &mut B,
    plan: &StepPlan,
    masks: impl FnOnce() -> Result<StepMasks, BackendError>,
) -> Result<StepOutput, BackendError> {
    enqueue(device, plan)?;
    if !plan.constrained.is_empty() {
        enqueue_draws(device, masks()?)?;
    }
    device.finish()
}

/// Hands a step to the device, up to where it waits for masks if it does. On one that works by itself it runs from then on;
/// `Backend::finish` has its result.
pub fn enqueue<B: Backend>(device: &mut B, plan: &StepPlan) -> Result<(), BackendError> {
    device.begin(plan)?;
    if !plan.rows.is_empty() && !device.replay() {
        layers(device);
        if plan.rows.iter().any(|row| row.want.pools()) {
            device.pool();
        }
        if !plan.constrained.is_empty() {
            device.logits(0);
            return Ok(());
        }
        passes(device, 0);
    }
    if plan.constrained.is_empty() { device.end() } else { Ok(()) }
}

/// The rest of a step with constrained rows.
pub fn enqueue_draws<B: Backend>(device: &mut B, masks: StepMasks) -> Result<(), BackendError> {
    device.set_masks(masks)?;
    if !device.replay_draws() {
        device.sample(0);
        passes(device, 1);
    }
    device.end()
}

/// Every operation of the step that was begun.
pub fn operations<B: Backend>(device: &mut B) {
    layers(device);
    passes(device, 0);
}

fn passes<B: Backend>(device: &mut B, from: usize) {
    for pass in from..device.logit_passes() {
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
