//! Which worker holds which prefix block: a hint, never truth.
//!
//! Workers publish what their block pools store and drop; routers look chains of block hashes up in a replica that lives
//! in their own process. A wrong entry costs time, never a wrong answer: a worker confirms every hit by its tokens.
#![forbid(unsafe_code)]

pub mod confidence;
pub mod event;
pub mod memory;
pub mod redis;
pub mod replica;
pub mod stats;

use std::sync::Arc;

pub use confidence::Confidence;
pub use event::{BlockEvent, EventBatch};
pub use memory::MemoryIndex;
pub use redis::{RedisConfig, RedisIndex, RedisIndexError};
pub use replica::{
    Applied, Expectation, Holder, Install, Matches, NotInstalled, Position, Replica, ReplicaStats,
};
pub use stats::IndexStats;

/// Way of events from workers to the replicas of routers.
pub trait CacheIndex: Send + Sync {
    /// Hands over one worker's batch. Never blocks on the network; batches of one worker come in order of `seq`.
    fn publish(&self, batch: EventBatch);

    /// The replica of this process. An index that has to fetch it begins with the first call, so that a process which
    /// only publishes pays for no replica.
    fn replica(&self) -> Arc<Replica>;

    /// Whether batches can come in: while they cannot, nothing follows from a worker's silence.
    fn hears(&self) -> bool {
        !self.stats().degraded
    }

    /// What it counts. An index within the process has nothing that could fail.
    fn stats(&self) -> IndexStats {
        IndexStats { bootstrapped: true, ..IndexStats::default() }
    }
}
