//! The model on a device, driven by a thread of its own, so that the engine plans a step while another runs.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::forward::forward_masked;
use super::{Runner, STEPS_IN_FLIGHT_MAX, failure, in_order, is_oldest};
use crate::backend::{Backend, BackendError};
use crate::plan::{StepId, StepMasks, StepOutput, StepPlan};

/// Executes plans in order on its own thread. A step that fails or panics surfaces from its `collect`; the thread has then
/// ended, and every later call fails.
pub struct ModelRunner {
    /// None once the thread is told to stop. Bounded: a third step is refused before it is sent.
    plans: Option<SyncSender<StepPlan>>,
    /// For the steps that wait for them, in order.
    masks: Option<SyncSender<StepMasks>>,
    outputs: Receiver<Result<StepOutput, BackendError>>,
    in_flight: VecDeque<StepId>,
    next: StepId,
    thread: Option<JoinHandle<()>>,
}

impl ModelRunner {
    /// Starts the thread.
    pub fn start<B: Backend + 'static>(device: B) -> Result<Self, BackendError> {
        let (plans, to_run) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let (done, outputs) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let (masks, provided) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let thread = std::thread::Builder::new()
            .name("runner".into())
            .spawn(move || run(device, &to_run, &provided, &done))
            .map_err(|error| failure(format!("cannot start a thread: {error}")))?;
        let in_flight = VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX);
        Ok(Self {
            plans: Some(plans),
            masks: Some(masks),
            outputs,
            in_flight,
            next: StepId(0),
            thread: Some(thread),
        })
    }
}

impl Runner for ModelRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return Err(failure(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        let sent = self.plans.as_ref().is_some_and(|plans| plans.send(plan).is_ok());
        if !sent {
            // Why it stopped is what the oldest uncollected step says; without one, it has been said.
            return Err(failure("an earlier step failed".into()));
        }
        let step = self.next;
        self.next = StepId(step.0 + 1);
        self.in_flight.push_back(step);
        Ok(step)
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        is_oldest(&self.in_flight, step)?;
        // Why it stopped is what `collect` says.
        let _ = self.masks.as_ref().map(|to| to.send(masks));
        Ok(())
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        in_order(&mut self.in_flight, step)?;
        self.outputs.recv().unwrap_or_else(|_| Err(failure("an earlier step failed".into())))
    }
}

impl Drop for ModelRunner {
    fn drop(&mut self) {
        // A step may wait for masks that nobody will provide.
        (self.plans, self.masks) = (None, None);
        if let Some(thread) = self.thread.take() {
            // It catches the device's panics; there is nothing to learn from joining it.
            let _ = thread.join();
        }
    }
}

fn run<B: Backend>(
    mut device: B,
    plans: &Receiver<StepPlan>,
    masks: &Receiver<StepMasks>,
    outputs: &SyncSender<Result<StepOutput, BackendError>>,
) {
    while let Ok(plan) = plans.recv() {
        let provided =
            || masks.recv().map_err(|_| failure("it was dropped while a step waited for masks".into()));
        let output = catch_unwind(AssertUnwindSafe(|| forward_masked(&mut device, &plan, provided)))
            .unwrap_or_else(|payload| Err(failure(format!("panicked: {}", message(payload.as_ref())))));
        let failed = output.is_err();
        if outputs.send(output).is_err() || failed {
            return;
        }
    }
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
