//! `thalweg up`: a router and its workers for one machine: on its cores within this process, on its GPUs in processes
//! of their own.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use futures::future::{join_all, select_all};
use thalweg_cache_index::{CacheIndex, MemoryIndex};
use thalweg_membership::StaticMembership;
use thalweg_proto::ids::WorkerId;
use thalweg_proto::value;
use thalweg_router::config::RouterConfig;
use thalweg_router::router::{Router, RunningRouter};
use thalweg_serve::trust::TrustConfig;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::worker::{RunningWorker, Worker, WorkerAddress, gpus};

use crate::hub;
use crate::shutdown::Signals;
use crate::up_processes::{self, Change, WorkerProcesses};
use crate::worker::load;

/// Workers on the CPU: two, so that what the router does can be seen.
const WORKERS_DEFAULT: u16 = 2;

/// Flags of `thalweg up`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Workers. On the CPU they share the weights and divide --threads, and there are 2 by default; by default there is one for
    /// each GPU
    #[arg(long, env = "THALWEG_WORKERS", value_name = "N")]
    #[arg(value_parser = value::whole(1..=256u16))]
    workers: Option<u16>,

    /// Give each worker a process of its own, as workers on GPUs always have: one that crashes is started again
    #[arg(long, env = "THALWEG_WORKER_PROCESSES")]
    worker_processes: bool,

    /// Be one worker of the process that started this one
    #[arg(long, hide = true, value_name = "NUMBER")]
    as_worker: Option<usize>,

    #[command(flatten)]
    router: RouterConfig,

    #[command(flatten)]
    worker: WorkerConfig,
}

/// Serves until a signal or until an engine fails.
pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    let drain_timeout = options.router.timeouts.drain_timeout;
    if let Some(number) = options.as_worker {
        return up_processes::serve(number, &options.worker, drain_timeout).await;
    }
    let config = options.worker.clone();
    tokio::task::spawn_blocking(move || hub::check(&config)).await??;
    let config = options.worker.clone();
    match tokio::task::spawn_blocking(move || gpus(&config)).await?? {
        0 if !options.worker_processes => in_process(options, drain_timeout).await,
        gpus => in_processes(options, gpus, drain_timeout).await,
    }
}

/// A router here, a process for each worker.
async fn in_processes(options: Options, gpus: usize, drain_timeout: Duration) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let membership = Arc::new(StaticMembership::new([]));
    let index: Arc<dyn CacheIndex> = Arc::new(MemoryIndex::new());
    let router = RouterConfig { starts_workers: true, ..options.router };
    let router = Router::start(router, Arc::clone(&membership) as _, index).await?;
    let default = if gpus > 0 { gpus } else { WORKERS_DEFAULT.into() };
    let count = options.workers.map_or(default, usize::from);
    let mut workers = WorkerProcesses::start(count, gpus)?;
    let failure = tokio::select! {
        reason = watch(&mut workers, count, &membership, &router) => Some(reason),
        name = signals.next() => {
            tracing::info!(signal = name, "shutting down");
            None
        }
    };
    let cut_short = router.cut_short();
    let shutdown = async {
        router.shutdown().await;
        workers.shutdown(drain_timeout).await;
    };
    signals.during(shutdown, || cut_short.cancel()).await;
    ensure!(failure.is_none(), "{}", failure.unwrap_or_default());
    Ok(())
}

/// Keeps the membership true; returns why it makes no sense to go on.
async fn watch(
    workers: &mut WorkerProcesses,
    count: usize,
    membership: &StaticMembership,
    router: &RunningRouter,
) -> String {
    let mut places = vec![None; count];
    let (mut served, mut is_announced) = (String::new(), false);
    loop {
        let change = tokio::select! {
            change = workers.next() => change,
            () = router.ready(count), if !is_announced => {
                print_ready(router, &served);
                is_announced = true;
                continue;
            }
        };
        let Some(change) = change else { return "no worker is left".to_owned() };
        match change {
            Change::Up(number, address, model) => {
                places[number] = Some(address);
                membership.set(places.iter().flatten().map(|address| (*address).into()));
                served = model;
            }
            Change::Down(number) => {
                places[number] = None;
                membership.set(places.iter().flatten().map(|address| (*address).into()));
            }
            Change::Failed(number, status) => return format!("worker {number} did not start: {status}"),
        }
    }
}

/// Router and workers in this process.
async fn in_process(options: Options, drain_timeout: Duration) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let index: Arc<dyn CacheIndex> = Arc::new(MemoryIndex::new());
    let membership = Arc::new(StaticMembership::new([]));
    // Before the weights are read, so that an address in use is told at once.
    let router = RouterConfig { starts_workers: true, ..options.router };
    let router = Router::start(router, Arc::clone(&membership) as _, Arc::clone(&index)).await?;
    let (workers, model) = tokio::select! {
        started = start_workers(&options.worker, options.workers.unwrap_or(WORKERS_DEFAULT), &index) => started?,
        name = signals.next() => {
            tracing::info!(signal = name, "stopped while loading");
            return Ok(());
        }
    };
    membership.set(workers.iter().map(|w| w.grpc_address().into()));
    let failure = tokio::select! {
        reason = serve(&router, &workers, &model) => Some(reason),
        name = signals.next() => {
            tracing::info!(signal = name, "shutting down");
            None
        }
    };
    let cut_short = router.cut_short();
    let engines: Vec<_> = workers.iter().map(|worker| worker.engine().clone()).collect();
    let at_once = || {
        cut_short.cancel();
        engines.iter().for_each(|engine| engine.stop());
    };
    signals.during(shutdown(router, workers, drain_timeout), at_once).await;
    ensure!(failure.is_none(), "an engine failed: {}", failure.unwrap_or_default());
    Ok(())
}

/// Workers over one copy of the weights, and the model's name.
async fn start_workers(
    config: &WorkerConfig,
    count: u16,
    index: &Arc<dyn CacheIndex>,
) -> anyhow::Result<(Vec<RunningWorker>, String)> {
    let model = load(config, count.into()).await?;
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let mut workers = Vec::new();
    for number in 0..count {
        let id = WorkerId::new(format!("worker-{number}"));
        let address = WorkerAddress { id, grpc: free, metrics: free, trust: TrustConfig::default() };
        workers.push(Worker::start(address, &model, Arc::clone(index)).await?);
    }
    Ok((workers, model.names()[0].clone()))
}

/// Says when the first request may come, then watches; returns why an engine ended.
async fn serve(router: &RunningRouter, workers: &[RunningWorker], model: &str) -> Arc<str> {
    let announce = async {
        router.ready(workers.len()).await;
        print_ready(router, model);
    };
    let failure = select_all(workers.iter().map(|w| Box::pin(w.engine().ended())));
    tokio::pin!(failure);
    tokio::select! {
        (reason, ..) = &mut failure => return reason,
        () = announce => {}
    }
    failure.await.0
}

/// The router first, so that what it has accepted finds its workers to the end.
async fn shutdown(router: RunningRouter, workers: Vec<RunningWorker>, timeout: Duration) {
    router.shutdown().await;
    join_all(workers.into_iter().map(|worker| worker.shutdown(timeout))).await;
}

fn print_ready(router: &RunningRouter, model: &str) {
    let address = router.http_address();
    let host = match address.ip() {
        ip if ip.is_unspecified() => "localhost".to_owned(),
        std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    let url = format!("http://{host}:{}", address.port());
    let body =
        serde_json::json!({ "model": model, "messages": [{ "role": "user", "content": "Say hello." }] });
    let body = body.to_string().replace('\'', r"'\''");
    // Keys themselves are never shown.
    let (hint, key) = match router.state().needs_key() {
        true => ("with an API key in $KEY:\n\n", "-H \"Authorization: Bearer $KEY\" "),
        false => ("", ""),
    };
    let text = format!(
        "ready: {model} at {url}/v1\n\n{hint}  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d \
         '{body}'\n\n"
    );
    // Whoever reads records from a pipe is to find nothing else in it.
    let (name, shown) = match router.state().config.surface.usage_log_is_stdout() {
        true => ("stderr", show(std::io::stderr(), &text)),
        false => ("stdout", show(std::io::stdout(), &text)),
    };
    if let Err(error) = shown {
        tracing::warn!(%error, "{name} is closed");
    }
}

fn show(mut out: impl Write, text: &str) -> std::io::Result<()> {
    out.write_all(text.as_bytes())?;
    out.flush()
}
