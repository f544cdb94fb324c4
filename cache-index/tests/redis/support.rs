//! Workers and routers of the tests.

use std::collections::BTreeSet;
use std::time::Duration;

use thalweg_cache_index::redis::Limits;
use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch, RedisConfig, RedisIndex};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

/// Within this everything recovers once Redis is back.
pub(crate) const RECOVERY: Duration = Duration::from_secs(5);
/// What is waited for on a busy machine when no time is promised.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The long form of a test, where `THALWEG_TEST_LONG` asks for it.
pub(crate) fn long<T>(short: T, long: T) -> T {
    if std::env::var_os("THALWEG_TEST_LONG").is_some() { long } else { short }
}

/// An index of these settings, all else as usual.
pub(crate) fn open(url: &str) -> RedisIndex {
    open_with(url, Limits::default())
}

pub(crate) fn open_with(url: &str, limits: Limits) -> RedisIndex {
    RedisIndex::open(RedisConfig { limits, ..RedisConfig::new(url.parse().unwrap()) }).unwrap()
}

/// A worker and what it truly holds.
pub(crate) struct TestWorker<'a> {
    pub(crate) id: WorkerId,
    pub(crate) epoch: WorkerEpoch,
    index: &'a RedisIndex,
    seq: u64,
    pub(crate) held: BTreeSet<u64>,
}

impl<'a> TestWorker<'a> {
    pub(crate) fn new(index: &'a RedisIndex, name: &str, epoch: u64) -> Self {
        let (id, epoch) = (WorkerId::new(name), WorkerEpoch(epoch));
        let mut worker = Self { id, epoch, index, seq: 0, held: BTreeSet::new() };
        worker.publish(vec![BlockEvent::Cleared]);
        worker
    }

    pub(crate) fn store(&mut self, keys: impl IntoIterator<Item = u64>) {
        self.publish(vec![BlockEvent::Stored(keys.into_iter().collect())]);
    }

    pub(crate) fn remove(&mut self, keys: impl IntoIterator<Item = u64>) {
        self.publish(vec![BlockEvent::Removed(keys.into_iter().collect())]);
    }

    pub(crate) fn publish(&mut self, events: Vec<BlockEvent>) {
        for event in &events {
            match event {
                BlockEvent::Stored(keys) => self.held.extend(keys),
                BlockEvent::Removed(keys) => self.held.retain(|key| !keys.contains(key)),
                BlockEvent::Cleared => self.held.clear(),
            }
        }
        self.seq += 1;
        let batch = EventBatch { worker: self.id.clone(), epoch: self.epoch, seq: self.seq, events };
        self.index.publish(batch);
    }

    /// Whether a router's replica holds for this worker exactly what it holds.
    pub(crate) fn is_known_to(&self, router: &RedisIndex) -> bool {
        let replica = router.replica();
        let Some(holder) = replica.enroll(&self.id, self.epoch) else { return false };
        let now = Instant::now();
        let held = |key: &u64| replica.lookup(&[*key], now).blocks(holder) == 1;
        replica.blocks_of(holder) == self.held.len() as u64 && self.held.iter().all(held)
    }

    /// Leading blocks of a chain that a router counts on.
    pub(crate) fn matched_by(&self, router: &RedisIndex, keys: &[u64]) -> u32 {
        let replica = router.replica();
        let holder = replica.enroll(&self.id, self.epoch).unwrap();
        replica.lookup(keys, Instant::now()).blocks(holder)
    }
}

/// Waits until it is so; says how long that took.
pub(crate) async fn eventually(what: &str, within: Duration, mut holds: impl FnMut() -> bool) -> Duration {
    let begin = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    while !holds() {
        assert!(begin.elapsed() < within, "{what} did not come about within {within:?}");
        ticks.tick().await;
    }
    begin.elapsed()
}

/// Asserts that it stays so for a while.
pub(crate) async fn meanwhile(what: &str, time: Duration, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    while begin.elapsed() < time {
        assert!(holds(), "{what} ended after {:?}", begin.elapsed());
        ticks.tick().await;
    }
}
