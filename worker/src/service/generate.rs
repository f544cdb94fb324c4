//! One Generate stream: the engine's events on their way out. Dropping it aborts the request down to its blocks.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use thalweg_proto::v1;
use tonic::Status;

use super::wire;
use crate::engine::{EngineEvent, EngineStream, FinishReason};
use crate::metrics::{EventCounters, Outcome};

/// Pulled by the transport as the router reads: neither the engine nor a task ever waits for a send. What is not read
/// yet is bounded by the request's max_tokens.
pub(crate) struct GenerateStream {
    events: EngineStream,
    attempt_id: u64,
    first_token: u32,
    /// Choices that have not finished.
    open: usize,
    ending: Ending,
}

/// What the stream keeps of its request.
pub(crate) struct StreamedRequest {
    pub(crate) attempt_id: u64,
    pub(crate) first_token: u32,
    pub(crate) open: usize,
}

/// Sees to it that a request is counted once, however it ends.
struct Ending {
    finished: bool,
    aborted: bool,
    failed: bool,
    counters: EventCounters,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.counters.ended(match (self.failed, self.finished && !self.aborted) {
            (true, _) => Outcome::Failed,
            (false, true) => Outcome::Finished,
            (false, false) => Outcome::Aborted,
        });
    }
}

impl GenerateStream {
    pub(crate) fn new(events: EngineStream, request: &StreamedRequest, counters: EventCounters) -> Self {
        let StreamedRequest { attempt_id, first_token, open } = *request;
        Self {
            events,
            attempt_id,
            first_token,
            open,
            ending: Ending { finished: false, aborted: false, failed: false, counters },
        }
    }

    fn note(&mut self, event: &EngineEvent) {
        for finish in event.deltas.iter().filter_map(|d| d.finish) {
            self.open -= 1;
            self.ending.aborted |= finish == FinishReason::Abort;
        }
        self.ending.finished = self.open == 0;
    }
}

impl Stream for GenerateStream {
    type Item = Result<v1::GenerateResponse, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        let item = match ready!(Pin::new(&mut this.events).poll_next(cx)) {
            None => return Poll::Ready(None),
            Some(item) => item,
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
