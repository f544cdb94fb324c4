//! Which prompts are in flight on one life of a worker, and those that were when it ended.

use std::time::Duration;

use hashbrown::HashMap;
use tokio::time::Instant;

/// Streams that break within this time of each other broke with the same exit.
const SAME_EXIT: Duration = Duration::from_secs(2);

/// What a prompt is known by, whoever sends it: a hash of weights and token ids.
pub(crate) type PromptId = blake3::Hash;

/// A prompt on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OnWorker {
    pub(crate) prompt: PromptId,
    /// It is tried apart from all others that are suspected of ending workers.
    pub(crate) alone: bool,
    /// It has brought tokens enough there to show that it does no harm at once.
    pub(crate) proven: bool,
}

/// Prompts by booking.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    prompts: HashMap<u64, OnWorker>,
    /// When the last exit was noticed first.
    exit: Option<Instant>,
}

impl InFlight {
    pub(super) fn add(&mut self, booking: u64, prompt: OnWorker) {
        self.prompts.insert(booking, prompt);
    }

    pub(super) fn remove(&mut self, booking: u64) {
        self.prompts.remove(&booking);
    }

    pub(super) fn proven(&mut self, booking: u64) {
        if let Some(on) = self.prompts.get_mut(&booking) {
            on.proven = true;
        }
    }

    pub(super) fn any(&self, is_it: impl Fn(&OnWorker) -> bool) -> bool {
        self.prompts.values().any(is_it)
    }

    /// The worker has ended: all that were in flight, for the first that notices it.
    pub(super) fn exit(&mut self, now: Instant) -> Option<Vec<OnWorker>> {
        if self.exit.is_some_and(|since| now.saturating_duration_since(since) < SAME_EXIT) {
            return None;
        }
        self.exit = Some(now);
        Some(self.prompts.values().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_told_once_with_all_that_were_in_flight() {
        let (mut in_flight, start) = (InFlight::default(), Instant::now());
        let on = |name: &str| OnWorker { prompt: blake3::hash(name.as_bytes()), alone: false, proven: false };
        let count = |told: Option<Vec<OnWorker>>| told.map(|prompts| prompts.len());
        in_flight.add(1, on("a"));
        in_flight.add(2, on("b"));
        in_flight.proven(2);
        assert!(in_flight.any(|on| on.proven) && in_flight.any(|on| !on.proven));
        assert_eq!(count(in_flight.exit(start)), Some(2));
        in_flight.remove(1);
        assert_eq!(count(in_flight.exit(start + SAME_EXIT / 2)), None, "others notice it as well");
        let again = start + SAME_EXIT;
        assert_eq!(count(in_flight.exit(again)), Some(1), "the worker came back and ended once more");
    }
}
