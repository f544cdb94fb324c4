//! The index of a cluster, in plain Redis (6 or later) or Valkey.
//!
//! Per worker Redis holds one snapshot: all keys that the worker holds, and up to which batch. Batches go to the stream
//! of the worker's shard. A router reads the snapshots once and then follows the streams; whatever is missing in
//! a stream, for whatever reason, shows as a gap in the numbers of a worker's batches and is made up for by that
//! worker's next snapshot.
//!
//! Nothing here makes a request wait: `publish` only takes notes, lookups go to the replica, and all that talks to Redis
//! runs on a thread of its own.
//!
//! | key | type | content |
//! |---|---|---|
//! | `{tw1:S}` | stream | batches of the workers of shard S |
//! | `{tw1:S}:workers` | sorted set | names of the workers of shard S by the time of their last snapshot |
//! | `{tw1:S}:snapshot:W` | string | snapshot of worker W |

mod error;
mod health;
pub mod inspect;
mod keys;
mod keyset;
mod link;
mod publisher;
mod reader;
mod recovery;
mod retry;
mod url;
pub mod values;
mod wire;

use std::sync::Arc;
use std::sync::OnceLock;
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::ids::WorkerId;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

pub use error::RedisIndexError;
pub use link::RedisConfig;
pub use url::RedisUrl;

use crate::{CacheIndex, EventBatch, IndexStats, Replica};
use health::Health;
use publisher::Publisher;

/// Sizes and times that bound what the index takes. The defaults are for production; tests shrink them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes of batches that wait for Redis, per worker. When they are more, all of them are given up and a snapshot
    /// makes up for them. 4 MiB are half a million events, minutes of a busy worker.
    pub pending_bytes: usize,
    /// Time between snapshots of a worker, a tenth more or less.
    pub snapshot_interval: Duration,
    /// Block events after which a snapshot is written earlier, so that a reader replays no more than these.
    pub snapshot_events: u64,
    /// Entries that a shard's stream keeps, about and at most; 8,192 are 200 s of two busy workers.
    pub stream_entries: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            pending_bytes: 4 << 20,
            snapshot_interval: Duration::from_secs(60),
            snapshot_events: 50_000,
            stream_entries: 8_192,
        }
    }
}

/// The index over Redis. A worker's part starts with its first batch, a router's with the first call of `replica`. Both
/// end when neither the index nor its replica is in use any more; what was not sent by then is lost, which a later life
/// of the worker makes good.
pub struct RedisIndex {
    config: Arc<RedisConfig>,
    health: Arc<Health>,
    publishers: Mutex<HashMap<WorkerId, Arc<Publisher>>>,
    replica: OnceLock<Arc<Replica>>,
    /// Of the thread that talks to Redis: one core at most, and never one of those that serve requests.
    runtime: Handle,
    stop: Arc<DropGuard>,
}

impl RedisIndex {
    /// Starts the thread of the index. Redis need not be there: until it is, the index is degraded.
    pub fn open(config: RedisConfig) -> Result<Self, RedisIndexError> {
        // Fails where another part of the process has chosen a provider already, which serves as well.
        drop(rustls::crypto::ring::default_provider().install_default());
        let runtime = Builder::new_current_thread().enable_all().build().map_err(RedisIndexError::Thread)?;
        let (handle, stop) = (runtime.handle().clone(), CancellationToken::new());
        let stopped = stop.clone();
        std::thread::Builder::new()
            .name("cache-index".to_owned())
            .spawn(move || runtime.block_on(stopped.cancelled()))
            .map_err(RedisIndexError::Thread)?;
        Ok(Self {
            config: Arc::new(config),
            health: Arc::new(Health::default()),
            publishers: Mutex::default(),
            replica: OnceLock::new(),
            runtime: handle,
            stop: Arc::new(stop.drop_guard()),
        })
    }

    fn publisher(&self, worker: &WorkerId) -> Arc<Publisher> {
        let mut publishers = self.publishers.lock();
        if let Some(publisher) = publishers.get(worker) {
            return Arc::clone(publisher);
        }
        let publisher =
            Arc::new(Publisher::new(worker.clone(), self.config.limits, Arc::clone(&self.health)));
        publishers.insert(worker.clone(), Arc::clone(&publisher));
        let (running, config) = (Arc::clone(&publisher), Arc::clone(&self.config));
        self.runtime.spawn(async move { running.run(&config).await });
        publisher
    }
}

impl CacheIndex for RedisIndex {
    /// Takes notes only. A worker published here stays for the life of the index.
    fn publish(&self, batch: EventBatch) {
        self.publisher(&batch.worker).publish(batch);
    }

    /// The replica; the first call begins to read.
    fn replica(&self) -> Arc<Replica> {
        let start = || {
            let replica = Arc::new(Replica::default());
            replica.fed_by(Arc::clone(&self.stop) as _);
            reader::start(&self.runtime, &self.config, &replica, &self.health);
            replica
        };
        Arc::clone(self.replica.get_or_init(start))
    }

    fn stats(&self) -> IndexStats {
        let workers_behind = self.replica.get().map_or(0, |replica| replica.behind().len());
        IndexStats { workers_behind, ..self.health.stats() }
    }
}
