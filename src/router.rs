//! `thalweg router`: HTTP in front, workers behind.

use std::sync::Arc;

use anyhow::ensure;
use thalweg_membership::{GrpcAddress, StaticMembership};
use thalweg_router::config::RouterConfig;
use thalweg_router::router::Router;

use crate::options::{IndexOptions, MembershipOptions};
use crate::shutdown::Signals;

/// Flags of `thalweg router`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    router: RouterConfig,

    /// Address of a worker, such as grpc://10.0.0.7:50061; repeat for each
    #[arg(long, env = "THALWEG_WORKER", value_name = "ADDRESS", value_delimiter = ',')]
    worker: Vec<GrpcAddress>,

    #[command(flatten)]
    index: IndexOptions,

    #[command(flatten)]
    _membership: MembershipOptions,
}

/// Serves until a signal.
pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    ensure!(
        !options.worker.is_empty(),
        "--worker: at least one is needed, such as --worker grpc://127.0.0.1:50061"
    );
    let mut signals = Signals::listen()?;
    let membership = Arc::new(StaticMembership::new(options.worker));
    let router = Router::start(options.router, membership, options.index.open()).await?;
    tracing::info!(http = %router.http_address(), "router listens");
    let name = signals.next().await;
    tracing::info!(signal = name, "shutting down");
    signals.during(router.shutdown()).await;
    Ok(())
}
