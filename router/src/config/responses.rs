//! Settings of what is kept for the Responses API.

use std::time::Duration;

use thalweg_proto::value::{self, BYTES_MAX, SECONDS_MAX};

use super::seconds;

/// Redis counts lives in whole seconds.
const TTL_SECONDS_MIN: f64 = 1.0;

/// Where responses are kept, and how much of them.
#[derive(Clone, Debug, PartialEq, clap::Args, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Responses {
    /// Where answers of /v1/responses are kept, to be continued by previous_response_id or read again
    #[arg(long, env = "THALWEG_RESPONSE_STORE", value_enum, default_value_t = ResponseStore::default())]
    pub response_store: ResponseStore,

    /// Seconds for which a response is kept: a day by default
    #[arg(long, env = "THALWEG_RESPONSE_TTL", default_value = "86400", value_name = "SECONDS")]
    #[arg(value_parser = value::seconds(TTL_SECONDS_MIN..=SECONDS_MAX))]
    #[serde(with = "seconds")]
    pub response_ttl: Duration,

    /// Bytes of one kept response with the conversation before it; a larger one is answered and not kept
    #[arg(long, env = "THALWEG_RESPONSE_BYTES_MAX", default_value_t = 4 << 20)]
    #[arg(value_parser = value::whole(1..=BYTES_MAX))]
    pub response_bytes_max: usize,

    /// Bytes of all responses kept in this process' memory; the least recently used go first
    #[arg(long, env = "THALWEG_RESPONSE_MEMORY_BYTES_MAX", default_value_t = 64 << 20)]
    #[arg(value_parser = value::whole(1..=BYTES_MAX))]
    pub response_memory_bytes_max: usize,
}

/// A place for responses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ResponseStore {
    /// The Redis that --index names, for all routers; without one, this process' memory
    #[default]
    Auto,
    /// This process' memory
    Memory,
    /// None are kept
    None,
}

impl Default for Responses {
    fn default() -> Self {
        super::flag_defaults()
    }
}
