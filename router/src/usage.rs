//! Token counts of a request, and the one record that is kept of it.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde::ser::SerializeStruct;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::WorkerId;
use tokio::time::Instant;

use crate::api::metrics::ApiMetrics;
use crate::auth::Grant;
use crate::dispatch::Taken;
use crate::usage_log::UsageLog;

/// OpenAI's `usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts; in records, of those that a worker has taken.
    pub prompt_tokens: u64,
    /// Those whose KV a worker still had.
    pub cached_tokens: u64,
    /// Tokens of all choices.
    pub completion_tokens: u64,
    /// Those of them that are thoughts, of models that think.
    pub reasoning_tokens: Option<u64>,
}

impl Serialize for Usage {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Details {
            cached_tokens: u64,
        }
        #[derive(Serialize)]
        struct CompletionDetails {
            reasoning_tokens: u64,
        }
        let mut usage = to.serialize_struct("Usage", 5)?;
        usage.serialize_field("prompt_tokens", &self.prompt_tokens)?;
        usage.serialize_field("completion_tokens", &self.completion_tokens)?;
        usage.serialize_field("total_tokens", &(self.prompt_tokens + self.completion_tokens))?;
        usage.serialize_field("prompt_tokens_details", &Details { cached_tokens: self.cached_tokens })?;
        match self.reasoning_tokens {
            Some(reasoning_tokens) => {
                usage
                    .serialize_field("completion_tokens_details", &CompletionDetails { reasoning_tokens })?;
            }
            None => usage.skip_field("completion_tokens_details")?,
        }
        usage.end()
    }
}

/// How a request ended, as metrics and logs call it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Complete,
    Failed(ErrorCode),
    /// The client went away, or was cut off because it read nothing.
    Cancelled,
}

impl Outcome {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Complete => "ok",
            Self::Failed(code) => code.as_str(),
            Self::Cancelled => "cancelled",
        }
    }
}

/// The record of one generation request, written exactly once: when it is dropped, whatever led there.
pub(crate) struct UsageRecord {
    metrics: Arc<ApiMetrics>,
    log: Option<UsageLog>,
    grant: Arc<Grant>,
    /// The client's name of the request, and ours.
    request_id: String,
    reply_id: String,
    model: String,
    endpoint: &'static str,
    /// Who put out its first token.
    worker: Option<String>,
    /// What workers have taken of it, as the dispatcher tells.
    taken: Arc<Taken>,
    started: Instant,
    first_token: Option<Duration>,
    usage: Usage,
    outcome: Outcome,
}

impl UsageRecord {
    /// Begins with the outcome that holds if nobody says otherwise: the client went away.
    pub(crate) fn begin(
        metrics: Arc<ApiMetrics>,
        log: Option<UsageLog>,
        grant: Arc<Grant>,
        request_id: String,
        endpoint: &'static str,
    ) -> Self {
        Self {
            metrics,
            log,
            grant,
            request_id,
            reply_id: String::new(),
            model: String::new(),
            endpoint,
            worker: None,
            taken: Arc::default(),
            started: Instant::now(),
            first_token: None,
            usage: Usage::default(),
            outcome: Outcome::Cancelled,
        }
    }

    /// The request is sound: `model` is to answer it as `reply_id`.
    pub(crate) fn accepted(&mut self, model: &str, reply_id: &str) {
        self.model = model.to_owned();
        self.reply_id = reply_id.to_owned();
    }

    pub(crate) fn worker(&mut self, name: &str) {
        self.worker.get_or_insert_with(|| name.to_owned());
    }

    /// Where it is told that workers have taken the request's prompts: from then on their tokens count, though no output may come.
    pub(crate) fn taken(&self) -> &Arc<Taken> {
        &self.taken
    }

    /// Output has come; the first time counts.
    pub(crate) fn progress(&mut self, usage: Usage) {
        self.usage = usage;
        if usage.completion_tokens > 0 && self.first_token.is_none() {
            self.first_token = Some(self.started.elapsed());
        }
    }

    pub(crate) fn end(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

/// A line of the usage log.
#[derive(Serialize)]
struct Line<'a> {
    /// Unix seconds at the end of the request.
    time: f64,
    request_id: &'a str,
    /// `id` of the reply; empty where the request was refused.
    reply_id: &'a str,
    key: &'a str,
    tenant: &'a str,
    model: &'a str,
    endpoint: &'static str,
    worker: Option<&'a str>,
    outcome: &'static str,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    reasoning_tokens: u64,
    first_token_seconds: Option<f64>,
    seconds: f64,
}

impl UsageRecord {
    fn asked_worker(&self) -> Option<&str> {
        self.worker.as_deref().or_else(|| self.taken.worker().map(WorkerId::as_str))
    }

    fn line(&self, usage: &Usage, first_token_seconds: Option<f64>, seconds: f64) -> Line<'_> {
        Line {
            time: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
            request_id: &self.request_id,
            reply_id: &self.reply_id,
            key: &self.grant.key,
            tenant: &self.grant.tenant,
            model: &self.model,
            endpoint: self.endpoint,
            worker: self.asked_worker(),
            outcome: self.outcome.as_str(),
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            completion_tokens: usage.completion_tokens,
            reasoning_tokens: usage.reasoning_tokens.unwrap_or(0),
            first_token_seconds,
            seconds,
        }
    }
}

impl Drop for UsageRecord {
    fn drop(&mut self) {
        let seconds = self.started.elapsed().as_secs_f64();
        let first_token_seconds = self.first_token.map(|d| d.as_secs_f64());
        let usage = Usage { prompt_tokens: self.taken.prompt_tokens(), ..self.usage };
        self.metrics.record(&self.model, self.endpoint, self.outcome, usage, first_token_seconds, seconds);
        if let Some(log) = &self.log {
            log.record(&self.line(&usage, first_token_seconds, seconds));
        }
        tracing::debug!(
            target: "thalweg::usage",
            request_id = self.request_id,
            reply_id = self.reply_id,
            key = self.grant.key,
            tenant = self.grant.tenant,
            model = self.model,
            endpoint = self.endpoint,
            worker = self.asked_worker(),
            outcome = self.outcome.as_str(),
            prompt_tokens = usage.prompt_tokens,
            cached_tokens = usage.cached_tokens,
            completion_tokens = usage.completion_tokens,
            first_token_seconds,
            seconds,
            "request ended"
        );
    }
}
