//! A running generation: a task that drains the worker, and what the API reads.

use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::ids::WorkerId;
use thalweg_proto::v1;
use tokio::task::AbortHandle;

use super::Dispatcher;
use super::broken::Broken;
use super::buffer::Buffer;
use super::ended::ChoiceEnder;
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
    ender: ChoiceEnder,
    drain: AbortHandle,
}

impl Generation {
    pub(super) fn start(dispatcher: &Arc<Dispatcher>, mut streaming: Streaming) -> Self {
        let worker = streaming.placed.booking.worker().id.clone();
        let (buffer, ender) = (dispatcher.buffers.open(), ChoiceEnder::default());
        // The rest of it, which may be large, goes to the client; what was cached is still to be accounted.
        let cached = v1::PromptInfo { cached_tokens: streaming.prompt.cached_tokens, ..Default::default() };
        buffer.push(GenerationEvent::Prompt(std::mem::replace(&mut streaming.prompt, cached)));
        let drain = drain(Arc::clone(dispatcher), streaming, Arc::clone(&buffer), ender.clone());
        let drain = tokio::spawn(drain).abort_handle();
        Self { worker, buffer, ender, drain }
    }

    /// Who served its first token.
    pub fn worker(&self) -> &WorkerId {
        &self.worker
    }

    /// Ends single choices while the others go on.
    pub fn ender(&self) -> ChoiceEnder {
        self.ender.clone()
    }

    /// The next event; None after every choice has finished. An error is the last event.
    pub async fn next(&mut self) -> Option<Result<GenerationEvent, RouterError>> {
        self.buffer.next().await
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // The task holds stream, booking and permit: they go with it. With the last token it lets go of them by itself.
        if !self.buffer.is_complete() {
            self.drain.abort();
        }
    }
}

/// Takes the workers' tokens as fast as they come, whatever the client does.
async fn drain(dispatcher: Arc<Dispatcher>, streaming: Streaming, buffer: Arc<Buffer>, ender: ChoiceEnder) {
    let request_id = streaming.placed.hashed.request.request_id.clone();
    let end = tokio::select! {
        end = to_the_end(&dispatcher, streaming, &buffer, &ender) => end,
        () = buffer.cut_off() => return,
        () = buffer.stalled(dispatcher.client_stall_timeout) => return,
        () = dispatcher.stop.cancelled() => Err(super::stopping()),
    };
    match end {
        Ok(Streaming { placed, source, .. }) => {
            dispatcher.observe_lengths(&placed.hashed.request, &placed.hashed.journey.progress);
            // Whoever waits for the end to begin something else finds its place free.
            drop(placed);
            buffer.end(Ok(()));
            // Dropping the stream before its trailers came would look like a cancellation to the worker.
            let _ = tokio::time::timeout(CLOSING, source.close()).await;
        }
        Err(error) => {
            dispatcher.metrics.dispatch.broken(error.code);
            tracing::warn!(request = request_id, %error, "generation ended early");
            buffer.end(Err(error));
        }
    }
}

/// Follows the worker, and those after it that continue what it began.
async fn to_the_end(
    dispatcher: &Dispatcher,
    mut streaming: Streaming,
    buffer: &Arc<Buffer>,
    ender: &ChoiceEnder,
) -> Result<Streaming, RouterError> {
    loop {
        // The blocks that the prefill was expected to bring are there.
        streaming.placed.booking.prefilled();
        dispatcher.account_hit(&streaming);
        buffer.push(GenerationEvent::Deltas(std::mem::take(&mut streaming.first)));
        let broken = match follow(&mut streaming, buffer, ender).await {
            Ok(()) => return Ok(streaming),
            Err(broken) => broken,
        };
        let Streaming { placed, source, .. } = streaming;
        drop(source);
        streaming = dispatcher.resume(placed.failed(broken)).await?;
    }
}

async fn follow(streaming: &mut Streaming, buffer: &Arc<Buffer>, ender: &ChoiceEnder) -> Result<(), Broken> {
    let Streaming { placed, source, .. } = streaming;
    // The end of an only choice is the end of the generation.
    let many = placed.hashed.request.n > 1;
    loop {
        ender.apply(placed);
        placed.proves_itself();
        // The channel brings tokens past this loop, and the first ones are what a prompt proves itself by.
        let is_relayed = source.has_channel() && placed.unproven_from.is_none();
        let progress = &mut placed.hashed.journey.progress;
        if progress.finished() {
            return Ok(());
        }
        if is_relayed {
            let interrupt = async { if many { ender.more().await } else { std::future::pending().await } };
            source.relay(progress, buffer, interrupt).await?;
            continue;
        }
        tokio::select! {
            biased;
            deltas = source.deltas(progress) => match deltas? {
                deltas if deltas.is_empty() => {}
                deltas => buffer.push(GenerationEvent::Deltas(deltas)),
            },
            () = ender.more(), if many => {}
        }
    }
}
