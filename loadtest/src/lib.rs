//! Load on an OpenAI-compatible server, and what came of it: the library behind `thalweg bench serve`.
//!
//! A [`Plan`] says what to send and when; [`run`] carries it out and sums it up in a [`Report`]. Nothing here knows
//! more of the server than HTTP.

#![forbid(unsafe_code)]

pub mod error;
pub mod plan;

mod answer;
mod arrival;
mod client;
mod conversation;
mod dataset;
mod progress;
mod prompts;
mod run;
mod sse;

pub mod record;
pub mod report;

pub use self::error::LoadError;
pub use self::plan::Plan;
pub use self::report::Report;
pub use self::run::run;
