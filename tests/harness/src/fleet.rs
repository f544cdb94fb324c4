//! Routers and workers as processes of their own, each of which can be killed, frozen, misled and restarted by itself.

mod plan;

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::time::Instant;

pub use plan::FleetPlan;

use crate::client::Running;
use crate::http::HttpClient;
use crate::metrics::Scrape;
use crate::node::Node;
use crate::process::Process;

/// Whatever is waited for comes about sooner, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);
/// Log events shown of each process when a test fails.
const EVENTS_SHOWN: usize = 60;

/// A fleet that runs. Dropping it kills it; the logs are shown when a test fails.
pub struct Fleet {
    plan: FleetPlan,
    /// By number; the name of worker 2 is `w2`.
    pub workers: Vec<Node>,
    /// By number; the name of router 1 is `r1`.
    pub routers: Vec<Node>,
    dir: TempDir,
    /// Ended processes, for their logs.
    buried: Vec<(String, Process)>,
    _turn: File,
}

/// Asks again and again until it is so.
pub async fn eventually(what: &str, holds: impl AsyncFn() -> bool) {
    within(PATIENCE, what, holds).await;
}

/// Asks again and again until it is so, which must be within `patience`; how long it took.
pub async fn within(patience: Duration, what: &str, holds: impl AsyncFn() -> bool) -> Duration {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < patience, "{what} did not come about within {patience:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

impl FleetPlan {
    /// Starts everything and waits until each router has every worker.
    pub async fn start(self) -> Fleet {
        let turn = take_turn(self.alone);
        let dir = tempfile::tempdir().expect("a temporary folder");
        let workers = (0..self.workers).map(|number| Node::new(format!("w{number}"), self.proxies)).collect();
        let routers = (0..self.routers).map(|number| Node::new(format!("r{number}"), false)).collect();
        let mut fleet = Fleet { plan: self, workers, routers, dir, buried: Vec::new(), _turn: turn };
        for number in 0..fleet.workers.len() {
            fleet.write_profile(number, "");
            fleet.launch_worker(number);
        }
        for number in 0..fleet.workers.len() {
            fleet.wait_for_worker(number);
        }
        for number in 0..fleet.routers.len() {
            fleet.launch_router(number);
        }
        for number in 0..fleet.routers.len() {
            fleet.wait_for_router(number);
        }
        fleet.all_ready().await;
        fleet
    }
}

impl Fleet {
    /// The API of the only router, or of the first one.
    pub fn http(&self) -> &HttpClient {
        &self.routers[0].http
    }

    /// Sends a completion to the first router.
    pub fn ask(&self, body: serde_json::Value) -> Running {
        Running::start(self.http(), "/v1/completions", body)
    }

    /// Name of the model.
    pub fn model(&self) -> String {
        self.plan.model.file_stem().expect("a name").to_string_lossy().into_owned()
    }

    /// What router `number` counts.
    pub async fn router_metrics(&self, number: usize) -> Scrape {
        Scrape::parse(&self.routers[number].http.get("/metrics").await.text)
    }

    /// What worker `number` counts.
    pub async fn worker_metrics(&self, number: usize) -> Scrape {
        Scrape::parse(&self.workers[number].http.get("/metrics").await.text)
    }

    /// In which state a router sees a worker; empty if it knows none of that name.
    pub async fn worker_state(&self, router: usize, worker: usize) -> String {
        let scrape = self.router_metrics(router).await;
        let name = &self.workers[worker].name;
        let is = |state: &&str| {
            let labels = format!("worker=\"{name}\",state=\"{state}\"");
            scrape.count("thalweg_router_worker_state", &labels) == 1.0
        };
        ["ready", "suspect", "draining", "gone"].into_iter().find(is).unwrap_or_default().to_owned()
    }

    /// Waits until every router that runs has so many workers ready, and no more.
    pub async fn ready(&self, workers: usize) {
        for number in (0..self.routers.len()).filter(|number| self.routers[*number].process.is_some()) {
            let what = format!("{workers} workers ready at {}", self.routers[number].name);
            let count = async || {
                let scrape = self.router_metrics(number).await;
                scrape.count("thalweg_router_worker_state", "state=\"ready\"") == workers as f64
            };
            eventually(&what, count).await;
        }
    }

    /// Waits until every router that runs has every worker that runs.
    pub async fn all_ready(&self) {
        self.ready(self.workers.iter().filter(|worker| worker.process.is_some()).count()).await;
    }

    /// Waits until nothing runs or waits anywhere.
    pub async fn at_rest(&self) {
        let is_at_rest = async || {
            let mut busy = 0.0;
            for number in (0..self.routers.len()).filter(|number| self.routers[*number].process.is_some()) {
                let scrape = self.router_metrics(number).await;
                let names = ["streams", "queue_depth", "worker_bookings"];
                busy += names.iter().map(|name| scrape.value(&format!("thalweg_router_{name}"))).sum::<f64>();
            }
            for number in (0..self.workers.len()).filter(|number| self.workers[*number].process.is_some()) {
                let scrape = self.worker_metrics(number).await;
                busy += scrape.value("vllm:num_requests_running") + scrape.value("vllm:num_requests_waiting");
            }
            busy == 0.0
        };
        eventually("a fleet at rest", is_at_rest).await;
    }

    /// Gives a simulated worker other faults than it has (YAML of the part `faults`), and waits until it obeys.
    pub fn switch_faults(&mut self, worker: usize, faults: &str) {
        self.write_profile(worker, faults);
        self.workers[worker].process().logged("faults switched");
    }

    /// Ends a worker like a crash.
    pub fn kill_worker(&mut self, number: usize) {
        self.workers[number].process().end_at_once();
        self.bury_worker(number);
    }

    /// Ends a router like a crash.
    pub fn kill_router(&mut self, number: usize) {
        let node = &mut self.routers[number];
        node.process().end_at_once();
        self.buried.push((node.name.clone(), node.process.take().expect("it ran")));
    }

    /// Waits for a worker that was told to end, or that ends by itself; its exit code, None of a signal.
    pub async fn worker_ended(&mut self, number: usize, patience: Duration) -> Option<i32> {
        let code = self.workers[number].process().ended(patience).await;
        self.bury_worker(number);
        code
    }

    /// Waits for a router that was told to end; its exit code, None of a signal.
    pub async fn router_ended(&mut self, number: usize, patience: Duration) -> Option<i32> {
        let node = &mut self.routers[number];
        let code = node.process().ended(patience).await;
        self.buried.push((node.name.clone(), node.process.take().expect("it ran")));
        code
    }

    /// Whether a worker's process has not ended.
    pub fn worker_runs(&mut self, number: usize) -> bool {
        self.workers[number].process.as_mut().is_some_and(Process::runs)
    }

    /// Starts an ended worker again without faults: same name, same port. Returns once it serves.
    pub fn restart_worker(&mut self, number: usize) {
        self.write_profile(number, "");
        self.launch_worker(number);
        self.wait_for_worker(number);
    }

    /// The same on another port.
    pub fn restart_worker_elsewhere(&mut self, number: usize) {
        let node = &mut self.workers[number];
        *node = Node::new(node.name.clone(), node.proxy.is_some());
        self.restart_worker(number);
    }

    /// Starts an ended router again on the same port. Returns once it listens.
    pub fn restart_router(&mut self, number: usize) {
        self.launch_router(number);
        self.wait_for_router(number);
    }

    /// Adds a worker and returns its number once it serves; static routers that run do not learn of it.
    pub fn add_worker(&mut self) -> usize {
        let number = self.workers.len();
        self.workers.push(Node::new(format!("w{number}"), self.plan.proxies));
        self.restart_worker(number);
        number
    }

    /// Ends everything in order, the routers first; every process must exit with 0 and must not have logged an error.
    pub async fn finish(mut self) {
        let mut running: Vec<_> = std::mem::take(&mut self.routers);
        running.append(&mut self.workers);
        for mut node in running {
            let Some(mut process) = node.process.take() else { continue };
            process.signal("TERM");
            let code = process.ended(PATIENCE).await;
            self.buried.push((node.name.clone(), process));
            assert_eq!(code, Some(0), "exit code of {}", node.name);
            let (_, process) = self.buried.last_mut().expect("just buried");
            let errors: Vec<_> = process.log().iter().filter(|event| event["level"] == "ERROR").collect();
            assert!(errors.is_empty(), "{} logged errors: {errors:?}", node.name);
        }
    }

    fn bury_worker(&mut self, number: usize) {
        let node = &mut self.workers[number];
        self.buried.push((node.name.clone(), node.process.take().expect("it ran")));
    }

    /// What a simulated worker reads at its start.
    fn write_profile(&self, worker: usize, faults: &str) {
        let Some(profile) = &self.plan.profile else { return };
        let file = self.profile(worker);
        let new = file.with_extension("new");
        let faults = if faults.is_empty() { String::new() } else { format!("\nfaults: {faults}\n") };
        std::fs::write(&new, format!("{profile}{faults}")).expect("the folder can be written to");
        std::fs::rename(new, file).expect("the folder can be written to");
    }

    fn profile(&self, worker: usize) -> PathBuf {
        self.dir.path().join(format!("w{worker}.yaml"))
    }

    fn launch_worker(&mut self, number: usize) {
        let profile = self.profile(number);
        let node = &mut self.workers[number];
        let call = self.plan.worker_call(number, node, &profile);
        node.process = Some(Process::start(self.plan.binary, &call));
    }

    fn wait_for_worker(&mut self, number: usize) {
        self.workers[number].process().logged("worker serves");
    }

    fn launch_router(&mut self, number: usize) {
        let call = self.plan.router_call(&self.routers[number], &self.workers);
        self.routers[number].process = Some(Process::start(self.plan.binary, &call));
    }

    fn wait_for_router(&mut self, number: usize) {
        self.routers[number].process().logged("router listens");
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        let running = self.routers.iter_mut().chain(&mut self.workers);
        let running = running.filter_map(|node| Some((&node.name, node.process.as_mut()?)));
        let buried = self.buried.iter_mut().map(|(name, process)| (&*name, process));
        for (name, process) in buried.chain(running) {
            let log = process.log();
            eprintln!("--- log of {name}, {} events", log.len());
            log.iter().skip(log.len().saturating_sub(EVENTS_SHOWN)).for_each(|event| eprintln!("{event}"));
        }
    }
}

/// Tests that measure run alone, others beside each other; they may be threads or processes.
fn take_turn(alone: bool) -> File {
    let path = std::env::temp_dir().join("thalweg-tests-of-fleets.lock");
    let file =
        File::options().create(true).append(true).open(path).expect("the temporary folder can be written to");
    let locked = if alone { file.lock() } else { file.lock_shared() };
    locked.expect("files can be locked");
    file
}
