//! Flags that several subcommands share.

mod index;
mod membership;
mod trust;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

pub(crate) use index::IndexOptions;
pub(crate) use membership::MembershipOptions;
pub(crate) use trust::TrustOptions;

/// Flags of every subcommand.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// YAML file of settings, keyed by flag name; flags and THALWEG_* variables go first
    #[arg(long, global = true, env = "THALWEG_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// What to log: error, warn, info, debug, trace or filters per module; RUST_LOG goes first
    #[arg(long, global = true, env = "THALWEG_LOG_LEVEL", value_name = "FILTER", default_value = "info")]
    pub(crate) log_level: String,

    /// How to log
    #[arg(long, global = true, env = "THALWEG_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// A JSON object a line
    Json,
}
