//! Executes step plans, at most two in flight.

use std::collections::VecDeque;

use crate::backend::BackendError;
use crate::plan::{StepId, StepOutput, StepPlan};

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
    /// Waits for the oldest uncollected step, which must be `step`.
    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError>;
}

/// Steps submitted and not yet collected.
pub const STEPS_IN_FLIGHT_MAX: usize = 2;

/// Takes `step` off the uncollected ones, of which it must be the oldest.
fn in_order(in_flight: &mut VecDeque<StepId>, step: StepId) -> Result<(), BackendError> {
    if in_flight.front() != Some(&step) {
        return Err(failure(format!("step {} is not the oldest uncollected one", step.0)));
    }
    in_flight.pop_front();
    Ok(())
}

fn failure(reason: String) -> BackendError {
    BackendError { device: "runner".into(), reason }
}
