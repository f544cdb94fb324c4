//! Workers of `thalweg up` in processes of their own: on GPUs, whose errors end a process. Each runs this binary with this process's
//! own arguments, and ends when the pipe to its stdin does, however this process ends.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use thalweg_cache_index::MemoryIndex;
use thalweg_proto::ids::WorkerId;
use thalweg_serve::trust::TrustConfig;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::worker::{Worker, WorkerAddress};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::shutdown::Signals;
use crate::worker::load;

/// What a worker's process is told beside its own arguments.
pub(crate) const AS_WORKER: &str = "--as-worker";

/// Waits before a worker that crashed is started again; doubled each time.
const BACKOFF: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];
/// A worker that served so long has recovered: the next wait is the shortest again.
const RECOVERED: Duration = Duration::from_secs(120);
/// Beyond its own drain timeout, for what a process does at its end.
const EXIT_GRACE: Duration = Duration::from_secs(10);

/// What became of a worker.
#[derive(Debug)]
pub(crate) enum Change {
    /// It serves a model at an address.
    Up(usize, SocketAddr, String),
    /// It has ended, and will be started again.
    Down(usize),
    /// It could not even start.
    Failed(usize, ExitStatus),
}

/// Processes that are watched over and started again.
pub(crate) struct WorkerProcesses {
    changes: mpsc::Receiver<Change>,
    supervisors: Vec<(Arc<Lifeline>, std::thread::JoinHandle<()>)>,
}

/// The pipe that a process lives by. None once it shall end, or where there is no process.
#[derive(Default)]
struct Lifeline {
    held: Mutex<(Option<ChildStdin>, bool)>,
    was_cut: Condvar,
}

impl WorkerProcesses {
    /// Starts `count` of them, spread over the GPUs where there are any.
    pub(crate) fn start(count: usize, gpus: usize) -> anyhow::Result<Self> {
        let devices = devices(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref(), gpus);
        // Every worker tells a few changes over its life; a full queue makes its supervisor wait.
        let (tell, changes) = mpsc::channel(count.max(1) * 2);
        let mut supervisors = Vec::new();
        for number in 0..count {
            let (lifeline, tell) = (Arc::new(Lifeline::default()), tell.clone());
            let device = devices.get(number % devices.len().max(1)).cloned();
            let supervised = lifeline.clone();
            let thread = std::thread::Builder::new()
                .name(format!("worker-{number}"))
                .spawn(move || supervise(number, device.as_deref(), &supervised, &tell))?;
            supervisors.push((lifeline, thread));
        }
        Ok(Self { changes, supervisors })
    }

    /// The next change; None when no worker is left.
    pub(crate) async fn next(&mut self) -> Option<Change> {
        self.changes.recv().await
    }

    /// Lets all finish what they run, and waits for them.
    pub(crate) async fn shutdown(mut self, timeout: Duration) {
        self.supervisors.iter().for_each(|(lifeline, _)| lifeline.cut());
        // Supervisors may be telling something; nobody needs it any more.
        self.changes.close();
        let supervisors = std::mem::take(&mut self.supervisors);
        // A supervisor that panicked has no process left to wait for.
        let ended = tokio::task::spawn_blocking(move || {
            supervisors.into_iter().for_each(|(_, thread)| drop(thread.join()));
        });
        if tokio::time::timeout(timeout + EXIT_GRACE, ended).await.is_err() {
            tracing::warn!("workers have not ended in time, they are left behind without their lifeline");
        }
    }
}

impl Lifeline {
    fn cut(&self) {
        *self.held() = (None, true);
        self.was_cut.notify_all();
    }

    fn is_cut(&self) -> bool {
        self.held().1
    }

    /// Waits, unless it is cut before.
    fn pause(&self, time: Duration) {
        let waited = self.was_cut.wait_timeout_while(self.held(), time, |held| !held.1);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn held(&self) -> MutexGuard<'_, (Option<ChildStdin>, bool)> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over a new process's pipe; false where it shall not live.
    fn hold(&self, pipe: Option<ChildStdin>) -> bool {
        let mut held = self.held();
        if !held.1 {
            held.0 = pipe;
        }
        !held.1
    }
}

/// Numbers or names of the GPUs that this process may use.
fn devices(visible: Option<&str>, gpus: usize) -> Vec<String> {
    match visible.filter(|_| gpus > 0) {
        Some(list) => list.split(',').map(str::trim).filter(|d| !d.is_empty()).map(str::to_owned).collect(),
        None => (0..gpus).map(|device| device.to_string()).collect(),
    }
}

fn supervise(number: usize, device: Option<&str>, lifeline: &Lifeline, tell: &mpsc::Sender<Change>) {
    let (mut wait, mut has_served) = (BACKOFF[0], false);
    while !lifeline.is_cut() {
        let begin = Instant::now();
        let status = match one_life(number, device, lifeline, tell, &mut has_served) {
            Ok(status) => status,
            Err(error) => {
                tracing::error!(worker = number, error = format!("{error:#}"), "cannot start a worker");
                return;
            }
        };
        if lifeline.is_cut() {
            return;
        }
        let change = if has_served { Change::Down(number) } else { Change::Failed(number, status) };
        let is_over = matches!(change, Change::Failed(..));
        if tell.blocking_send(change).is_err() || is_over {
            return;
        }
        if begin.elapsed() > RECOVERED {
            wait = BACKOFF[0];
        }
        tracing::warn!(worker = number, %status, restart_seconds = wait.as_secs(), "a worker has ended");
        lifeline.pause(wait);
        wait = (wait * 2).min(BACKOFF[1]);
    }
}

/// A process from its start to its end.
fn one_life(
    number: usize,
    device: Option<&str>,
    lifeline: &Lifeline,
    tell: &mpsc::Sender<Change>,
    has_served: &mut bool,
) -> anyhow::Result<ExitStatus> {
    let mut child = spawn(number, device)?;
    let stdout = child.stdout.take();
    if lifeline.hold(child.stdin.take()) {
        let mut line = String::new();
        let read = stdout.map(|stdout| BufReader::new(stdout).read_line(&mut line));
        read.transpose().context("reading a worker's address")?;
        if let Some((address, model)) = line.trim_end().split_once(' ')
            && let Ok(address) = address.parse()
        {
            *has_served = true;
            // Where nobody listens any more, the lifeline is about to be cut.
            let _ = tell.blocking_send(Change::Up(number, address, model.to_owned()));
        }
    }
    Ok(child.wait()?)
}

fn spawn(number: usize, device: Option<&str>) -> anyhow::Result<Child> {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut command = Command::new(std::env::current_exe().context("finding this binary")?);
    command.args(arguments).arg(AS_WORKER).arg(number.to_string());
    // Clients' keys are the router's business.
    command.env_remove(thalweg_router::config::API_KEY_VARIABLE);
    if let Some(device) = device {
        command.env("CUDA_VISIBLE_DEVICES", device);
    }
    // Signals of the terminal are for this process, which drains its workers in order.
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
    command.spawn().context("starting a worker")
}

/// The other end: one worker, told to its parent by a line on stdout, until stdin ends or the engine fails.
pub(crate) async fn serve(
    number: usize,
    config: &WorkerConfig,
    drain_timeout: Duration,
) -> anyhow::Result<()> {
    let mut signals = Signals::listen()?;
    let orphaned = stdin_ended();
    let free = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let id = WorkerId::new(format!("worker-{number}"));
    let address = WorkerAddress { id, grpc: free, metrics: free, trust: TrustConfig::default() };
    let start = async {
        let model = load(config, 1).await?;
        let worker = Worker::start(address, &model, Arc::new(MemoryIndex::new())).await?;
        anyhow::Ok((worker, model.names()[0].clone()))
    };
    tokio::pin!(orphaned);
    let (worker, model) = tokio::select! {
        started = start => started?,
        _ = &mut orphaned => return Ok(()),
        _ = signals.next() => return Ok(()),
    };
    announce(worker.grpc_address(), &model)?;
    let engine = worker.engine().clone();
    let failure = tokio::select! {
        reason = engine.ended() => Some(reason),
        _ = &mut orphaned => None,
        _ = signals.next() => None,
    };
    signals.during(worker.shutdown(drain_timeout), || engine.stop()).await;
    ensure!(failure.is_none(), "the engine failed: {}", failure.unwrap_or_default());
    Ok(())
}

fn announce(address: SocketAddr, model: &str) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{address} {model}").and_then(|()| stdout.flush()).context("telling the address")
}

/// Ends when stdin does.
async fn stdin_ended() {
    let (tell, ended) = oneshot::channel();
    let watch = move || {
        // Nothing is ever written to it; an error is an end too.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = tell.send(());
    };
    if std::thread::Builder::new().name("lifeline".into()).spawn(watch).is_ok() {
        let _ = ended.await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices() {
        let check = |visible: Option<&str>, gpus: usize, expected: &[&str]| {
            assert_eq!(devices(visible, gpus), expected, "{visible:?}");
        };
        check(None, 2, &["0", "1"]);
        check(Some("3, 1"), 2, &["3", "1"]);
        check(Some("GPU-8f2a"), 1, &["GPU-8f2a"]);
        check(Some(""), 0, &[]);
        check(Some("3"), 0, &[]);
    }
}
