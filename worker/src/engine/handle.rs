//! The engine as others see it: generate, abort, drain, watch.

use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use parking_lot::Mutex;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::AttemptId;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::channel::{EventChannel, EventSender};
use super::inbox::{Inbox, Ticket};
use super::load::{LoadSnapshot, Observations};
use super::request::{ChoiceState, EngineEvent, EngineRequest};

/// Why a request is not, or no longer, served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full.
    #[error("{waiting} sequences wait and at most {limit} may; try again later or elsewhere")]
    Overloaded {
        /// Sequences in the queue.
        waiting: usize,
        /// What it holds.
        limit: usize,
    },
    /// All places are taken, and prompts wait for long enough already.
    #[error(
        "all places are taken and prompts of {:.1} s wait, at most {:.1} s may; try again later or elsewhere",
        ahead.as_secs_f64(), limit.as_secs_f64()
    )]
    Backlogged {
        /// Predicted time until the request's prompt would have its turn.
        ahead: Duration,
        /// What may wait.
        limit: Duration,
    },
    /// The worker takes no new work, or its time to finish what ran is over: that can be resumed elsewhere.
    #[error("this worker is draining; another one may take the request")]
    Draining,
    /// The request is wrong.
    #[error("{field}: {reason}")]
    InvalidRequest {
        /// Field of the request.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The grammar led to where it cannot be followed.
    #[error("grammar cannot be followed any further: {reason}; change it, or ask for plain text")]
    Grammar {
        /// Why.
        reason: String,
    },
    /// No room for a single output token.
    #[error(
        "prompt and output so far have {tokens} tokens; with one more to put out, the context holds {limit}"
    )]
    ContextLengthExceeded {
        /// Tokens of the prompt and of the longest output.
        tokens: usize,
        /// max_model_len.
        limit: usize,
    },
    /// The engine has ended; what it had streamed can be resumed elsewhere.
    #[error("the engine has ended: {reason}")]
    Unavailable {
        /// Why.
        reason: Arc<str>,
    },
}

impl Refusal {
    /// The code on the wire, which also tells whether a retry elsewhere is safe.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Overloaded { .. } | Self::Backlogged { .. } => ErrorCode::Overloaded,
            Self::Draining => ErrorCode::Draining,
            Self::InvalidRequest { .. } | Self::Grammar { .. } => ErrorCode::InvalidRequest,
            Self::ContextLengthExceeded { .. } => ErrorCode::ContextLengthExceeded,
            Self::Unavailable { .. } => ErrorCode::Unavailable,
        }
    }
}

/// Bounds that a request is held against before it is queued.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestLimits {
    pub(super) max_model_len: usize,
    pub(super) vocab_size: usize,
    pub(super) choices_max: usize,
}

/// A running engine. Cheap to clone; the engine stops when the last handle is gone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    inbox: Arc<Inbox>,
    limits: RequestLimits,
    load: watch::Receiver<LoadSnapshot>,
    /// Where draining is told; gone with the engine.
    told: Weak<watch::Sender<LoadSnapshot>>,
    observations: Arc<Mutex<Observations>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.inbox.stop();
    }
}

impl EngineHandle {
    pub(super) fn new(
        inbox: Arc<Inbox>,
        limits: RequestLimits,
        load: watch::Receiver<LoadSnapshot>,
        told: Weak<watch::Sender<LoadSnapshot>>,
        observations: Arc<Mutex<Observations>>,
    ) -> Self {
        Self { shared: Arc::new(Shared { inbox, limits, load, told, observations }) }
    }

    /// Queues a request, or refuses it at once.
    pub fn generate(&self, request: EngineRequest) -> Result<EngineStream, Refusal> {
        self.generate_to(request, None)
    }

    /// The same with a channel to which its events go; the stream then yields an event without tokens for each end, and the
    /// error if there is one.
    pub fn generate_to(
        &self,
        request: EngineRequest,
        channel: Option<Arc<EventChannel>>,
    ) -> Result<EngineStream, Refusal> {
        self.shared.limits.check(&request)?;
        let open = request.choices.iter().filter(|c| !c.finished).count();
        let (stream, events) = mpsc::unbounded_channel();
        let sender = EventSender { stream, channel: channel.map(|channel| (channel, request.attempt)) };
        let inbox = self.shared.inbox.clone();
        let ticket = inbox.submit(request, Instant::now(), sender)?;
        Ok(EngineStream { inbox, ticket, events, open })
    }

    /// Ends a request early, or only these of its choices when there are any: they finish with `FinishReason::Abort` and
    /// give their blocks back. Unknown and finished ones are left alone.
    pub fn abort(&self, request_id: &str, attempt: AttemptId, choices: &[u32]) {
        self.shared.inbox.abort(request_id, attempt, choices);
    }

    /// Refuses new work from now on; what runs or waits is finished. The load says so before anything is refused.
    pub fn drain(&self) {
        if let Some(told) = self.shared.told.upgrade() {
            told.send_modify(|load| load.draining = true);
        }
        self.shared.inbox.drain();
    }

    /// Waits until `drain` is called, by whomever, or the engine has ended.
    pub async fn draining(&self) {
        // An error means that the engine has ended.
        let _ = self.shared.load.clone().wait_for(|load| load.draining).await;
    }

    /// Waits, after `drain`, until nothing runs or waits, or the engine has ended.
    pub async fn drained(&self) {
        let idle = |load: &LoadSnapshot| load.draining && load.running == 0 && load.waiting == 0;
        // An error means that the engine has ended: nothing runs then either.
        let _ = self.shared.load.clone().wait_for(idle).await;
    }

    /// Load after every step; the newest only.
    pub fn load(&self) -> watch::Receiver<LoadSnapshot> {
        self.shared.load.clone()
    }

    /// Load and counters now.
    pub fn stats(&self) -> LoadSnapshot {
        self.shared.load.borrow().clone()
    }

    /// Histogram samples since the last call.
    pub fn take_observations(&self) -> Observations {
        std::mem::take(&mut self.shared.observations.lock())
    }

    /// Aborts everything.
    pub fn stop(&self) {
        self.shared.inbox.stop();
    }

    /// The same, and waits until the engine's thread has let go of the device.
    pub async fn shutdown(&self) {
        self.stop();
        self.ended().await;
    }

    /// Waits for the engine's end and tells its reason: "shut down", or the fault that ended it.
    pub async fn ended(&self) -> Arc<str> {
        let mut load = self.shared.load.clone();
        while load.changed().await.is_ok() {}
        self.shared.inbox.end_reason()
    }

    /// Why the engine no longer runs; None while it does.
    pub fn failure(&self) -> Option<Arc<str>> {
        self.shared.inbox.ended()
    }
}

impl RequestLimits {
    fn check(&self, request: &EngineRequest) -> Result<(), Refusal> {
        let invalid = |field, reason| Err(Refusal::InvalidRequest { field, reason });
        if request.prompt.is_empty() {
            return invalid("prompt_ids", "must hold at least one token".into());
        }
        let open: Vec<&ChoiceState> = request.choices.iter().filter(|c| !c.finished).collect();
        if open.is_empty() || open.len() > self.choices_max {
            return invalid("choices", format!("must hold 1 to {} that are not finished", self.choices_max));
        }
        if let Some(index) = repeated_index(&request.choices) {
            return invalid("choices", format!("index {index} is there twice"));
        }
        self.check_vocabulary("prompt_ids", &request.prompt)?;
        open.iter().try_for_each(|choice| self.check_vocabulary("choices.output_ids", &choice.output))?;
        let output = open.iter().map(|c| c.output.len()).max().unwrap_or(0);
        let (tokens, limit) = (request.prompt.len() + output, self.max_model_len);
        let needed = request.prompt.len() + usize::from(request.max_tokens > 0);
        if needed > limit || tokens > limit {
            return Err(Refusal::ContextLengthExceeded { tokens, limit });
        }
        Ok(())
    }

    fn check_vocabulary(&self, field: &'static str, ids: &[u32]) -> Result<(), Refusal> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(id) => {
                let reason = format!("token id {id} is outside of the vocabulary of {}", self.vocab_size);
                Err(Refusal::InvalidRequest { field, reason })
            }
        }
    }
}

fn repeated_index(choices: &[ChoiceState]) -> Option<u32> {
    let mut indexes: Vec<u32> = choices.iter().map(|c| c.index).collect();
    indexes.sort_unstable();
    indexes.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

/// Events of one request, in order; holds what the reader has not taken yet, which max_tokens bounds. Dropping it aborts
/// the request down to its blocks.
#[derive(Debug)]
pub struct EngineStream {
    inbox: Arc<Inbox>,
    ticket: Ticket,
    events: mpsc::UnboundedReceiver<Result<EngineEvent, Refusal>>,
    /// Choices that have not finished.
    open: usize,
}

impl EngineStream {
    /// The next event; None behind the last choice's end. An error is the last item.
    pub async fn recv(&mut self) -> Option<Result<EngineEvent, Refusal>> {
        std::future::poll_fn(|cx| self.poll_recv(cx)).await
    }

    fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<EngineEvent, Refusal>>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let event = match std::task::ready!(self.events.poll_recv(cx)) {
            Some(event) => event,
            None => Err(Refusal::Unavailable { reason: self.inbox.end_reason() }),
        };
        match &event {
            Ok(event) => self.open -= event.deltas.iter().filter(|d| d.finish.is_some()).count(),
            Err(_) => self.open = 0,
        }
        Poll::Ready(Some(event))
    }
}

impl Stream for EngineStream {
    type Item = Result<EngineEvent, Refusal>;

    fn poll_next(self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_recv(cx)
    }
}

impl Drop for EngineStream {
    fn drop(&mut self) {
        if self.open > 0 {
            self.inbox.abort_ticket(self.ticket);
        }
    }
}
