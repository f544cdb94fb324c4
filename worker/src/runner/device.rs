//! A device that works by itself, driven from the engine's thread: enqueueing a step is short, and the engine plans the next while
//! the device runs.

use std::collections::VecDeque;

use super::forward::{enqueue, enqueue_draws};
use super::{Runner, STEPS_IN_FLIGHT_MAX, in_order, is_oldest};
use crate::backend::{Backend, BackendError};
use crate::plan::{StepId, StepMasks, StepOutput, StepPlan};

/// Enqueues steps on a device; after a failure every later call fails.
pub struct DeviceRunner<B> {
    device: B,
    in_flight: VecDeque<StepId>,
    next: StepId,
    failed: bool,
}

impl<B: Backend> DeviceRunner<B> {
    /// Takes the device.
    pub fn new(device: B) -> Self {
        let in_flight = VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX);
        Self { device, in_flight, next: StepId(0), failed: false }
    }

    /// The device, while no step is in flight.
    pub fn device(&mut self) -> &mut B {
        &mut self.device
    }

    fn sound(&self) -> Result<(), BackendError> {
        if self.failed { Err(super::failure("an earlier step failed".into())) } else { Ok(()) }
    }
}

impl<B: Backend> Runner for DeviceRunner<B> {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        self.sound()?;
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return Err(super::failure(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        let enqueued = enqueue(&mut self.device, &plan);
        self.failed = enqueued.is_err();
        enqueued?;
        let step = self.next;
        self.next = StepId(step.0 + 1);
        self.in_flight.push_back(step);
        Ok(step)
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        self.sound()?;
        is_oldest(&self.in_flight, step)?;
        let enqueued = enqueue_draws(&mut self.device, masks);
        self.failed = enqueued.is_err();
        enqueued
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        self.sound()?;
        in_order(&mut self.in_flight, step)?;
        let output = self.device.finish();
        self.failed = output.is_err();
        output
    }
}
