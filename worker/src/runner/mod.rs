//! Executes step plans, at most two in flight.

use crate::backend::BackendError;
use crate::plan::{StepId, StepOutput, StepPlan};

pub use model::ModelRunner;

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
