//! The exposition as a scraper reads it.

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
    let text = metrics().render(&LoadSnapshot::default(), &IndexStats::default());
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
    let load = LoadSnapshot {
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
    };
    let index = IndexStats { batches_dropped: 4, ..IndexStats::default() };
    let text = metrics.render(&load, &index);
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
        ("thalweg_worker_cache_batches_dropped_total", "", 4.0),
        ("thalweg_worker_requests_total", "finished", 1.0),
    ] {
        assert_eq!(value(&text, name, label), expected, "{name}");
    }
}

/// The text format, as its specification has it: HELP and TYPE before samples, each family once and in one piece.
#[test]
fn the_exposition_is_valid() {
    let text = metrics().render(&LoadSnapshot::default(), &IndexStats::default());
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

/// ai-dynamo/dynamo#11194: workers that never published looked fine while cache routing did nothing.
#[test]
fn a_worker_whose_cache_nobody_can_know_of_says_so() {
    let check = |prefix_caching: bool, degraded: bool, expected: f64| {
        let cache = CacheConfig { block_size: 16, blocks: 10, dtype: "bfloat16".to_owned(), prefix_caching };
        let index = IndexStats { degraded, ..IndexStats::default() };
        let text = WorkerMetrics::new("tiny", &cache).render(&LoadSnapshot::default(), &index);
        assert_eq!(
            value(&text, "thalweg_worker_cache_publishing", ""),
            expected,
            "{prefix_caching} {degraded}"
        );
    };
    check(true, false, 1.0);
    check(true, true, 0.0);
    check(false, false, 0.0);
}
