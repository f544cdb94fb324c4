//! Settings of a router: one struct from which flags, environment and files derive.

pub mod seconds;

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_proto::trust::TrustConfig;

use crate::error::RouterStartError;
use crate::policy::Policy;

/// Everything that can be set. Durations are given in seconds.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RouterConfig {
    /// Address of the HTTP API; port 0 takes a free one
    #[arg(long, env = "THALWEG_HTTP", default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub http: SocketAddr,

    /// This process starts its own workers: until one of them was ready, /ready fails.
    #[arg(skip)]
    pub starts_workers: bool,

    /// Name under which workers count this router's bookings; drawn at random when empty
    #[arg(long, env = "THALWEG_ROUTER_ID", default_value = "")]
    pub router_id: String,

    /// How a worker is picked
    #[arg(long, env = "THALWEG_POLICY", value_enum, default_value_t = Policy::default())]
    pub policy: Policy,

    /// Weight of the delay that a request brings to others; 1 minimises total time over all requests
    #[arg(long, env = "THALWEG_HARM_WEIGHT", default_value_t = 1.0)]
    pub harm_weight: f64,

    /// Limits on what may wait and run
    #[command(flatten)]
    pub limits: Limits,

    /// How long things may take
    #[command(flatten)]
    pub timeouts: Timeouts,

    /// Tell clients the worker's name in the x-thalweg-worker header
    #[arg(long, env = "THALWEG_WORKER_HEADER", default_value_t = true, action = clap::ArgAction::Set)]
    pub worker_header: bool,

    /// Seed of tie breaks and of requests that give none; random when absent
    #[arg(long, env = "THALWEG_ROUTER_SEED")]
    pub router_seed: Option<u64>,

    /// How this router proves itself to workers, and which it believes
    #[arg(skip)]
    #[serde(skip)]
    pub trust: TrustConfig,
}

/// Bounds of everything that could grow.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limits {
    /// Bytes of an HTTP request body
    #[arg(long, env = "THALWEG_BODY_BYTES_MAX", default_value_t = 32 << 20)]
    pub body_bytes_max: usize,

    /// Requests that wait in this router, beyond those that its workers have taken; above it 429. A worker takes
    /// --max-num-seqs of its own and as many more as make a second of prefill, which are many where prompts are short.
    /// This and the next three are limits of the whole cluster: each of n live routers enforces the n-th part
    #[arg(long, env = "THALWEG_QUEUE_REQUESTS_MAX", default_value_t = 2048)]
    pub queue_requests_max: usize,

    /// Tokens (prompts and expected outputs) that wait in this router; above it 429
    #[arg(long, env = "THALWEG_QUEUE_TOKENS_MAX", default_value_t = 16_000_000)]
    pub queue_tokens_max: u64,

    /// Requests of one tenant, waiting and running; above it 429
    #[arg(long, env = "THALWEG_TENANT_REQUESTS_MAX", default_value_t = 2048)]
    pub tenant_requests_max: usize,

    /// Tokens of one tenant, waiting and running; above it 429
    #[arg(long, env = "THALWEG_TENANT_TOKENS_MAX", default_value_t = 16_000_000)]
    pub tenant_tokens_max: u64,

    /// Tries of one request before its first token, the first one included
    #[arg(long, env = "THALWEG_ATTEMPTS_MAX", default_value_t = 3)]
    pub attempts_max: u32,

    /// Times that a begun answer is continued by another worker after it lost one. Not counted: orderly hand-overs by
    /// draining workers that did some of it, and losses that another request explains better
    #[arg(long, env = "THALWEG_RESUMES_MAX", default_value_t = 2)]
    pub resumes_max: u32,

    /// Choices (n) of one request
    #[arg(long, env = "THALWEG_CHOICES_MAX", default_value_t = 128)]
    pub choices_max: u32,

    /// Bytes of tokens received from workers and not yet read by clients, over all requests
    #[arg(long, env = "THALWEG_STREAM_BUFFER_BYTES_MAX", default_value_t = 256 << 20)]
    pub stream_buffer_bytes_max: usize,
}

/// Bounds on time, in seconds.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timeouts {
    /// Longest wait for a worker's place
    #[arg(long, env = "THALWEG_QUEUE_TIMEOUT", default_value = "60", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub queue_timeout: Duration,

    /// Longest life of a request
    #[arg(long, env = "THALWEG_REQUEST_TIMEOUT", default_value = "3600", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub request_timeout: Duration,

    /// A client that reads nothing for so long while tokens wait is cut off
    #[arg(long, env = "THALWEG_CLIENT_STALL_TIMEOUT", default_value = "30", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub client_stall_timeout: Duration,

    /// A stream without output gets a comment line so often, so that no proxy takes it for idle; 0 is never
    #[arg(long, env = "THALWEG_SSE_KEEP_ALIVE", default_value = "15", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub sse_keep_alive: Duration,

    /// Opening a connection to a worker, and each question asked while getting to know it
    #[arg(long, env = "THALWEG_CONNECT_TIMEOUT", default_value = "2", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub connect_timeout: Duration,

    /// On shutdown, requests are still taken for so long while /ready fails and clients are asked to go: as long as load
    /// balancers need to notice
    #[arg(long, env = "THALWEG_DRAIN_DELAY", default_value = "0", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub drain_delay: Duration,

    /// On shutdown, running requests may then take so long to finish; those that do not end with an error event
    #[arg(long, env = "THALWEG_DRAIN_TIMEOUT", default_value = "30", value_parser = seconds::parse)]
    #[serde(with = "seconds")]
    pub drain_timeout: Duration,
}

impl RouterConfig {
    /// Refuses what cannot work, naming the flag.
    pub fn check(&self) -> Result<(), RouterStartError> {
        let fail = |option, reason: &str| Err(RouterStartError::Config { option, reason: reason.to_owned() });
        if !(self.harm_weight.is_finite() && self.harm_weight >= 0.0) {
            return fail("harm-weight", "must be a finite number of at least 0");
        }
        if self.limits.attempts_max == 0 {
            return fail("attempts-max", "must be at least 1");
        }
        if self.limits.choices_max == 0 {
            return fail("choices-max", "must be at least 1");
        }
        if self.limits.queue_requests_max == 0 {
            return fail("queue-requests-max", "must be at least 1, since every request passes the queue");
        }
        if self.limits.stream_buffer_bytes_max == 0 {
            return fail("stream-buffer-bytes-max", "must be at least 1, or no token can be kept");
        }
        if self.limits.body_bytes_max == 0 {
            return fail("body-bytes-max", "must be at least 1, or no request is let in");
        }
        if self.timeouts.client_stall_timeout.is_zero() {
            return fail("client-stall-timeout", "must be above 0, or every reader counts as stalled");
        }
        if self.timeouts.request_timeout.is_zero() {
            return fail("request-timeout", "must be above 0, or no request has time to be served");
        }
        Ok(())
    }
}

/// The flags' own defaults, from the one place where they stand.
fn flag_defaults<A: clap::Args + clap::FromArgMatches>() -> A {
    let command = A::augment_args(clap::Command::new("defaults").no_binary_name(true))
        .mut_args(|arg| arg.env(clap::builder::Resettable::Reset));
    let matches = command.try_get_matches_from(std::iter::empty::<&str>());
    matches
        .and_then(|m| A::from_arg_matches(&m))
        .unwrap_or_else(|error| unreachable!("every flag has a valid default: {error}"))
}

impl Default for RouterConfig {
    fn default() -> Self {
        flag_defaults()
    }
}

impl Default for Limits {
    fn default() -> Self {
        flag_defaults()
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        flag_defaults()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_sound_and_survive_a_round_trip() {
        let config = RouterConfig::default();
        config.check().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<RouterConfig>(&text).unwrap(), config);
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let check = |change: fn(&mut RouterConfig), option: &str| {
            let mut config = RouterConfig::default();
            change(&mut config);
            let message = config.check().unwrap_err().to_string();
            assert!(message.starts_with(&format!("--{option}: ")), "{message}");
        };
        check(|c| c.harm_weight = f64::NAN, "harm-weight");
        check(|c| c.limits.attempts_max = 0, "attempts-max");
        check(|c| c.limits.body_bytes_max = 0, "body-bytes-max");
        check(|c| c.limits.stream_buffer_bytes_max = 0, "stream-buffer-bytes-max");
        check(|c| c.timeouts.request_timeout = Duration::ZERO, "request-timeout");
        check(|c| c.limits.choices_max = 0, "choices-max");
        check(|c| c.limits.queue_requests_max = 0, "queue-requests-max");
        let unknown = serde_json::from_str::<RouterConfig>(r#"{"polcy": "cost"}"#).unwrap_err();
        assert!(unknown.to_string().contains("polcy"));
    }
}
