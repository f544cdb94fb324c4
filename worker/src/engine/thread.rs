//! The engine's own thread: take mail, submit up to two steps, collect one, tell.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::channel::Wakes;
use super::core::{Delivery, EngineCore};
use super::handle::Refusal;
use super::inbox::{Cut, Inbox, PANICKED, Submission, Ticket};
use super::load::{LoadSnapshot, Observations};
use super::queue::Backlog;
use crate::backend::BackendError;
use crate::kv::KvEventSink;
use crate::plan::StepId;
use crate::runner::{Runner, STEPS_IN_FLIGHT_MAX};
use crate::scheduler::StepMismatch;

/// Everything that lives on the thread.
pub(super) struct EngineThread {
    pub(super) core: EngineCore,
    pub(super) runner: Box<dyn Runner>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) kv_events: Option<Box<dyn KvEventSink>>,
    pub(super) load: Arc<watch::Sender<LoadSnapshot>>,
    pub(super) observations: Arc<Mutex<Observations>>,
    pub(super) started: Instant,
    pub(super) in_flight: VecDeque<StepId>,
}

/// What ends an engine before its time.
#[derive(Debug, thiserror::Error)]
enum EngineFault {
    #[error(transparent)]
    Runner(#[from] BackendError),
    #[error(transparent)]
    Mismatch(#[from] StepMismatch),
}

/// Reason of an end that was asked for.
const SHUT_DOWN: &str = "shut down";

impl EngineThread {
    /// Until shutdown or a fault. Whatever was streamed until then can be resumed elsewhere.
    pub(super) fn run(mut self) {
        let guard = EndGuard(self.inbox.clone());
        match self.serve() {
            Ok(()) => self.end(&SHUT_DOWN.into(), &Refusal::Draining),
            Err(fault) => {
                tracing::error!(error = %fault, "engine ended");
                let reason: Arc<str> = fault.to_string().into();
                self.end(&reason, &Refusal::Unavailable { reason: reason.clone() });
            }
        }
        drop(guard);
    }

    fn serve(&mut self) -> Result<(), EngineFault> {
        let mut idle = true;
        loop {
            let mail = self.inbox.take(idle);
            // At the end too: whoever came with the last mail is to hear the same as all others.
            self.receive(mail.submitted);
            for (ticket, cut) in mail.aborted {
                self.abort(ticket, &cut);
            }
            if mail.stopping {
                return self.settle();
            }
            self.submit_steps()?;
            idle = self.in_flight.is_empty();
            // Behind the submission: waking readers takes longer than planning, and the device should not wait for it. Before the
            // wait for the device, which may be long: load and aborts are news already.
            self.tell();
            self.collect_step()?;
        }
    }

    fn receive(&mut self, submitted: Vec<Submission>) {
        for Submission { ticket, request, arrived, events } in submitted {
            let arrived = arrived.saturating_duration_since(self.started);
            self.core.accept(ticket, request, events, arrived);
        }
    }

    fn abort(&mut self, ticket: Ticket, cut: &Cut) {
        match cut {
            Cut::All => self.core.abort(ticket),
            Cut::Choices(choices) => self.core.abort_choices(ticket, choices, self.now()),
        }
    }

    fn submit_steps(&mut self) -> Result<(), EngineFault> {
        while self.in_flight.len() < STEPS_IN_FLIGHT_MAX {
            let Some(plan) = self.core.plan(self.now()) else { break };
            match self.runner.submit(plan) {
                Ok(step) => self.in_flight.push_back(step),
                Err(error) => return Err(self.cause_of(error).into()),
            }
            self.provide_masks()?;
        }
        Ok(())
    }

    /// A runner that takes nothing more may have failed in a step that is not collected yet: that one tells why.
    fn cause_of(&mut self, error: BackendError) -> BackendError {
        let failed = self.in_flight.drain(..).find_map(|step| self.runner.collect(step).err());
        failed.unwrap_or(error)
    }

    fn collect_step(&mut self) -> Result<(), EngineFault> {
        if let Some(step) = self.in_flight.pop_front() {
            let output = self.runner.collect(step)?;
            self.core.complete(output, self.now())?;
            self.provide_masks()?;
        }
        Ok(())
    }

    /// All before the oldest step in flight is known now: what its constrained rows may draw follows, while the device is at
    /// work on their logits.
    fn provide_masks(&mut self) -> Result<(), EngineFault> {
        if let (Some(step), Some(masks)) = (self.in_flight.front(), self.core.masks()) {
            self.runner.provide_masks(*step, masks)?;
        }
        Ok(())
    }

    /// Hands out what is new; nothing here waits. Figures go first, so that whoever has read a stream's end finds it
    /// counted.
    fn tell(&mut self) {
        self.core.digest();
        let snapshot = self.core.snapshot();
        self.inbox.set_backlog(Backlog::of(&snapshot));
        self.core.hand_over_observations(&self.observations);
        // That it drains is said by whoever asks for it, and stays said.
        self.load.send_modify(|load| *load = LoadSnapshot { draining: load.draining, ..snapshot });
        for event in self.core.take_kv_events() {
            self.kv_events.iter_mut().for_each(|sink| sink.record(event.clone()));
        }
        let mut wakes = Wakes::default();
        for Delivery { ticket, to, event, is_last } in self.core.take_deliveries() {
            if is_last {
                self.inbox.retire(ticket);
            }
            if !to.send(event, &mut wakes) {
                self.inbox.abort_ticket(ticket);
            }
        }
        wakes.wake();
    }

    /// Waits for the device before its memory goes.
    fn settle(&mut self) -> Result<(), EngineFault> {
        while !self.in_flight.is_empty() {
            self.collect_step()?;
        }
        Ok(())
    }

    /// `refusal` is what those hear who still had something to come: either can be resumed elsewhere, but only a fault
    /// counts against the request.
    fn end(mut self, reason: &Arc<str>, refusal: &Refusal) {
        for submission in self.inbox.end(reason) {
            submission.events.send(Err(refusal.clone()), &mut Wakes::default());
        }
        self.core.fail(refusal);
        self.tell();
        // Those who wait for the end watch the load's sender: the device goes first.
        drop(self.runner);
        drop(self.load);
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Tells of a panic, so that nothing is queued for nobody. Streams notice by their senders being dropped.
struct EndGuard(Arc<Inbox>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.end(PANICKED);
    }
}
