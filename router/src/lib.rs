//! From HTTP to a worker and back. Modules stand in the order in which a request meets them.
#![forbid(unsafe_code)]

/// Assembly: start, readiness, drain.
pub mod router;

/// The one struct of settings.
pub mod config;

/// The HTTP surface: parses requests, tokenises, and writes replies.
pub mod api;
/// Who may ask, and for how much.
pub(crate) mod auth;

/// Bodies to requests that are known to be right.
pub mod request;

/// Prompts to token ids that fit the context.
pub mod tokenize;

/// Served models by name.
pub mod models;

/// Who may go now, who waits and who is refused.
pub mod admission;
/// How a model writes tool calls and thoughts.
pub mod dialect;

/// One admitted request: hash, match, pick, book, generate.
pub mod dispatch;

/// Which worker: pure selection.
pub mod policy;

/// What is known of each worker, and the connection that tells it.
pub mod workers;

/// From a worker's tokens to text, stops and logprobs.
pub(crate) mod output;

/// Streams of server-sent events.
pub(crate) mod sse;

/// Answers kept to be continued or read again.
pub(crate) mod responses_store;

/// Token counts and the record of each request.
pub mod usage;

/// What fuzz targets drive.
#[cfg(fuzzing)]
pub mod fuzzing;
/// A served model for unit tests.
#[cfg(any(test, fuzzing))]
pub(crate) mod test_support;
/// Usage records as lines of a file.
pub(crate) mod usage_log;

/// Why a request was not served.
pub mod error;

/// What this router counts.
pub mod metrics;
