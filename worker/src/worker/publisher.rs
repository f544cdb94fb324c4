//! From the block pool to the cache index: the engine notes changes, a task hands them over in batches.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio_util::sync::CancellationToken;

use crate::kv::KvEventSink;
use crate::runner::sim::{CacheEventFault, FaultSwitch};

/// Time between batches.
pub(super) const BATCH_INTERVAL: Duration = Duration::from_millis(50);

/// Changes since the last batch, as what they come to: what was stored and removed in between is not told. Hence it holds
/// at most one entry per block that is held now or was at the last batch, and cannot overflow.
#[derive(Clone, Default)]
pub(super) struct PendingEvents {
    net: Arc<Mutex<Net>>,
}

#[derive(Default)]
struct Net {
    cleared: bool,
    changes: HashMap<u64, Change>,
}

#[derive(Clone, Copy, PartialEq)]
enum Change {
    Stored,
    Removed,
}

impl KvEventSink for PendingEvents {
    fn record(&mut self, event: BlockEvent) {
        let mut net = self.net.lock();
        match event {
            BlockEvent::Stored(keys) => keys.into_iter().for_each(|key| net.note(key, Change::Stored)),
            BlockEvent::Removed(keys) => keys.into_iter().for_each(|key| net.note(key, Change::Removed)),
            BlockEvent::Cleared => *net = Net { cleared: true, changes: HashMap::new() },
        }
    }
}

impl Net {
    fn note(&mut self, key: u64, change: Change) {
        match self.changes.get(&key) {
            Some(before) if *before != change => drop(self.changes.remove(&key)),
            _ => drop(self.changes.insert(key, change)),
        }
    }
}

impl PendingEvents {
    fn take(&self) -> Vec<BlockEvent> {
        let net = std::mem::take(&mut *self.net.lock());
        let keys_of = |wanted| {
            let mut keys: Vec<u64> =
                net.changes.iter().filter(|(_, change)| **change == wanted).map(|(key, _)| *key).collect();
            keys.sort_unstable();
            keys
        };
        let (removed, stored) = (keys_of(Change::Removed), keys_of(Change::Stored));
        net.cleared
            .then_some(BlockEvent::Cleared)
            .into_iter()
            .chain((!removed.is_empty() && !net.cleared).then_some(BlockEvent::Removed(removed)))
            .chain((!stored.is_empty()).then_some(BlockEvent::Stored(stored)))
            .collect()
    }
}

/// Numbers the batches of one life of a worker.
pub(super) struct Publisher {
    pub(super) worker: WorkerId,
    pub(super) epoch: WorkerEpoch,
    pub(super) index: Arc<dyn CacheIndex>,
    pub(super) pending: PendingEvents,
    /// What a simulated worker does wrong.
    pub(super) faults: Option<FaultSwitch>,
}

impl Publisher {
    /// Announces the epoch, publishes until `stop`, and says at the end that nothing is held any more. `after_batch` is
    /// told after each batch that went out.
    pub(super) async fn run(self, stop: CancellationToken, after_batch: impl Fn() + Send) {
        let mut seq = 0;
        let mut way = Way { index: self.index, faults: self.faults, held_back: None };
        let mut publish = |events: Vec<BlockEvent>| {
            seq += 1;
            way.send(EventBatch { worker: self.worker.clone(), epoch: self.epoch, seq, events });
            after_batch();
        };
        publish(vec![BlockEvent::Cleared]);
        let mut ticks = tokio::time::interval(BATCH_INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            let events = self.pending.take();
            if !events.is_empty() {
                publish(events);
            }
        }
        publish(vec![BlockEvent::Cleared]);
    }
}

/// To the index, unless a simulated worker is told to let batches go astray on the way.
struct Way {
    index: Arc<dyn CacheIndex>,
    faults: Option<FaultSwitch>,
    held_back: Option<EventBatch>,
}

/// Every batch whose number this divides goes astray.
const ASTRAY: u64 = 3;

impl Way {
    fn send(&mut self, batch: EventBatch) {
        let fault = self.faults.as_ref().and_then(|faults| faults.now().cache_events);
        match fault.filter(|_| batch.seq.is_multiple_of(ASTRAY)) {
            None => self.index.publish(batch),
            Some(CacheEventFault::Lost) => return,
            Some(CacheEventFault::Duplicated) => {
                self.index.publish(batch.clone());
                self.index.publish(batch);
            }
            Some(CacheEventFault::Reordered) => {
                self.held_back = Some(batch);
                return;
            }
        }
        self.held_back.take().into_iter().for_each(|late| self.index.publish(late));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use BlockEvent::{Cleared, Removed, Stored};

    fn check(batches: &[&[BlockEvent]], expected: &[BlockEvent]) {
        let mut pending = PendingEvents::default();
        let (last, before) = batches.split_last().unwrap();
        for batch in before {
            batch.iter().cloned().for_each(|event| pending.record(event));
            pending.take();
        }
        last.iter().cloned().for_each(|event| pending.record(event));
        assert_eq!(pending.take(), expected, "{batches:?}");
        assert_eq!(pending.take(), [], "taken twice");
    }

    #[test]
    fn a_batch_tells_what_changes_come_to() {
        check(&[&[]], &[]);
        check(&[&[Stored(vec![2, 1])]], &[Stored(vec![1, 2])]);
        check(&[&[Stored(vec![1, 2]), Removed(vec![2])]], &[Stored(vec![1])]);
        check(&[&[Stored(vec![1])], &[Removed(vec![1]), Stored(vec![1])]], &[]);
        check(
            &[&[Stored(vec![1])], &[Removed(vec![1]), Stored(vec![3])]],
            &[Removed(vec![1]), Stored(vec![3])],
        );
        check(
            &[&[Stored(vec![1])], &[Removed(vec![1]), Stored(vec![1]), Removed(vec![1])]],
            &[Removed(vec![1])],
        );
        check(&[&[Stored(vec![1]), Cleared]], &[Cleared]);
        check(&[&[Removed(vec![1]), Cleared, Stored(vec![5])]], &[Cleared, Stored(vec![5])]);
    }

    #[derive(Default)]
    struct Recorder {
        batches: Mutex<Vec<EventBatch>>,
        replica: Arc<thalweg_cache_index::Replica>,
    }

    impl CacheIndex for Recorder {
        fn publish(&self, batch: EventBatch) {
            self.batches.lock().push(batch);
        }

        fn replica(&self) -> Arc<thalweg_cache_index::Replica> {
            Arc::clone(&self.replica)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn batches_are_numbered_and_begin_and_end_empty() {
        let (index, mut pending) = (Arc::new(Recorder::default()), PendingEvents::default());
        let publisher = Publisher {
            worker: WorkerId::new("w"),
            epoch: WorkerEpoch(5),
            index: index.clone(),
            pending: pending.clone(),
            faults: None,
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(publisher.run(stop.clone(), || {}));
        tokio::time::sleep(BATCH_INTERVAL / 2).await;
        pending.record(Stored(vec![1]));
        tokio::time::sleep(BATCH_INTERVAL * 4).await;
        stop.cancel();
        task.await.unwrap();
        let batches = index.batches.lock();
        let told: Vec<_> = batches.iter().map(|b| (b.epoch.0, b.seq, b.events.clone())).collect();
        assert_eq!(told, [(5, 1, vec![Cleared]), (5, 2, vec![Stored(vec![1])]), (5, 3, vec![Cleared])]);
    }
}
