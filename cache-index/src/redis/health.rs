//! How the index fares: counters, and one log line when it becomes degraded and one when that ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hashbrown::HashSet;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::RedisIndexError;
use crate::IndexStats;

/// Connections over which a router reads. Several, so that one's network time is another's computing time.
pub(super) const READERS: usize = 4;

/// Shared by all parts of one index.
#[derive(Default)]
pub(super) struct Health {
    down: Mutex<Down>,
    pub(super) bootstrapped: AtomicBool,
    pub(super) batches_published: Counter,
    pub(super) batches_dropped: Counter,
    pub(super) snapshots_written: Counter,
    pub(super) snapshots_read: Counter,
    pub(super) gaps: Counter,
    pub(super) reconnects: Counter,
    pub(super) events_applied: Counter,
    pub(super) undecodable: Counter,
    /// Of each reader.
    pub(super) lag_ms: [AtomicU64; READERS],
}

/// A number that only grows.
#[derive(Default)]
pub(super) struct Counter(AtomicU64);

/// Parts of the index without a working connection.
#[derive(Default)]
struct Down {
    parts: HashSet<String>,
    since: Option<Instant>,
}

impl Counter {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Health {
    /// A part of the index cannot work because of `error`.
    pub(super) fn fails(&self, part: &str, error: &RedisIndexError, now: Instant) {
        tracing::debug!(part, %error, "cache index connection failed");
        let mut down = self.down.lock();
        if !down.parts.insert(part.to_owned()) {
            return;
        }
        if down.since.is_none() {
            down.since = Some(now);
            tracing::warn!(part, %error, "cache index degraded: requests flow on what was known of prefixes");
        }
    }

    /// A part works, perhaps again.
    pub(super) fn works(&self, part: &str, now: Instant) {
        let mut down = self.down.lock();
        down.parts.remove(part);
        if let Some(since) = down.since.filter(|_| down.parts.is_empty()) {
            down.since = None;
            let seconds = now.duration_since(since).as_secs_f64();
            tracing::info!(seconds, "cache index recovered");
        }
    }

    /// What is counted, but for what the replica knows.
    pub(super) fn stats(&self) -> IndexStats {
        IndexStats {
            degraded: self.down.lock().since.is_some(),
            bootstrapped: self.bootstrapped.load(Ordering::Relaxed),
            workers_behind: 0,
            batches_published: self.batches_published.get(),
            batches_dropped: self.batches_dropped.get(),
            snapshots_written: self.snapshots_written.get(),
            snapshots_read: self.snapshots_read.get(),
            gaps: self.gaps.get(),
            reconnects: self.reconnects.get(),
            events_applied: self.events_applied.get(),
            undecodable: self.undecodable.get(),
            lag_ms: self.lag_ms.iter().map(|lag| lag.load(Ordering::Relaxed)).max().unwrap_or(0),
        }
    }
}
