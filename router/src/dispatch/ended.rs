//! Choices that their client has enough of, while others of the same request go on.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thalweg_proto::v1;
use tokio::sync::Notify;

use super::stage::Placed;

/// How workers say that they end single choices. One that does not would end the whole request.
const FEATURE: &str = "abort_choices";
/// How long the worker may take to answer: its choice then runs on to its own end, and nobody listens.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends single choices of a generation.
#[derive(Clone, Default)]
pub struct ChoiceEnder(Arc<Ended>);

#[derive(Default)]
struct Ended {
    choices: Mutex<Vec<u32>>,
    more: Notify,
}

impl ChoiceEnder {
    /// This choice needs no more tokens. Nothing when it has ended.
    pub fn end(&self, index: u32) {
        self.0.choices.lock().push(index);
        self.0.more.notify_one();
    }

    /// Returns once there may be more in `take`.
    pub(super) async fn more(&self) {
        self.0.more.notified().await;
    }

    /// Marks what was ended as finished, and tells the worker.
    pub(super) fn apply(&self, placed: &mut Placed) {
        let ended = std::mem::take(&mut *self.0.choices.lock());
        let open = |placed: &Placed, index| {
            placed.hashed.journey.progress.choices().iter().any(|c| c.index == index && !c.finished)
        };
        let choices: Vec<u32> = ended.into_iter().filter(|index| open(placed, *index)).collect();
        choices.iter().for_each(|index| placed.hashed.journey.progress.end_choice(*index));
        // When none is left, the stream is dropped, which says the same.
        if !choices.is_empty() && !placed.hashed.journey.progress.finished() {
            abort(placed, choices);
        }
    }
}

fn abort(placed: &Placed, choices: Vec<u32>) {
    let worker = placed.booking.worker();
    if !worker.has_feature(FEATURE) {
        return;
    }
    let (mut client, id) = (worker.client(), worker.id.clone());
    let request_id = placed.hashed.request.request_id.clone();
    let message = v1::AbortRequest { request_id, attempt_id: placed.attempt_id, choices };
    // Tokens go on meanwhile.
    tokio::spawn(async move {
        match tokio::time::timeout(ABORT_TIMEOUT, client.abort(message)).await {
            Ok(Ok(_)) => {}
            Ok(Err(status)) => tracing::debug!(worker = %id, %status, "a choice could not be ended"),
            Err(_) => tracing::debug!(worker = %id, "a choice was not ended in time"),
        }
    });
}
