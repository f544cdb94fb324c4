//! Settings of a router: one struct from which flags, environment and files derive.

pub mod grpc;
pub mod responses;
pub mod seconds;
pub mod surface;

use std::net::SocketAddr;
use std::time::Duration;

use thalweg_cache_index::RedisConfig;
use thalweg_proto::value::{self, BYTES_MAX, SECONDS_MAX, SECONDS_MIN};
use thalweg_serve::trust::TrustConfig;

use crate::error::RouterStartError;
use crate::policy::Policy;

/// Most tokens of a limit, so that sums of them can be counted.
const TOKENS_MAX: u64 = 1_000_000_000_000;
pub use grpc::Grpc;
pub use responses::Responses;
pub use surface::{API_KEY_VARIABLE, Surface};

/// Everything that can be set. Durations are given in seconds.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct RouterConfig {
    /// Address of the HTTP API; port 0 takes a free one
    #[arg(long, env = "THALWEG_HTTP", default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    #[arg(value_parser = value::address)]
    pub http: SocketAddr,

    /// This process starts its own workers: until one of them was ready, /ready fails.
    #[arg(skip)]
    pub starts_workers: bool,

    /// Name of this router in membership and, with a suffix of each life, in logs. Default: new at each start
    #[arg(long, env = "THALWEG_ROUTER_ID", value_name = "NAME", value_parser = value::name)]
    pub router_id: Option<String>,

    /// How a worker is picked
    #[arg(long, env = "THALWEG_POLICY", value_enum, default_value_t = Policy::default())]
    pub policy: Policy,

    /// Weight of the delay that a request brings to others, from 0, where each counts its own time only, to 1000; 1
    /// minimises total time over all requests
    #[arg(long, env = "THALWEG_HARM_WEIGHT", default_value_t = 1.0, value_parser = value::number(0.0..=1000.0))]
    pub harm_weight: f64,

    /// Limits on what may wait and run
    #[command(flatten)]
    pub limits: Limits,

    /// How long things may take
    #[command(flatten)]
    pub timeouts: Timeouts,

    /// What clients see
    #[command(flatten)]
    pub surface: Surface,

    /// What is kept for later requests
    #[command(flatten)]
    pub responses: Responses,

    /// The same inference over gRPC
    #[command(flatten)]
    pub grpc: Grpc,

    /// Tell clients the worker's name in the x-thalweg-worker header
    #[arg(long, env = "THALWEG_WORKER_HEADER", default_value_t = true, action = clap::ArgAction::Set)]
    pub worker_header: bool,

    /// Seed of tie breaks and of requests that give none; random when absent
    #[arg(long, env = "THALWEG_ROUTER_SEED", value_name = "N", value_parser = value::whole(0..=u64::MAX))]
    pub router_seed: Option<u64>,

    /// How this router proves itself to workers, and which it believes
    #[arg(skip)]
    #[serde(skip)]
    pub trust: TrustConfig,

    /// The Redis of the cache index, where there is one.
    #[arg(skip)]
    #[serde(skip)]
    pub index_redis: Option<RedisConfig>,
}

/// Bounds of everything that could grow.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Limits {
    /// Bytes of an HTTP request body
    #[arg(long, env = "THALWEG_BODY_BYTES_MAX", default_value_t = 32 << 20)]
    #[arg(value_parser = value::whole(1..=BYTES_MAX))]
    pub body_bytes_max: usize,

    /// Bytes of HTTP request bodies that have come in part, over all requests; above it 429
    #[arg(long, env = "THALWEG_BODY_BUFFER_BYTES_MAX", default_value_t = 512 << 20)]
    #[arg(value_parser = value::whole(1..=BYTES_MAX))]
    pub body_buffer_bytes_max: usize,

    /// Requests that wait in this router, beyond those that its workers have taken; above it 429. A worker takes
    /// --max-num-seqs of its own and a quarter as many beside, as long as those make less than a second of prefill. The
    /// default is twice what one tenant may have, so that none fills the queue alone.
    /// This and the next three are limits of the whole cluster: each of n live routers enforces the n-th part
    #[arg(long, env = "THALWEG_QUEUE_REQUESTS_MAX", default_value_t = 4096)]
    #[arg(value_parser = value::whole(1..=1_000_000usize))]
    pub queue_requests_max: usize,

    /// Tokens (prompts and expected outputs) that wait in this router; above it 429
    #[arg(long, env = "THALWEG_QUEUE_TOKENS_MAX", default_value_t = 32_000_000)]
    #[arg(value_parser = value::whole(1..=TOKENS_MAX))]
    pub queue_tokens_max: u64,

    /// Requests of one tenant, waiting and running; above it 429
    #[arg(long, env = "THALWEG_TENANT_REQUESTS_MAX", default_value_t = 2048)]
    #[arg(value_parser = value::whole(1..=1_000_000usize))]
    pub tenant_requests_max: usize,

    /// Tokens of one tenant, waiting and running; above it 429
    #[arg(long, env = "THALWEG_TENANT_TOKENS_MAX", default_value_t = 16_000_000)]
    #[arg(value_parser = value::whole(1..=TOKENS_MAX))]
    pub tenant_tokens_max: u64,

    /// Tries of one request before its first token, the first one included. Above 1, abnormal ends of workers do not count
    #[arg(long, env = "THALWEG_ATTEMPTS_MAX", default_value_t = 3)]
    #[arg(value_parser = value::whole(1..=100u32))]
    pub attempts_max: u32,

    /// Times that a begun answer is continued by another worker after it lost one. Not counted: orderly hand-overs by
    /// draining workers that did some of it, and abnormal ends of workers. 0 is never
    #[arg(long, env = "THALWEG_RESUMES_MAX", default_value_t = 2)]
    #[arg(value_parser = value::whole(0..=100u32))]
    pub resumes_max: u32,

    /// Choices (n) of one request
    #[arg(long, env = "THALWEG_CHOICES_MAX", default_value_t = 128)]
    #[arg(value_parser = value::whole(1..=4096u32))]
    pub choices_max: u32,

    /// Bytes of tokens received from workers and not yet read by clients, over all requests
    #[arg(long, env = "THALWEG_STREAM_BUFFER_BYTES_MAX", default_value_t = 256 << 20)]
    #[arg(value_parser = value::whole(1..=BYTES_MAX))]
    pub stream_buffer_bytes_max: usize,
}

/// Bounds on time, in seconds.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Timeouts {
    /// Longest wait for a worker's place, then 504
    #[arg(long, env = "THALWEG_QUEUE_TIMEOUT", default_value = "60", value_parser = above_0())]
    #[serde(with = "seconds")]
    pub queue_timeout: Duration,

    /// Longest life of a request
    #[arg(long, env = "THALWEG_REQUEST_TIMEOUT", default_value = "3600", value_parser = above_0())]
    #[serde(with = "seconds")]
    pub request_timeout: Duration,

    /// A client that reads nothing for so long while tokens wait, or sends nothing of a body, is cut off
    #[arg(long, env = "THALWEG_CLIENT_STALL_TIMEOUT", default_value = "30", value_parser = above_0())]
    #[serde(with = "seconds")]
    pub client_stall_timeout: Duration,

    /// A stream without output gets a comment line so often, so that no proxy takes it for idle; 0 is never
    #[arg(long, env = "THALWEG_SSE_KEEP_ALIVE", default_value = "15", value_parser = from_0())]
    #[serde(with = "seconds")]
    pub sse_keep_alive: Duration,

    /// Opening a connection to a worker, and each question asked while getting to know it
    #[arg(long, env = "THALWEG_CONNECT_TIMEOUT", default_value = "2", value_parser = above_0())]
    #[serde(with = "seconds")]
    pub connect_timeout: Duration,

    /// On shutdown, requests are still taken for so long while /ready fails and clients are asked to go: as long as load
    /// balancers need to notice; 0 is not at all
    #[arg(long, env = "THALWEG_DRAIN_DELAY", default_value = "0", value_parser = from_0())]
    #[serde(with = "seconds")]
    pub drain_delay: Duration,

    /// On shutdown, running requests may then take so long to finish; those that do not end with an error event; 0 ends
    /// all at once
    #[arg(long, env = "THALWEG_DRAIN_TIMEOUT", default_value = "30", value_parser = from_0())]
    #[serde(with = "seconds")]
    pub drain_timeout: Duration,
}

impl RouterConfig {
    /// Refuses what the flags would refuse, wherever the values came from.
    pub fn check(&self) -> Result<(), RouterStartError> {
        let wrong =
            |option: &str, reason: String| RouterStartError::Config { option: option.to_owned(), reason };
        let values = serde_json::to_value(self).map_err(|error| wrong("config", error.to_string()))?;
        let command = flags::<Self>();
        for (option, value) in scalars(&values) {
            let arg = command.get_arguments().find(|arg| arg.get_long() == Some(option));
            // An optional setting may be absent; elsewhere null is what JSON makes of NaN.
            let Some(arg) = arg.filter(|arg| !value.is_null() || !arg.get_default_values().is_empty()) else {
                continue;
            };
            let command = clap::Command::new("check").no_binary_name(true).arg(arg.clone());
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if let Err(error) = command.try_get_matches_from([format!("--{option}={text}")]) {
                let reason =
                    std::error::Error::source(&error).map_or("no such value".into(), ToString::to_string);
                return Err(wrong(option, reason));
            }
        }
        let Limits { body_bytes_max, body_buffer_bytes_max, .. } = self.limits;
        if body_buffer_bytes_max < body_bytes_max {
            let reason = format!(
                "expected at least --body-bytes-max, {body_bytes_max}; none so large would ever be read"
            );
            return Err(wrong("body-buffer-bytes-max", reason));
        }
        self.surface.origins()?;
        Ok(())
    }
}

/// Settings by name, those of nested structs too.
fn scalars(values: &serde_json::Value) -> Vec<(&str, &serde_json::Value)> {
    let fields = values.as_object().into_iter().flatten();
    fields
        .flat_map(|(name, value)| match value {
            serde_json::Value::Object(_) => scalars(value),
            serde_json::Value::Bool(_) | serde_json::Value::Array(_) => Vec::new(),
            value => vec![(name.as_str(), value)],
        })
        .collect()
}

fn above_0() -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    value::seconds(SECONDS_MIN..=SECONDS_MAX)
}

fn from_0() -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    value::seconds(0.0..=SECONDS_MAX)
}

/// The flags alone: no binary's name, no environment.
fn flags<A: clap::Args>() -> clap::Command {
    A::augment_args(clap::Command::new("flags").no_binary_name(true))
        .mut_args(|arg| arg.env(clap::builder::Resettable::Reset))
}

/// The flags' own defaults, from the one place where they stand.
fn flag_defaults<A: clap::Args + clap::FromArgMatches>() -> A {
    let matches = flags::<A>().try_get_matches_from(std::iter::empty::<&str>());
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
            assert!(message.starts_with(&format!("--{option}: expected ")), "{message}");
        };
        check(|c| c.harm_weight = f64::NAN, "harm-weight");
        check(|c| c.limits.attempts_max = 0, "attempts-max");
        check(|c| c.limits.body_bytes_max = 0, "body-bytes-max");
        check(|c| c.limits.body_buffer_bytes_max = c.limits.body_bytes_max - 1, "body-buffer-bytes-max");
        check(|c| c.limits.stream_buffer_bytes_max = 0, "stream-buffer-bytes-max");
        check(|c| c.timeouts.request_timeout = Duration::ZERO, "request-timeout");
        check(|c| c.limits.choices_max = 0, "choices-max");
        check(|c| c.responses.response_ttl = Duration::ZERO, "response-ttl");
        check(|c| c.responses.response_bytes_max = 0, "response-bytes-max");
        check(|c| c.limits.queue_requests_max = 0, "queue-requests-max");
        check(|c| c.limits.tenant_tokens_max = u64::MAX, "tenant-tokens-max");
        check(|c| c.timeouts.connect_timeout = Duration::ZERO, "connect-timeout");
        check(|c| c.timeouts.drain_timeout = Duration::MAX, "drain-timeout");
        check(|c| c.router_id = Some("a b".to_owned()), "router-id");
        let unknown = serde_json::from_str::<RouterConfig>(r#"{"polcy": "cost"}"#).unwrap_err();
        assert!(unknown.to_string().contains("polcy"));
    }
}
