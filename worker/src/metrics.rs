//! What a worker exports on /metrics: the names that vLLM's users have on dashboards and autoscalers, and our own.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::engine::{LoadSnapshot, Observations};

/// Content type of [`WorkerMetrics::render`].
pub const CONTENT_TYPE: &str = prometheus_text::CONTENT_TYPE;

type Ratio = Gauge<f64, AtomicU64>;

/// All series of one worker. They exist, at zero, from the start: a scaler takes an absent series for idle.
pub struct WorkerMetrics {
    registry: Registry,
    gauges: Gauges,
    mirrored: Mirrored,
    latencies: Latencies,
    events: EventCounters,
}

#[derive(Default)]
struct Gauges {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Ratio,
    kv_total: Gauge,
    kv_available: Gauge,
    draining: Gauge,
}

/// Counters that the engine keeps; copied in when someone looks.
#[derive(Default)]
struct Mirrored {
    steps: Counter,
    preemptions: Counter,
    violations: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    choices: Family<ReasonLabel, Counter>,
}

/// Samples that the engine has taken since the last look.
struct Latencies {
    time_to_first_token: Histogram,
    time_per_output_token: Histogram,
    queue_time: Histogram,
    e2e_latency: Histogram,
}

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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    finished_reason: &'static str,
}

impl WorkerMetrics {
    /// Registers every series under labels `model_name` and `model`.
    pub fn new(model_name: &str, cache: &CacheConfig) -> Self {
        let (gauges, mirrored, latencies) = (Gauges::default(), Mirrored::default(), Latencies::new());
        let events = EventCounters::default();
        let mut registry = Registry::default();
        let labelled = registry.sub_registry_with_labels(
            ["model_name", "model"].into_iter().map(|name| (name.into(), model_name.to_owned().into())),
        );
        gauges.register(labelled);
        mirrored.register(labelled);
        latencies.register(labelled);
        events.register(labelled);
        cache.register(labelled);
        registry.sub_registry_with_label(("version".into(), env!("CARGO_PKG_VERSION").into())).register(
            "thalweg_build",
            "Version of this build; always 1",
            constant_one(),
        );
        Self { registry, gauges, mirrored, latencies, events }
    }

    /// Handles for what is counted outside the engine.
    pub fn events(&self) -> &EventCounters {
        &self.events
    }

    /// Adds the engine's samples to the histograms.
    pub fn observe(&self, samples: Observations) {
        self.latencies.observe(samples);
    }

    /// Text exposition, with the engine's figures as they are now.
    pub fn render(&self, load: &LoadSnapshot) -> String {
        self.gauges.set(load);
        self.mirrored.set(load);
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

impl Gauges {
    fn register(&self, registry: &mut Registry) {
        add(registry, "vllm:num_requests_running", "Sequences in the running batch", &self.running);
        add(
            registry,
            "vllm:num_requests_waiting",
            "Sequences waiting for a place in the batch",
            &self.waiting,
        );
        add(registry, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 being all", &self.kv_usage);
        add(registry, "thalweg_worker_kv_blocks", "KV blocks of the full group", &self.kv_total);
        add(registry, "thalweg_worker_kv_blocks_available", "KV blocks free or cached", &self.kv_available);
        add(registry, "thalweg_worker_draining", "1 while new work is refused", &self.draining);
    }

    fn set(&self, load: &LoadSnapshot) {
        let available = load.kv.free + load.kv.cached;
        let in_use = load.kv.total.saturating_sub(available);
        self.running.set(i64::from(load.running));
        self.waiting.set(i64::from(load.waiting));
        self.kv_usage.set(in_use as f64 / load.kv.total.max(1) as f64);
        self.kv_total.set(load.kv.total as i64);
        self.kv_available.set(available as i64);
        self.draining.set(i64::from(load.draining));
    }
}

impl Mirrored {
    fn register(&self, registry: &mut Registry) {
        add(registry, "vllm:num_preemptions", "Sequences put back for want of KV blocks", &self.preemptions);
        add(
            registry,
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the cache",
            &self.prefix_queries,
        );
        add(registry, "vllm:prefix_cache_hits", "Prompt tokens found in the cache", &self.prefix_hits);
        add(registry, "vllm:prompt_tokens", "Prompt tokens, cached ones included", &self.prompt_tokens);
        add(registry, "vllm:generation_tokens", "Tokens put out", &self.generation_tokens);
        add(registry, "vllm:request_success", "Choices by why they ended", &self.choices);
        add(registry, "thalweg_worker_steps", "Engine steps completed", &self.steps);
        add(registry, "thalweg_worker_invariant_violations", "Invariants found broken", &self.violations);
    }

    fn set(&self, load: &LoadSnapshot) {
        let counters = &load.counters;
        store(&self.steps, load.steps);
        store(&self.preemptions, counters.preemptions);
        store(&self.violations, counters.invariant_violations);
        store(&self.prefix_queries, counters.prefix_queries);
        store(&self.prefix_hits, counters.prefix_hits);
        store(&self.prompt_tokens, counters.prompt_tokens);
        store(&self.generation_tokens, counters.generation_tokens);
        for (finished_reason, count) in [
            ("stop", counters.finished_stop),
            ("length", counters.finished_length),
            ("abort", counters.finished_abort),
        ] {
            store(&self.choices.get_or_create(&ReasonLabel { finished_reason }), count);
        }
    }
}

impl Latencies {
    fn new() -> Self {
        Self {
            time_to_first_token: Histogram::new(FIRST_TOKEN_SECONDS),
            time_per_output_token: Histogram::new(PER_TOKEN_SECONDS),
            queue_time: Histogram::new(LATENCY_SECONDS),
            e2e_latency: Histogram::new(LATENCY_SECONDS),
        }
    }

    fn register(&self, registry: &mut Registry) {
        let per_token = "vllm:request_time_per_output_token_seconds";
        add(
            registry,
            "vllm:time_to_first_token_seconds",
            "Arrival to first token",
            &self.time_to_first_token,
        );
        add(
            registry,
            per_token,
            "Mean time per token behind the first, by choice",
            &self.time_per_output_token,
        );
        add(registry, "vllm:request_queue_time_seconds", "Arrival to first step", &self.queue_time);
        add(registry, "vllm:e2e_request_latency_seconds", "Arrival to end", &self.e2e_latency);
    }

    fn observe(&self, samples: Observations) {
        for (histogram, seconds) in [
            (&self.time_to_first_token, samples.time_to_first_token),
            (&self.time_per_output_token, samples.time_per_output_token),
            (&self.queue_time, samples.queue),
            (&self.e2e_latency, samples.end_to_end),
        ] {
            seconds.into_iter().for_each(|s| histogram.observe(s));
        }
    }
}

impl EventCounters {
    fn register(&self, registry: &mut Registry) {
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

fn store(counter: &Counter, value: u64) {
    counter.inner().store(value, Ordering::Relaxed);
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &'static str, help: &'static str, metric: &M) {
    registry.register(name, help, metric.clone());
}

fn constant_one() -> Gauge {
    let gauge = Gauge::default();
    gauge.set(1);
    gauge
}

const FIRST_TOKEN_SECONDS: [f64; 21] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];
const PER_TOKEN_SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0];
const LATENCY_SECONDS: [f64; 20] = [
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0,
    480.0, 960.0,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Counters, KvUsage};

    const NAMES: [&str; 12] = [
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:request_time_per_output_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    ];

    fn metrics() -> WorkerMetrics {
        let cache =
            CacheConfig { block_size: 16, blocks: 10, dtype: "bfloat16".to_owned(), prefix_caching: true };
        WorkerMetrics::new("tiny \"quoted\"", &cache)
    }

    /// Value of the one sample whose line starts with `name` and holds `label`.
    fn value(text: &str, name: &str, label: &str) -> f64 {
        let mut lines = text.lines().filter(|l| l.split('{').next() == Some(name) && l.contains(label));
        let line = lines.next().unwrap_or_else(|| panic!("{name} {label} is missing in\n{text}"));
        assert_eq!(lines.next(), None, "{name} {label} stands there twice");
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    #[test]
    fn every_documented_series_is_there_before_the_first_request() {
        let text = metrics().render(&LoadSnapshot::default());
        for name in NAMES {
            let expected = if name.ends_with("_info") { 1.0 } else { 0.0 };
            assert_eq!(value(&text, name, r#"model_name="tiny \"quoted\"""#), expected, "{name}");
            assert_eq!(value(&text, name, r#"model="tiny \"quoted\"""#), expected, "{name}");
        }
        for outcome in ["finished", "aborted", "rejected", "failed"] {
            assert_eq!(value(&text, "thalweg_worker_requests_total", outcome), 0.0);
        }
    }

    #[test]
    fn figures_and_samples_are_told() {
        let metrics = metrics();
        metrics.events().ended(Outcome::Finished);
        metrics.events().published();
        metrics.observe(Observations {
            time_to_first_token: vec![0.5],
            time_per_output_token: vec![0.25, 0.25],
            end_to_end: vec![1.5],
            queue: vec![0.25],
        });
        let text = metrics.render(&LoadSnapshot {
            running: 2,
            waiting: 1,
            kv: KvUsage { total: 10, free: 1, cached: 3 },
            steps: 7,
            draining: true,
            counters: Counters {
                preemptions: 1,
                prefix_queries: 100,
                prefix_hits: 64,
                prompt_tokens: 101,
                generation_tokens: 3,
                finished_length: 2,
                ..Counters::default()
            },
            ..LoadSnapshot::default()
        });
        for (name, label, expected) in [
            ("vllm:num_requests_running", "", 2.0),
            ("vllm:num_requests_waiting", "", 1.0),
            ("vllm:kv_cache_usage_perc", "", 0.6),
            ("vllm:num_preemptions_total", "", 1.0),
            ("vllm:prefix_cache_queries_total", "", 100.0),
            ("vllm:prefix_cache_hits_total", "", 64.0),
            ("vllm:prompt_tokens_total", "", 101.0),
            ("vllm:generation_tokens_total", "", 3.0),
            ("vllm:request_success_total", "length", 2.0),
            ("vllm:request_queue_time_seconds_sum", "", 0.25),
            ("vllm:time_to_first_token_seconds_sum", "", 0.5),
            ("vllm:e2e_request_latency_seconds_sum", "", 1.5),
            ("vllm:request_time_per_output_token_seconds_sum", "", 0.5),
            ("thalweg_worker_steps_total", "", 7.0),
            ("thalweg_worker_draining", "", 1.0),
            ("thalweg_worker_cache_batches_total", "", 1.0),
            ("thalweg_worker_requests_total", "finished", 1.0),
        ] {
            assert_eq!(value(&text, name, label), expected, "{name}");
        }
    }

    /// The text format, as its specification has it: HELP and TYPE before samples, each family once and in one piece.
    #[test]
    fn the_exposition_is_valid() {
        let text = metrics().render(&LoadSnapshot::default());
        let mut families: Vec<&str> = Vec::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert!(!families.contains(&name), "{name} comes twice");
                families.push(name);
            } else if !line.starts_with("# HELP ") {
                let name = line.split(['{', ' ']).next().unwrap();
                let family = families.last().unwrap();
                let suffix = name.strip_prefix(family).unwrap_or_else(|| panic!("{name} within {family}"));
                assert!(["", "_bucket", "_sum", "_count"].contains(&suffix), "{line}");
                assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':'), "{name}");
                line.rsplit(' ').next().unwrap().parse::<f64>().unwrap();
            }
        }
        assert!(text.ends_with('\n') && families.len() > 20);
    }
}
