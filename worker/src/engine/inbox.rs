//! The only way into the engine's thread. Nothing here waits but the engine itself, when it has no work.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use thalweg_proto::ids::AttemptId;
use tokio::time::Instant;

use super::channel::EventSender;
use super::handle::Refusal;
use super::queue::{Backlog, QueueLimits};
use super::request::EngineRequest;

/// Reason of an end that nobody could give another one for.
pub(crate) const PANICKED: &str = "its thread panicked";

/// Number of an accepted request, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ticket(pub(crate) u64);

/// A request on its way to the scheduler.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) ticket: Ticket,
    pub(crate) request: EngineRequest,
    pub(crate) arrived: Instant,
    pub(crate) events: EventSender,
}

/// All that came since the last look.
#[derive(Debug, Default)]
pub(crate) struct Mail {
    pub(crate) submitted: Vec<Submission>,
    pub(crate) aborted: Vec<(Ticket, Cut)>,
    pub(crate) stopping: bool,
}

/// What is cut off of a request.
#[derive(Debug)]
pub(crate) enum Cut {
    /// All of it.
    All,
    /// These choices.
    Choices(Vec<u32>),
}

/// Bounded by [`QueueLimits`], of the inbox and the scheduler's queue together: more is refused at once. Aborts are bounded
/// by the live requests and their choices.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    wake: Condvar,
    limits: QueueLimits,
}

#[derive(Debug, Default)]
struct State {
    /// Something changed since the engine last looked.
    news: bool,
    mail: Mail,
    live: HashMap<Ticket, Live>,
    last_ticket: u64,
    /// All in `mail.submitted`.
    submitted: Backlog,
    /// What the scheduler had when it last said so, and what it was given since.
    backlog: Backlog,
    draining: bool,
    ended: Option<Arc<str>>,
}

#[derive(Debug)]
struct Live {
    request_id: String,
    attempt: AttemptId,
    /// Choices that were not cut off.
    choices: Vec<u32>,
}

impl Inbox {
    pub(crate) fn new(limits: QueueLimits) -> Self {
        Self { state: Mutex::default(), wake: Condvar::new(), limits }
    }

    /// Takes a request in, or says at once why not.
    pub(crate) fn submit(
        &self,
        request: EngineRequest,
        arrived: Instant,
        events: EventSender,
    ) -> Result<Ticket, Refusal> {
        let new = Backlog::of_request(&request);
        let mut state = self.state.lock();
        state.check_open()?;
        let mut there = state.backlog;
        there.add(&state.submitted);
        self.limits.check(&there, &new)?;
        state.last_ticket += 1;
        let ticket = Ticket(state.last_ticket);
        state.live.insert(ticket, Live::of(&request));
        state.submitted.add(&new);
        state.mail.submitted.push(Submission { ticket, request, arrived, events });
        self.wake(&mut state);
        Ok(ticket)
    }

    /// Aborts what has this name, or only these choices of it where there are any; nothing when it is unknown or over.
    pub(crate) fn abort(&self, request_id: &str, attempt: AttemptId, choices: &[u32]) {
        let mut state = self.state.lock();
        let named = |(_, live): &(&Ticket, &Live)| live.request_id == request_id && live.attempt == attempt;
        let tickets: Vec<Ticket> = state.live.iter().filter(named).map(|(ticket, _)| *ticket).collect();
        for ticket in tickets {
            match choices {
                [] => state.abort(ticket),
                choices => state.abort_choices(ticket, choices),
            }
        }
        self.wake(&mut state);
    }

    /// Aborts one request; nothing when it is over.
    pub(crate) fn abort_ticket(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        state.abort(ticket);
        self.wake(&mut state);
    }

    /// Refuses new work from now on.
    pub(crate) fn drain(&self) {
        self.state.lock().draining = true;
    }

    /// Refuses new work and aborts the running.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.draining = true;
        state.mail.stopping = true;
        self.wake(&mut state);
    }

    /// Why the engine ended, for whom it is known to have.
    pub(crate) fn end_reason(&self) -> Arc<str> {
        self.ended().unwrap_or_else(|| PANICKED.into())
    }

    /// Why the engine ended, if it has.
    pub(crate) fn ended(&self) -> Option<Arc<str>> {
        self.state.lock().ended.clone()
    }

    /// Engine's side: what came; waits until something does when `wait`.
    pub(crate) fn take(&self, wait: bool) -> Mail {
        let mut state = self.state.lock();
        while wait && !state.news {
            self.wake.wait(&mut state);
        }
        state.news = false;
        let submitted = std::mem::take(&mut state.submitted);
        state.backlog.add(&submitted);
        let stopping = state.mail.stopping;
        std::mem::replace(&mut state.mail, Mail { stopping, ..Mail::default() })
    }

    /// Engine's side: what there is to do now, without what it has not looked at.
    pub(crate) fn set_backlog(&self, backlog: Backlog) {
        self.state.lock().backlog = backlog;
    }

    /// Engine's side: a request is over. Said before its last event is sent, so that dropping the stream then is no abort.
    pub(crate) fn retire(&self, ticket: Ticket) {
        self.state.lock().live.remove(&ticket);
    }

    /// Engine's side: nothing is taken any more. Returns what was never looked at.
    pub(crate) fn end(&self, reason: &str) -> Vec<Submission> {
        let mut state = self.state.lock();
        state.ended.get_or_insert_with(|| reason.into());
        state.live.clear();
        std::mem::take(&mut state.mail.submitted)
    }

    fn wake(&self, state: &mut State) {
        state.news = true;
        self.wake.notify_one();
    }
}

impl State {
    fn check_open(&self) -> Result<(), Refusal> {
        match &self.ended {
            Some(reason) => Err(Refusal::Unavailable { reason: reason.clone() }),
            None if self.draining => Err(Refusal::Draining),
            None => Ok(()),
        }
    }

    fn abort(&mut self, ticket: Ticket) {
        if self.live.remove(&ticket).is_some() {
            self.mail.aborted.push((ticket, Cut::All));
        }
    }

    fn abort_choices(&mut self, ticket: Ticket, choices: &[u32]) {
        let Some(live) = self.live.get_mut(&ticket) else { return };
        let cut: Vec<u32> = live.choices.extract_if(.., |choice| choices.contains(choice)).collect();
        if !cut.is_empty() {
            self.mail.aborted.push((ticket, Cut::Choices(cut)));
        }
    }
}

impl Live {
    fn of(request: &EngineRequest) -> Self {
        let choices = request.choices.iter().filter(|c| !c.finished).map(|c| c.index).collect();
        Self { request_id: request.request_id.clone(), attempt: request.attempt, choices }
    }
}
