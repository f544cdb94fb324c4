//! One Generate stream: the engine's events on their way out. Dropping it aborts the request down to its blocks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use thalweg_proto::v1;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::wire;
use crate::engine::{EngineEvent, EngineStream, FinishReason, Refusal};
use crate::metrics::{EventCounters, Outcome};

/// Tokens after which a request is on trial no more: as many as acquit it at its router.
const ACQUITTING_TOKENS: usize = 4;

/// Pulled by the transport as the router reads: neither the engine nor a task ever waits for a send. What is not read
/// yet is bounded by the request's max_tokens.
pub(crate) struct GenerateStream {
    events: EngineStream,
    attempt_id: u64,
    first_token: u32,
    /// Choices that have not finished.
    open: usize,
    /// The worker ends though the engine has not: its device hangs.
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    ending: Ending,
    /// Its messages take another way; here is only its end.
    has_channel: bool,
    trial: Option<Trial>,
}

/// No other request is on trial meanwhile.
struct Trial {
    _turn: OwnedSemaphorePermit,
    tokens: usize,
}

/// What the stream keeps of its request.
pub(crate) struct StreamedRequest {
    pub(crate) attempt_id: u64,
    pub(crate) first_token: u32,
    pub(crate) open: usize,
    pub(crate) has_channel: bool,
    pub(crate) trial: Option<OwnedSemaphorePermit>,
}

/// Sees to it that a request is counted once, however it ends.
struct Ending {
    /// Every choice has ended.
    finished: bool,
    /// A choice ran to its end; the others may have been cut off on the way.
    ran_to_end: bool,
    failed: bool,
    counters: EventCounters,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.counters.ended(match (self.failed, self.finished && self.ran_to_end) {
            (true, _) => Outcome::Failed,
            (false, true) => Outcome::Finished,
            (false, false) => Outcome::Aborted,
        });
    }
}

impl GenerateStream {
    pub(crate) fn new(
        events: EngineStream,
        request: StreamedRequest,
        counters: EventCounters,
        closing: CancellationToken,
    ) -> Self {
        let StreamedRequest { attempt_id, first_token, open, has_channel, trial } = request;
        Self {
            events,
            attempt_id,
            first_token,
            open,
            closing: Box::pin(closing.cancelled_owned()),
            ending: Ending { finished: false, ran_to_end: false, failed: false, counters },
            has_channel,
            trial: trial.map(|turn| Trial { _turn: turn, tokens: 0 }),
        }
    }

    fn note(&mut self, event: &EngineEvent) {
        for finish in event.deltas.iter().filter_map(|d| d.finish) {
            self.open -= 1;
            self.ending.ran_to_end |= finish != FinishReason::Abort;
        }
        self.ending.finished = self.open == 0;
        self.trial.take_if(|trial| {
            trial.tokens += event.deltas.iter().map(|delta| delta.tokens.len()).sum::<usize>();
            trial.tokens >= ACQUITTING_TOKENS
        });
    }
}

impl Stream for GenerateStream {
    type Item = Result<v1::GenerateResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.ending.failed {
            return Poll::Ready(None);
        }
        let item = loop {
            match Pin::new(&mut this.events).poll_next(cx) {
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Ok(event))) if this.has_channel => this.note(&event),
                Poll::Ready(Some(item)) => break item,
                Poll::Pending => {
                    ready!(this.closing.as_mut().poll(cx));
                    break Err(Refusal::Draining);
                }
            }
        };
        Poll::Ready(Some(match item {
            Ok(event) => {
                this.note(&event);
                Ok(wire::response(this.attempt_id, this.first_token, event))
            }
            Err(refusal) => {
                this.ending.failed = true;
                Err(wire::status(&refusal))
            }
        }))
    }
}
