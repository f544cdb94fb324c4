//! A model that is only pretended: steps take the time that a profile says, and tokens are a function of those before. The
//! scheduler, the block pool, the events and the whole service around it are those of a real one.

mod device;
mod faults;
mod language;
mod profile;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::time::Instant;

pub use faults::{CacheEventFault, Encode, FaultSwitch, FaultWatch, Faults, Garbage, Trigger};
pub use language::Language;
pub use profile::{OutputTokens, Profile, ProfileError, StepTime, Text, Tokens};

use super::{Runner, STEPS_IN_FLIGHT_MAX};
use crate::backend::BackendError;
use crate::plan::{StepId, StepMasks, StepOutput, StepPlan};
use device::Device;

/// What a simulation is made of.
#[derive(Clone)]
pub struct SimConfig {
    /// How long steps take.
    pub step: StepTime,
    /// What is said.
    pub language: Arc<Language>,
    /// What goes wrong.
    pub faults: FaultSwitch,
}

/// Pretends to execute plans, in order and in real time, on its own thread.
pub struct SimRunner {
    /// None once the thread is told to stop. Bounded: a third step is refused before it is sent.
    plans: Option<SyncSender<Submitted>>,
    /// For the steps that wait for them, in order.
    masks: Option<SyncSender<StepMasks>>,
    outputs: Receiver<Result<StepOutput, BackendError>>,
    in_flight: VecDeque<StepId>,
    next: u64,
    stopping: Arc<Stopping>,
    thread: Option<JoinHandle<()>>,
}

struct Submitted {
    step: u64,
    plan: StepPlan,
    at: Instant,
}

/// Cuts the thread's waits short when the runner is dropped.
#[derive(Default)]
struct Stopping {
    is_set: Mutex<bool>,
    set: Condvar,
}

impl Stopping {
    /// Waits so long, or less when it is time to stop. True then.
    fn wait(&self, time: Duration) -> bool {
        let mut is_set = self.is_set.lock();
        if !*is_set {
            self.set.wait_for(&mut is_set, time);
        }
        *is_set
    }
}

impl SimRunner {
    /// Starts the thread.
    pub fn start(config: SimConfig) -> Result<Self, BackendError> {
        let (plans, to_run) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let (done, outputs) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let (masks, provided) = sync_channel(STEPS_IN_FLIGHT_MAX);
        let stopping = Arc::<Stopping>::default();
        let mut device = Device::new(config, provided, stopping.clone());
        let thread = std::thread::Builder::new()
            .name("sim".into())
            .spawn(move || device.run(&to_run, &done))
            .map_err(|error| failure(format!("cannot start a thread: {error}")))?;
        let in_flight = VecDeque::with_capacity(STEPS_IN_FLIGHT_MAX);
        Ok(Self {
            plans: Some(plans),
            masks: Some(masks),
            outputs,
            in_flight,
            next: 0,
            stopping,
            thread: Some(thread),
        })
    }
}

impl Runner for SimRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return Err(failure(format!("{STEPS_IN_FLIGHT_MAX} steps are in flight already")));
        }
        let step = self.next;
        let submitted = Submitted { step, plan, at: Instant::now() };
        if self.plans.as_ref().is_none_or(|plans| plans.send(submitted).is_err()) {
            return Err(failure("an earlier step failed".into()));
        }
        self.next += 1;
        self.in_flight.push_back(StepId(step));
        Ok(StepId(step))
    }

    fn provide_masks(&mut self, _: StepId, masks: StepMasks) -> Result<(), BackendError> {
        // Why it stopped is what `collect` says.
        let _ = self.masks.as_ref().map(|to| to.send(masks));
        Ok(())
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        if self.in_flight.front() != Some(&step) {
            return Err(failure(format!("step {} is not the oldest uncollected one", step.0)));
        }
        self.in_flight.pop_front();
        self.outputs.recv().unwrap_or_else(|_| Err(failure("an earlier step failed".into())))
    }
}

impl Drop for SimRunner {
    fn drop(&mut self) {
        (self.plans, self.masks) = (None, None);
        *self.stopping.is_set.lock() = true;
        self.stopping.set.notify_all();
        if let Some(thread) = self.thread.take() {
            // It catches its own panics; there is nothing to learn from joining it.
            let _ = thread.join();
        }
    }
}

fn failure(reason: String) -> BackendError {
    BackendError { device: "sim".into(), reason }
}
