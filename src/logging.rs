//! Logs go to stderr, so that stdout is for results.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::options::{Global, LogFormat};
use crate::redact;

/// Starts logging for the rest of the process.
pub(crate) fn start(global: &Global) {
    let (filter, problem) = filter(global);
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(|| redact::Stderr);
    // What the logger has to say of itself it would print, and panic where it cannot.
    let lines = lines.log_internal_errors(false);
    match global.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    if let Some(problem) = problem {
        tracing::warn!("{problem}");
    }
}

/// RUST_LOG, which other programs read too and which hence ends none, else the flag.
fn filter(global: &Global) -> (EnvFilter, Option<&'static str>) {
    match std::env::var("RUST_LOG").map(|wanted| (EnvFilter::try_new(&wanted), wanted)) {
        Ok((Ok(filter), wanted)) if !wanted.is_empty() => (filter, None),
        Ok((Err(_), _)) => {
            (global.log_level.build(), Some("RUST_LOG is no filter; logging as --log-level says"))
        }
        _ => (global.log_level.build(), None),
    }
}
