//! Figures of the engine, copied in when someone looks.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::add;
use crate::engine::{LoadSnapshot, Observations};

type Ratio = Gauge<f64, AtomicU64>;

#[derive(Default)]
pub(super) struct Gauges {
    running: Gauge,
    waiting: Gauge,
    kv_usage: Ratio,
    kv_total: Gauge,
    kv_available: Gauge,
    draining: Gauge,
}

/// Counters that the engine keeps; copied in when someone looks.
#[derive(Default)]
pub(super) struct Mirrored {
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
pub(super) struct Latencies {
    time_to_first_token: Histogram,
    time_per_output_token: Histogram,
    queue_time: Histogram,
    e2e_latency: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    finished_reason: &'static str,
}

impl Gauges {
    pub(super) fn register(&self, registry: &mut Registry) {
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

    pub(super) fn set(&self, load: &LoadSnapshot) {
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
    pub(super) fn register(&self, registry: &mut Registry) {
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

    pub(super) fn set(&self, load: &LoadSnapshot) {
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
    pub(super) fn new() -> Self {
        Self {
            time_to_first_token: Histogram::new(FIRST_TOKEN_SECONDS),
            time_per_output_token: Histogram::new(PER_TOKEN_SECONDS),
            queue_time: Histogram::new(LATENCY_SECONDS),
            e2e_latency: Histogram::new(LATENCY_SECONDS),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
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

    pub(super) fn observe(&self, samples: Observations) {
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

pub(super) fn store(counter: &Counter, value: u64) {
    counter.inner().store(value, Ordering::Relaxed);
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
