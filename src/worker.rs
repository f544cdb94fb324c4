//! `thalweg worker`: one worker, reached over gRPC.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use thalweg_proto::ids::WorkerId;
use thalweg_worker::config::{WorkerConfig, WorkerPlace};
use thalweg_worker::worker::{SharedModel, Worker, WorkerAddress};

use crate::hub;
use crate::options::{IndexOptions, MembershipOptions};
use crate::shutdown::Signals;

/// Flags of `thalweg worker`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    worker: WorkerConfig,

    #[command(flatten)]
    place: WorkerPlace,

    #[command(flatten)]
    index: IndexOptions,

    #[command(flatten)]
    _membership: MembershipOptions,
}

/// Serves until a signal or until the engine fails.
pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let address = address(&options.place)?;
    let config = options.worker;
    let start = async {
        let model = load(&config, 1).await?;
        anyhow::Ok(Worker::start(address, &model, options.index.open()).await?)
    };
    let worker = tokio::select! {
        worker = start => worker?,
        name = signals.next() => {
            tracing::info!(signal = name, "stopped while loading");
            return Ok(());
        }
    };
    let engine = worker.engine().clone();
    let failure = tokio::select! {
        reason = engine.ended() => Some(reason),
        name = signals.next() => {
            tracing::info!(signal = name, "shutting down");
            None
        }
    };
    signals.during(worker.shutdown(Duration::from_secs(options.place.drain_timeout))).await;
    ensure!(failure.is_none(), "the engine failed: {}", failure.unwrap_or_default());
    Ok(())
}

/// Finds, checks and loads the model of `workers` workers, off the reactor.
pub(crate) async fn load(config: &WorkerConfig, workers: usize) -> anyhow::Result<Arc<SharedModel>> {
    let path = hub::resolve(&config.model).await?;
    let config = config.clone();
    let loading = tokio::task::spawn_blocking(move || SharedModel::load(&path, &config, workers));
    Ok(loading.await.context("loading the model panicked")??)
}

fn address(place: &WorkerPlace) -> anyhow::Result<WorkerAddress> {
    ensure!(
        place.grpc.ip().is_loopback() || place.insecure,
        "--grpc {}: other hosts reach this address, and this build neither encrypts nor authenticates gRPC; pass \
         --insecure if the network keeps strangers out, or bind to 127.0.0.1",
        place.grpc
    );
    let id = place.worker_id.clone().unwrap_or_else(|| default_id(place.grpc.port()));
    ensure!(!id.is_empty(), "--worker-id: must not be empty");
    Ok(WorkerAddress { id: WorkerId::new(id), grpc: place.grpc, metrics: place.metrics })
}

/// A worker that lets the system choose its port cannot keep a name across restarts; its process tells it from others.
fn default_id(port: u16) -> String {
    match port {
        0 => format!("{}-pid-{}", host_name(), std::process::id()),
        port => format!("{}-{port}", host_name()),
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "worker".to_owned(),
        name => name.to_owned(),
    }
}
