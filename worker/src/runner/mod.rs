//! Executes step plans, at most two in flight.

use std::collections::VecDeque;

use crate::backend::BackendError;
use crate::plan::{StepId, StepMasks, StepOutput, StepPlan};

pub use device::DeviceRunner;
pub use model::ModelRunner;

mod device;
pub mod forward;
mod model;
pub mod sim;
#[cfg(test)]
mod tests;

/// What the engine drives: the model on a device, or a simulation of one.
pub trait Runner: Send {
    /// Queues a step. At most [`STEPS_IN_FLIGHT_MAX`] may be uncollected.
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError>;
    /// What may be drawn in the constrained rows of the oldest uncollected step, which must be `step` and has such rows. Once a
    /// step, before `collect`: the step does not end without.
    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError>;
    /// Waits for the oldest uncollected step, which must be `step`.
    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError>;
}

/// Steps submitted and not yet collected.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Takes `step` off the uncollected ones, of which it must be the oldest.
fn in_order(in_flight: &mut VecDeque<StepId>, step: StepId) -> Result<(), BackendError> {
    is_oldest(in_flight, step)?;
    in_flight.pop_front();
    Ok(())
}

fn is_oldest(in_flight: &VecDeque<StepId>, step: StepId) -> Result<(), BackendError> {
    match in_flight.front() == Some(&step) {
        true => Ok(()),
        false => Err(failure(format!("step {} is not the oldest uncollected one", step.0))),
    }
}

fn failure(reason: String) -> BackendError {
    BackendError { device: "runner".into(), reason }
}
