//! `thalweg bench`: measures a server from outside, or the engine alone.

use crate::{bench_engine, bench_serve};

/// Flags of `thalweg bench`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Load on an OpenAI-compatible server: latency percentiles, throughput, share per worker
    Serve(bench_serve::ServeArgs),
    /// Speed of one engine on this machine, with nothing around it
    Engine(bench_engine::Options),
}

pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    match options.what {
        What::Serve(args) => bench_serve::run(args).await,
        What::Engine(options) => bench_engine::run(options).await,
    }
}
