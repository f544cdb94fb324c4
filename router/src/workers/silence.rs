//! Workers that serve prompts and tell the cache index of no block.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::health::HealthState;
use super::{Worker, Workers};

/// A block is in the index 50 ms after the step that filled it, and some seconds later where Redis has to be found first.
const SILENT_AFTER: Duration = Duration::from_secs(8);

impl Workers {
    /// While the cache index hears nobody, silence says nothing.
    pub(crate) fn set_index_deaf(&self, is_deaf: bool) {
        self.is_index_deaf.store(is_deaf, Ordering::Relaxed);
    }

    /// It is ready and has served prompts for a while, and the cache index, which can hear, knows of no block of it.
    pub(crate) fn is_index_silent(&self, worker: &Worker, now: Instant) -> bool {
        let since = worker.fills_blocks_since().filter(|_| !self.is_index_deaf.load(Ordering::Relaxed));
        since.is_some_and(|since| now.saturating_duration_since(since) >= SILENT_AFTER)
            && worker.state() == HealthState::Ready
            && self.indexed_blocks(worker) == 0
    }
}

#[cfg(test)]
mod tests {
    use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch, MemoryIndex};
    use thalweg_proto::ids::{WorkerEpoch, WorkerId};

    use super::*;
    use crate::workers::health::HealthEvent;
    use crate::workers::testing;

    /// What the first batch of a worker says, and a later one.
    fn batch(worker: &str, seq: u64, event: BlockEvent) -> EventBatch {
        EventBatch { worker: WorkerId::new(worker), epoch: WorkerEpoch(0), seq, events: vec![event] }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_where_it_can_be_heard() {
        let index = MemoryIndex::new();
        let now = Instant::now();
        let (workers, worker, _) = testing::worker(&index.replica(), now);
        let later = now + SILENT_AFTER;
        let is_silent = |at| {
            workers.set_index_deaf(!index.hears());
            workers.is_index_silent(&worker, at)
        };
        worker.on_health(HealthEvent::Report { draining: false, steps: 1, busy: false }, now);
        worker.observe_hit(15, 0, 0);
        index.publish(batch("another", 1, BlockEvent::Cleared));
        assert!(!is_silent(later), "its prompts fill no block");
        worker.observe_hit(16, 0, 0);
        assert!(!is_silent(later - Duration::from_millis(1)), "it has had little time");
        assert!(is_silent(later));
        workers.set_index_deaf(true);
        assert!(!workers.is_index_silent(&worker, later), "a degraded index hears nobody");
        worker.on_health(HealthEvent::Lost, now);
        assert!(!is_silent(later), "it may have died before it could tell");
        worker.on_health(HealthEvent::Report { draining: false, steps: 1, busy: false }, now);
        assert!(is_silent(later));
        index.publish(batch("w", 1, BlockEvent::Stored(vec![7])));
        assert!(!is_silent(later));
    }

    #[tokio::test(start_paused = true)]
    async fn where_no_index_reaches_nobody_is_named() {
        let index = MemoryIndex::new();
        let now = Instant::now();
        let (workers, worker, _) = testing::worker(&index.replica(), now);
        worker.on_health(HealthEvent::Report { draining: false, steps: 1, busy: false }, now);
        worker.observe_hit(16, 0, 0);
        workers.set_index_deaf(!index.hears());
        assert!(!workers.is_index_silent(&worker, now + SILENT_AFTER));
    }
}
