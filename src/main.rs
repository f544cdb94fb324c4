//! `thalweg`: one binary for every part of the cluster.
#![forbid(unsafe_code)]

mod bench;
mod bench_engine;
mod bench_serve;
mod hub;
mod index;
mod logging;
mod options;
mod redact;
mod router;
mod settings;
mod shutdown;
mod up;
mod up_processes;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use thalweg_loadtest::LoadError;
use thalweg_router::error::RouterStartError;
use thalweg_serve::trust::TrustError;
use thalweg_worker::engine::EngineError;
use thalweg_worker::worker::StartError;

use crate::options::BadOption;

/// A distributed LLM serving cluster: OpenAI-compatible router and workers with a paged KV cache
#[derive(Parser)]
#[command(name = "thalweg", version, about)]
struct Cli {
    #[command(flatten)]
    global: options::Global,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model from this machine: a router and its workers in one process
    Up(up::Options),
    /// Run a router: HTTP in front, workers behind
    Router(router::Options),
    /// Run one worker
    Worker(worker::Options),
    /// Measure a server, or the engine alone
    Bench(bench::Options),
    /// Look into the cache index in Redis
    Index(index::Options),
}

fn main() -> ExitCode {
    let cli: Cli = match settings::parse() {
        Ok(cli) => cli,
        Err(error) => error.exit(),
    };
    logging::start(&cli.global);
    match run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", explain(&error));
            exit_code(&error)
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    if matches!(command, Command::Up(_) | Command::Router(_) | Command::Worker(_)) {
        thalweg_serve::raise_file_limit()?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        match command {
            Command::Up(options) => up::run(options).await,
            Command::Router(options) => router::run(options).await,
            Command::Worker(options) => worker::run(options).await,
            Command::Bench(options) => bench::run(options).await,
            Command::Index(options) => index::run(options).await,
        }
    });
    // What is worth waiting for has been awaited; a model that is still being read is not.
    runtime.shutdown_background();
    result
}

/// 2 where an option is at fault, as for those that cannot be parsed; 1 for all else.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    let is_option = |cause: &(dyn std::error::Error + 'static)| {
        cause.is::<BadOption>()
            || cause.is::<TrustError>()
            || matches!(
                cause.downcast_ref(),
                Some(RouterStartError::Config { .. } | RouterStartError::NoKey | RouterStartError::Trust(_))
            )
            || matches!(
                cause.downcast_ref(),
                Some(StartError::Config { .. } | StartError::Engine(EngineError::Config { .. }))
            )
            || matches!(cause.downcast_ref(), Some(LoadError::Plan { .. }))
    };
    if error.chain().any(is_option) { ExitCode::from(2) } else { ExitCode::FAILURE }
}

/// The error and its causes in one line, without what has been said already.
fn explain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        so_far if so_far.contains(&cause) => said,
        so_far => format!("{so_far}: {cause}"),
    })
}
