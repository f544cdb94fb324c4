//! What happens outside the engine: ends of requests, and what becomes of cache events.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thalweg_cache_index::IndexStats;

use super::add;
use super::engine::store;

/// Counts what happens outside the engine, as it happens.
#[derive(Clone, Default)]
pub struct EventCounters {
    outcomes: Family<OutcomeLabel, Counter>,
    cache_batches: Counter,
}

/// How a request ended, for exactly one count each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every choice ran to its end.
    Finished,
    /// The caller went away or aborted it.
    Aborted,
    /// Refused before anything was computed.
    Rejected,
    /// The engine failed.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

impl From<Outcome> for OutcomeLabel {
    fn from(outcome: Outcome) -> Self {
        let outcome = match outcome {
            Outcome::Finished => "finished",
            Outcome::Aborted => "aborted",
            Outcome::Rejected => "rejected",
            Outcome::Failed => "failed",
        };
        Self { outcome }
    }
}

impl EventCounters {
    pub(super) fn register(&self, registry: &mut Registry) {
        for outcome in [Outcome::Finished, Outcome::Aborted, Outcome::Rejected, Outcome::Failed] {
            drop(self.outcomes.get_or_create(&outcome.into()));
        }
        add(registry, "thalweg_worker_requests", "Requests by how they ended", &self.outcomes);
        add(
            registry,
            "thalweg_worker_cache_batches",
            "Batches handed to the cache index",
            &self.cache_batches,
        );
    }

    /// A request ended.
    pub fn ended(&self, outcome: Outcome) {
        self.outcomes.get_or_create(&outcome.into()).inc();
    }

    /// A batch of cache events went out.
    pub fn published(&self) {
        self.cache_batches.inc();
    }
}

/// How the cache index takes what this worker publishes, copied in when someone looks.
#[derive(Default)]
pub(super) struct IndexFigures {
    publishing: Gauge,
    dropped: Counter,
}

impl IndexFigures {
    pub(super) fn register(&self, registry: &mut Registry) {
        add(
            registry,
            "thalweg_worker_cache_publishing",
            "1 while routers can learn what this worker caches; 0 with prefix caching off or the cache index out of reach",
            &self.publishing,
        );
        add(
            registry,
            "thalweg_worker_cache_batches_dropped",
            "Batches that the cache index did not take in time; a snapshot makes up for them",
            &self.dropped,
        );
    }

    /// `prefix_caching`: whether there is anything to publish at all.
    pub(super) fn set(&self, stats: &IndexStats, prefix_caching: bool) {
        self.publishing.set(i64::from(prefix_caching && !stats.degraded));
        store(&self.dropped, stats.batches_dropped);
    }
}
