//! A running generation: a task that drains the worker, and what the API reads.

use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::ids::WorkerId;
use thalweg_proto::v1;
use tokio::task::AbortHandle;

use super::Dispatcher;
use super::attempt::Broken;
use super::buffer::Buffer;
use super::stage::Streaming;
use crate::error::RouterError;

/// How long a worker that has sent its last token may take to close its stream in order.
const CLOSING: Duration = Duration::from_secs(1);

/// What a generation yields.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// Facts of the prompt; the first event, once.
    Prompt(v1::PromptInfo),
    /// New tokens, at most one delta per choice.
    Deltas(Vec<v1::ChoiceDelta>),
}

/// A running generation. Dropping it cancels down to the worker's KV blocks and frees what was booked.
pub struct Generation {
    worker: WorkerId,
    buffer: Arc<Buffer>,
    drain: AbortHandle,
}

impl Generation {
    pub(super) fn start(dispatcher: &Arc<Dispatcher>, mut streaming: Streaming) -> Self {
        let worker = streaming.placed.booking.worker().id.clone();
        let buffer = dispatcher.buffers.open();
        buffer.push(GenerationEvent::Prompt(std::mem::take(&mut streaming.prompt)));
        buffer.push(GenerationEvent::Deltas(std::mem::take(&mut streaming.first)));
        let drain =
            tokio::spawn(drain(Arc::clone(dispatcher), streaming, Arc::clone(&buffer))).abort_handle();
        Self { worker, buffer, drain }
    }

    /// Who serves it.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// The next event; None after every choice has finished. An error is the last event.
    pub async fn next(&mut self) -> Option<Result<GenerationEvent, RouterError>> {
        self.buffer.next().await
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // The task holds stream, booking and permit: they go with it.
        self.drain.abort();
    }
}

/// Takes the worker's tokens as fast as they come, whatever the client does.
async fn drain(dispatcher: Arc<Dispatcher>, mut streaming: Streaming, buffer: Arc<Buffer>) {
    let end = tokio::select! {
        end = to_the_end(&mut streaming, &buffer) => end,
        () = buffer.cut_off() => return,
        () = buffer.stalled(dispatcher.client_stall_timeout) => return,
        () = dispatcher.stop.cancelled() => Err(Broken::Refused(super::stopping())),
    };
    let Streaming { placed, mut source, progress, .. } = streaming;
    let request = &placed.hashed.request;
    match end {
        Ok(()) => {
            dispatcher.observe_lengths(request, &progress);
            buffer.end(Ok(()));
            drop(placed);
            // Dropping the stream before its trailers came would look like a cancellation to the worker.
            let _ = tokio::time::timeout(CLOSING, source.next()).await;
        }
        Err(ended) => {
            let error = ended.into_error(progress.tokens());
            dispatcher.metrics.dispatch.broken(error.code);
            tracing::warn!(
                request = request.request_id.as_str(), worker = %placed.booking.worker().id, %error,
                "generation ended early"
            );
            buffer.end(Err(error));
        }
    }
}

async fn to_the_end(streaming: &mut Streaming, buffer: &Buffer) -> Result<(), Broken> {
    while !streaming.progress.finished() {
        let Some(message) = streaming.source.next().await? else {
            return Err(Broken::Lost("it ended its answer early".to_owned()));
        };
        let deltas = streaming.progress.take(message.deltas).map_err(Broken::Refused)?;
        if !deltas.is_empty() {
            buffer.push(GenerationEvent::Deltas(deltas));
        }
    }
    Ok(())
}
