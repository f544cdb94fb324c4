//! Logs go to stderr, so that stdout is for results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::options::{Global, LogFormat};

/// Starts logging for the rest of the process.
pub(crate) fn start(global: &Global) {
    let (filter, problem) = filter(&global.log_level);
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match global.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    if let Some(problem) = problem {
        tracing::warn!("{problem}");
    }
}

/// RUST_LOG, else the flag, else `info` with a complaint.
fn filter(level: &str) -> (EnvFilter, Option<String>) {
    let (source, wanted) = match std::env::var("RUST_LOG") {
        Ok(wanted) if !wanted.is_empty() => ("RUST_LOG", wanted),
        _ => ("--log-level", level.to_owned()),
    };
    match EnvFilter::try_new(&wanted) {
        Ok(filter) => (filter, None),
        Err(error) => {
            (EnvFilter::new("info"), Some(format!("{source} {wanted:?}: {error}; logging at info")))
        }
    }
}
