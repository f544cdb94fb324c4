//! Flags that several subcommands share.

mod index;
mod log_filter;
mod membership;
mod trust;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use thalweg_proto::value;

pub(crate) use index::IndexOptions;
pub(crate) use log_filter::LogFilter;
pub(crate) use membership::MembershipOptions;
pub(crate) use trust::TrustOptions;

/// An option is at fault: it contradicts another one, or what it names is not there.
#[derive(Debug)]
pub(crate) struct BadOption(String);

impl std::fmt::Display for BadOption {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadOption {}

impl BadOption {
    /// The error, as subcommands return it.
    pub(crate) fn because(text: impl std::fmt::Display) -> anyhow::Error {
        Self(text.to_string()).into()
    }
}

/// Flags of every subcommand.
#[derive(Args, Clone, Debug)]
pub(crate) struct Global {
    /// YAML file of settings, keyed by flag name; flags and THALWEG_* variables go first
    #[arg(long, global = true, env = "THALWEG_CONFIG", value_name = "FILE", value_parser = value::file)]
    pub(crate) config: Option<PathBuf>,

    /// What to log: off, error, warn, info, debug or trace, also per module as in info,thalweg_router=debug; RUST_LOG goes
    /// first
    #[arg(long, global = true, env = "THALWEG_LOG_LEVEL", value_name = "FILTER", default_value = "info")]
    pub(crate) log_level: LogFilter,

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
