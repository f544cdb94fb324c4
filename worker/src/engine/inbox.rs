//! The only way into the engine's thread. Nothing here waits but the engine itself, when it has no work.

use std::sync::Arc;

use hashbrown::HashMap;
use parking_lot::{Condvar, Mutex};
use thalweg_proto::ids::AttemptId;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

use super::handle::Refusal;
use super::request::{EngineEvent, EngineRequest};

/// Reason of an end that nobody could give another one for.
pub(crate) const PANICKED: &str = "its thread panicked";

/// Number of an accepted request, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Ticket(pub(crate) u64);

/// Where a request's events go. Unbounded in type, bounded in fact: each event holds a token, or is the last.
pub(crate) type EventSender = UnboundedSender<Result<EngineEvent, Refusal>>;

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
    pub(crate) aborted: Vec<Ticket>,
    pub(crate) draining: bool,
    pub(crate) stopping: bool,
}

/// Bounded by `waiting_max` sequences, of the inbox and the scheduler's queue together: more are refused at once.
/// Aborts are bounded by the live requests.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    wake: Condvar,
    waiting_max: usize,
}

#[derive(Debug, Default)]
struct State {
    /// Something changed since the engine last looked.
    news: bool,
    mail: Mail,
    live: HashMap<Ticket, (String, AttemptId)>,
    last_ticket: u64,
    /// Sequences in `mail.submitted`.
    submitted: usize,
    /// Sequences in the scheduler's queue when it last said so.
    queued: usize,
    ended: Option<Arc<str>>,
}

impl Inbox {
    pub(crate) fn new(waiting_max: usize) -> Self {
        Self { state: Mutex::default(), wake: Condvar::new(), waiting_max }
    }

    /// Takes a request in, or says at once why not.
    pub(crate) fn submit(
        &self,
        request: EngineRequest,
        arrived: Instant,
        events: EventSender,
    ) -> Result<Ticket, Refusal> {
        let sequences = request.choices.iter().filter(|c| !c.finished).count();
        let mut state = self.state.lock();
        state.check_open()?;
        let waiting = state.queued + state.submitted;
        if waiting + sequences > self.waiting_max {
            return Err(Refusal::Overloaded { waiting, limit: self.waiting_max });
        }
        state.last_ticket += 1;
        let ticket = Ticket(state.last_ticket);
        state.live.insert(ticket, (request.request_id.clone(), request.attempt));
        state.submitted += sequences;
        state.mail.submitted.push(Submission { ticket, request, arrived, events });
        self.wake(&mut state);
        Ok(ticket)
    }

    /// Aborts what has this name; nothing when it is unknown or over.
    pub(crate) fn abort(&self, request_id: &str, attempt: AttemptId) {
        let mut state = self.state.lock();
        let named = |(_, (id, a)): &(&Ticket, &(String, AttemptId))| id == request_id && *a == attempt;
        let tickets: Vec<Ticket> = state.live.iter().filter(named).map(|(ticket, _)| *ticket).collect();
        tickets.into_iter().for_each(|ticket| state.abort(ticket));
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
        let mut state = self.state.lock();
        state.mail.draining = true;
        self.wake(&mut state);
    }

    /// Refuses new work and aborts the running.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.mail.draining = true;
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
        state.queued += std::mem::take(&mut state.submitted);
        let Mail { draining, stopping, .. } = state.mail;
        std::mem::replace(&mut state.mail, Mail { draining, stopping, ..Mail::default() })
    }

    /// Engine's side: sequences that wait now.
    pub(crate) fn set_queued(&self, sequences: usize) {
        self.state.lock().queued = sequences;
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
            None if self.mail.draining => Err(Refusal::Draining),
            None => Ok(()),
        }
    }

    fn abort(&mut self, ticket: Ticket) {
        if self.live.remove(&ticket).is_some() {
            self.mail.aborted.push(ticket);
        }
    }
}
