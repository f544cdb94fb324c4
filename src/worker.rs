//! `thalweg worker`: one worker, reached over gRPC.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use thalweg_membership::{GrpcAddress, ParseAddressError, Record, Registration};
use thalweg_proto::ids::WorkerId;
use thalweg_serve::trust::TrustConfig;
use thalweg_worker::config::{WorkerConfig, WorkerPlace};
use thalweg_worker::worker::{RunningWorker, SharedModel, Worker, WorkerAddress};

use crate::hub;
use crate::options::{BadOption, IndexOptions, MembershipOptions, TrustOptions};
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
    membership: MembershipOptions,

    #[command(flatten)]
    trust: TrustOptions,

    /// Where routers reach this worker, as it is told to etcd alone. Default: the --grpc address
    #[arg(long, env = "THALWEG_ADVERTISE", value_name = "HOST:PORT", value_parser = advertised)]
    advertise: Option<GrpcAddress>,
}

/// Serves until a signal or until the engine fails.
pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let address = address(&options.place, options.trust.config()?)?;
    let etcd = options.membership.open()?;
    if etcd.is_some() && options.advertise.is_none() && address.grpc.ip().is_unspecified() {
        return Err(BadOption::because(format!(
            "--grpc {}: routers cannot reach a worker at this address; pass --advertise HOST:PORT with the one that \
             leads here",
            address.grpc
        )));
    }
    // Before the model, so that wrong flags and addresses in use are told at once.
    let index = options.index.open()?;
    let bound = Worker::bind(address)?;
    let config = options.worker;
    let start = async {
        let model = load(&config, 1).await?;
        let worker = bound.start(&model, index).await?;
        anyhow::Ok((worker, model.names().to_vec()))
    };
    let (worker, models) = tokio::select! {
        started = start => started?,
        name = signals.next() => {
            tracing::info!(signal = name, "stopped while loading");
            return Ok(());
        }
    };
    if let Some(etcd) = etcd.clone() {
        worker.add_metrics(move |text| etcd.stats().add_to(text));
    }
    // It can serve: from here on routers may know of it.
    let registration = etcd.map(|etcd| etcd.register_worker(record(&worker, options.advertise, models)));
    let engine = worker.engine().clone();
    let failure = tokio::select! {
        reason = engine.ended() => Some(reason),
        name = signals.next() => {
            tracing::info!(signal = name, "shutting down");
            None
        }
    };
    let timeout = options.place.drain_timeout;
    signals.during(leave(worker, registration, failure.is_some(), timeout), || engine.stop()).await;
    ensure!(failure.is_none(), "the engine failed: {}", failure.unwrap_or_default());
    Ok(())
}

/// Tells the routers, finishes what runs, and strikes itself from the list.
async fn leave(
    worker: RunningWorker,
    registration: Option<Registration>,
    has_failed: bool,
    timeout: Duration,
) {
    match &registration {
        Some(registration) if has_failed => registration.deregister().await,
        Some(registration) => registration.set_draining().await,
        None => {}
    }
    worker.shutdown(timeout).await;
    if let Some(registration) = registration {
        registration.deregister().await;
    }
}

fn record(worker: &RunningWorker, advertise: Option<GrpcAddress>, models: Vec<String>) -> Record {
    Record {
        id: worker.id().to_string(),
        address: advertise.unwrap_or_else(|| worker.grpc_address().into()).to_string(),
        draining: false,
        models,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

fn advertised(text: &str) -> Result<GrpcAddress, String> {
    let address = format!("grpc://{}", text.strip_prefix("grpc://").unwrap_or(text)).parse();
    let address: GrpcAddress = address.map_err(|error: ParseAddressError| error.to_string())?;
    match address.host().parse::<IpAddr>() {
        Ok(ip) if ip.is_unspecified() => {
            Err("routers cannot reach a worker there; give an address of this host".into())
        }
        _ => Ok(address),
    }
}

/// Finds, checks and loads the model of `workers` workers, off the reactor.
pub(crate) async fn load(config: &WorkerConfig, workers: usize) -> anyhow::Result<Arc<SharedModel>> {
    let path = hub::resolve(&config.model).await?;
    let config = config.clone();
    let loading = tokio::task::spawn_blocking(move || SharedModel::load(&path, &config, workers));
    Ok(loading.await.context("loading the model panicked")??)
}

fn address(place: &WorkerPlace, trust: TrustConfig) -> anyhow::Result<WorkerAddress> {
    if !(place.grpc.ip().is_loopback() || trust.is_set() || place.insecure) {
        return Err(BadOption::because(format!(
            "--grpc {}: other hosts reach this address: pass --tls-cert-file, --tls-key-file and --tls-ca-file, or \
             --cluster-token-file, so that strangers are refused; --insecure if the network keeps them out; or bind to \
             127.0.0.1",
            place.grpc
        )));
    }
    let id = place.worker_id.clone().unwrap_or_else(|| default_id(place.grpc.port()));
    Ok(WorkerAddress { id: WorkerId::new(id), grpc: place.grpc, metrics: place.metrics, trust })
}

/// A worker that lets the system choose its port cannot keep a name across restarts; its process tells it from others.
fn default_id(port: u16) -> String {
    match port {
        0 => format!("{}-pid-{}", host_name(), std::process::id()),
        port => format!("{}-{port}", host_name()),
    }
}

/// What this machine, or its container, calls itself.
pub(crate) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "worker".to_owned(),
        name => name.to_owned(),
    }
}
