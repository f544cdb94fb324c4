//! One step of a decoder, whatever the device.

use crate::backend::{Backend, BackendError, Projection};
use crate::plan::{StepOutput, StepPlan};

/// Runs a step to its end.
pub fn forward<B: Backend>(device: &mut B, plan: &StepPlan) -> Result<StepOutput, BackendError> {
    device.begin(plan)?;
    if !plan.rows.is_empty() {
        device.embed();
        for layer in 0..device.layers() {
            device.norm_qkv(layer);
            device.attention(layer);
            device.project_residual(layer, Projection::Attention);
            device.norm_gate_up_act(layer);
            device.project_residual(layer, Projection::Mlp);
        }
        for pass in 0..device.logit_passes() {
            device.logits(pass);
            device.sample(pass);
        }
    }
    device.finish()
}
