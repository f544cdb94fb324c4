//! What the HTTP surface counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use thalweg_proto::code::ErrorCode;

use crate::usage::{Outcome, Usage};

const ENDPOINTS: [&str; 4] = ["chat", "completions", "responses", "embeddings"];
/// Codes that are watched: whatever else goes wrong begins with its first request.
const FAILED: [ErrorCode; 6] = [
    ErrorCode::Overloaded,
    ErrorCode::Unavailable,
    ErrorCode::DeadlineExceeded,
    ErrorCode::WorkerCrashed,
    ErrorCode::Internal,
    ErrorCode::InvalidRequest,
];

/// Families of finished requests.
pub(crate) struct ApiMetrics {
    requests: Family<RequestLabels, Counter>,
    prompt_tokens: Family<ModelLabel, Counter>,
    cached_tokens: Family<ModelLabel, Counter>,
    completion_tokens: Family<ModelLabel, Counter>,
    first_token_seconds: Family<ModelLabel, Histogram, fn() -> Histogram>,
    request_seconds: Family<ModelLabel, Histogram, fn() -> Histogram>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    model: String,
    endpoint: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ModelLabel {
    model: String,
}

impl ApiMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let this = Self {
            requests: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            completion_tokens: Family::default(),
            first_token_seconds: Family::new_with_constructor(latency as fn() -> Histogram),
            request_seconds: Family::new_with_constructor(latency as fn() -> Histogram),
        };
        registry.register(
            "http_requests",
            "Generation and embedding requests by how they ended",
            this.requests.clone(),
        );
        registry.register(
            "prompt_tokens",
            "Tokens of prompts that a worker took",
            this.prompt_tokens.clone(),
        );
        registry.register(
            "cached_tokens",
            "Tokens of prompts whose KV a worker still had",
            this.cached_tokens.clone(),
        );
        registry.register("completion_tokens", "Tokens put out", this.completion_tokens.clone());
        registry.register(
            "request_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            this.first_token_seconds.clone(),
        );
        registry.register(
            "request_seconds",
            "Seconds from a request's arrival to its end",
            this.request_seconds.clone(),
        );
        this
    }

    /// Zeros of what may become of requests to a model: a rate does not see a series begin.
    pub(super) fn know(&self, model: &str) {
        for endpoint in ENDPOINTS {
            for outcome in
                [Outcome::Complete, Outcome::Cancelled].into_iter().chain(FAILED.map(Outcome::Failed))
            {
                let outcome = outcome.as_str();
                drop(self.requests.get_or_create(&RequestLabels {
                    model: model.to_owned(),
                    endpoint,
                    outcome,
                }));
            }
        }
    }

    /// Counts one finished request.
    pub(crate) fn record(
        &self,
        model: &str,
        endpoint: &'static str,
        outcome: Outcome,
        usage: Usage,
        first_token_seconds: Option<f64>,
        seconds: f64,
    ) {
        let labels = ModelLabel { model: model.to_owned() };
        self.requests
            .get_or_create(&RequestLabels { model: model.to_owned(), endpoint, outcome: outcome.as_str() })
            .inc();
        self.prompt_tokens.get_or_create(&labels).inc_by(usage.prompt_tokens);
        self.cached_tokens.get_or_create(&labels).inc_by(usage.cached_tokens);
        self.completion_tokens.get_or_create(&labels).inc_by(usage.completion_tokens);
        self.request_seconds.get_or_create(&labels).observe(seconds);
        if let Some(first) = first_token_seconds {
            self.first_token_seconds.get_or_create(&labels).observe(first);
        }
    }
}

/// 1 ms to 524 s.
fn latency() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 20))
}
