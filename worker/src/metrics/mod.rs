//! What a worker exports on /metrics: the names that vLLM's users have on dashboards and autoscalers, and our own.

mod engine;
mod events;
#[cfg(test)]
mod tests;

use std::borrow::Cow;

use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};
use thalweg_cache_index::IndexStats;

use crate::engine::{LoadSnapshot, Observations};
use engine::{Gauges, Latencies, Mirrored, store};
use events::IndexFigures;
pub use events::{EventCounters, Outcome};

/// Content type of [`WorkerMetrics::render`].
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

/// All series of one worker. They exist, at zero, from the start: a scaler takes an absent series for idle.
pub struct WorkerMetrics {
    registry: Registry,
    gauges: Gauges,
    mirrored: Mirrored,
    latencies: Latencies,
    events: EventCounters,
    index: IndexFigures,
    accept_errors: Counter,
    full_listeners: Gauge,
    prefix_caching: bool,
}

impl WorkerMetrics {
    /// Registers every series under labels `model_name` and `model`.
    pub fn new(model_name: &str, cache: &CacheConfig) -> Self {
        let (gauges, mirrored, latencies) = (Gauges::default(), Mirrored::default(), Latencies::new());
        let (events, index) = (EventCounters::default(), IndexFigures::default());
        let (accept_errors, full_listeners) = (Counter::default(), Gauge::default());
        let mut registry = Registry::default();
        let labelled = registry.sub_registry_with_labels(
            ["model_name", "model"].into_iter().map(|name| (name.into(), model_name.to_owned().into())),
        );
        gauges.register(labelled);
        mirrored.register(labelled);
        latencies.register(labelled);
        events.register(labelled);
        index.register(labelled);
        cache.register(labelled);
        add(
            labelled,
            "thalweg_worker_accept_errors",
            "Times that a connection could not be accepted, mostly for want of file descriptors",
            &accept_errors,
        );
        add(
            labelled,
            "thalweg_worker_full_listeners",
            "Listeners that accept nobody now, because this process has as many connections as it may",
            &full_listeners,
        );
        registry.sub_registry_with_label(("version".into(), env!("CARGO_PKG_VERSION").into())).register(
            "thalweg_build",
            "Version of this build; always 1",
            constant_one(),
        );
        let prefix_caching = cache.prefix_caching;
        Self {
            registry,
            gauges,
            mirrored,
            latencies,
            events,
            index,
            accept_errors,
            full_listeners,
            prefix_caching,
        }
    }

    /// Handles for what is counted outside the engine.
    pub fn events(&self) -> &EventCounters {
        &self.events
    }

    /// Adds the engine's samples to the histograms.
    pub fn observe(&self, samples: Observations) {
        self.latencies.observe(samples);
    }

    /// Text exposition, with the figures of the engine and of the cache index as they are now.
    pub fn render(&self, load: &LoadSnapshot, index: &IndexStats) -> String {
        self.gauges.set(load);
        self.mirrored.set(load);
        self.index.set(index, self.prefix_caching);
        store(&self.accept_errors, thalweg_serve::accept_errors());
        self.full_listeners.set(thalweg_serve::full_listeners() as i64);
        let mut text = String::with_capacity(16 << 10);
        if let Err(error) = prometheus_text::encode(&mut text, &self.registry) {
            tracing::error!(%error, "metrics cannot be written");
        }
        text
    }
}

/// Labels of `vllm:cache_config_info`.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// Tokens per block.
    pub block_size: usize,
    /// Blocks of the full group.
    pub blocks: u64,
    /// Element type of keys and values.
    pub dtype: String,
    /// Whether prefixes are kept.
    pub prefix_caching: bool,
}

impl CacheConfig {
    fn register(&self, registry: &mut Registry) {
        let labels: [(&'static str, String); 5] = [
            ("block_size", self.block_size.to_string()),
            ("num_gpu_blocks", self.blocks.to_string()),
            ("num_cpu_blocks", "0".to_owned()),
            ("cache_dtype", self.dtype.clone()),
            ("enable_prefix_caching", self.prefix_caching.to_string()),
        ];
        registry
            .sub_registry_with_labels(
                labels.into_iter().map(|(name, value)| (name.into(), Cow::Owned(value))),
            )
            .register("vllm:cache_config_info", "Shape of the KV cache; always 1", constant_one());
    }
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &'static str, help: &'static str, metric: &M) {
    registry.register(name, help, metric.clone());
}

fn constant_one() -> Gauge {
    let gauge = Gauge::default();
    gauge.set(1);
    gauge
}
