//! Answers of the Responses API that later requests continue or read again: in the cluster's Redis, or in this process.
//!
//! A response is kept under its id and its tenant's name: what another tenant asks for is not there.

mod memory;
mod metrics;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use thalweg_cache_index::redis::values::RedisValues;
use thalweg_cache_index::{RedisConfig, RedisIndexError};
use thalweg_proto::code::ErrorCode;
use tokio::time::Instant;

use crate::config::responses::{ResponseStore, Responses};
use crate::error::RouterError;

use memory::Memory;
use metrics::{NotKept, StoreMetrics};

pub(crate) use metrics::StoreMetrics as Metrics;

/// Where responses are kept.
pub(crate) struct Store {
    place: Place,
    life: Duration,
    /// Of one response.
    bytes_max: usize,
    metrics: StoreMetrics,
    /// It was out of reach the last time; one line is logged for many.
    failing: AtomicBool,
}

enum Place {
    Nowhere,
    Memory(Memory),
    Redis(Box<RedisValues>),
}

/// Whether a response will be found again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// At every router.
    Cluster,
    /// At this one alone.
    Process,
    Nowhere,
}

impl Store {
    /// As configured; `index` is the cache index's Redis, if it has one.
    pub(crate) fn new(config: &Responses, index: Option<&RedisConfig>, metrics: StoreMetrics) -> Self {
        let memory = || Place::Memory(Memory::new(config.response_memory_bytes_max));
        let place = match (config.response_store, index) {
            (ResponseStore::None, _) => Place::Nowhere,
            (ResponseStore::Auto, Some(redis)) => Place::Redis(Box::new(RedisValues::new(redis.clone()))),
            (ResponseStore::Auto, None) | (ResponseStore::Memory, _) => memory(),
        };
        let (life, bytes_max) = (config.response_ttl, config.response_bytes_max);
        Self { place, life, bytes_max, metrics, failing: AtomicBool::new(false) }
    }

    pub(crate) fn reach(&self) -> Reach {
        match &self.place {
            Place::Nowhere => Reach::Nowhere,
            Place::Memory(_) => Reach::Process,
            Place::Redis(_) => Reach::Cluster,
        }
    }

    /// Keeps a response if it can; false, with a line in the log and a count, if it cannot. The answer is never lost.
    pub(crate) async fn keep(&self, tenant: &str, id: &str, value: Vec<u8>) -> bool {
        if value.len() > self.bytes_max {
            let (bytes, bytes_max) = (value.len(), self.bytes_max);
            tracing::info!(response = id, bytes, bytes_max, "a response is too large to be kept");
            self.metrics.not_kept(NotKept::TooLarge);
            return false;
        }
        let name = name(tenant, id);
        let kept = match &self.place {
            Place::Nowhere => return false,
            Place::Memory(memory) => Ok(memory.set(name, value.into(), Instant::now() + self.life)),
            Place::Redis(redis) => redis.set(&name, &value, self.life).await.map(|()| true),
        };
        match kept {
            Ok(true) => {
                self.failing.store(false, Ordering::Relaxed);
                self.metrics.kept();
                true
            }
            Ok(false) => {
                self.metrics.not_kept(NotKept::TooLarge);
                false
            }
            Err(error) => {
                self.tell(&error);
                self.metrics.not_kept(NotKept::StoreFailed);
                false
            }
        }
    }

    /// A response of this tenant. Errors: 404 if there is none, 503 if the store cannot be asked.
    pub(crate) async fn find(&self, tenant: &str, id: &str) -> Result<Bytes, RouterError> {
        let name = name(tenant, id);
        let found = match &self.place {
            Place::Nowhere => None,
            Place::Memory(memory) => memory.get(&name, Instant::now()),
            Place::Redis(redis) => {
                let found = redis.get(&name, self.bytes_max).await;
                found.map_err(|error| self.unavailable(&error))?.map(Bytes::from)
            }
        };
        found.ok_or_else(|| self.no_such(id))
    }

    /// Forgets a response of this tenant; errors as `find`.
    pub(crate) async fn forget(&self, tenant: &str, id: &str) -> Result<(), RouterError> {
        let name = name(tenant, id);
        let was_there = match &self.place {
            Place::Nowhere => false,
            Place::Memory(memory) => memory.remove(&name, Instant::now()),
            Place::Redis(redis) => redis.delete(&name).await.map_err(|error| self.unavailable(&error))?,
        };
        if was_there { Ok(()) } else { Err(self.no_such(id)) }
    }

    /// Once for many failures: until something could be kept again.
    fn tell(&self, error: &RedisIndexError) {
        if self.failing.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, "kept responses cannot be reached");
        } else {
            tracing::warn!(%error, "responses are neither kept nor found for now; new answers are not affected");
        }
    }

    fn unavailable(&self, error: &RedisIndexError) -> RouterError {
        /// As long as nothing is tried after a failure.
        const RETRY_AFTER: Duration = Duration::from_secs(1);
        self.tell(error);
        let message =
            "kept responses cannot be reached now; try again, or send the whole conversation in `input`";
        RouterError::new(ErrorCode::Unavailable, message).retry_after(RETRY_AFTER)
    }

    fn no_such(&self, id: &str) -> RouterError {
        let id = crate::error::echo(id);
        let message = match self.reach() {
            Reach::Nowhere => format!(
                "there is no response `{id}`: this router keeps none; send the whole conversation in `input`, or start \
                 it with another --response-store"
            ),
            _ => format!(
                "there is no response `{id}`; it was made with \"store\": false, was deleted, or is older than {} s",
                self.life.as_secs()
            ),
        };
        RouterError::new(ErrorCode::ResponseNotFound, message)
    }
}

/// The same for no two tenants; neither's name can be told from it.
fn name(tenant: &str, id: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [tenant, id] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    format!("response:{}", hasher.finalize().to_hex())
}
