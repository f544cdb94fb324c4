//! Whole clusters: `thalweg up`, or a router and workers as processes of their own.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tempfile::NamedTempFile;

use crate::http::HttpClient;
use crate::metrics::Scrape;
use crate::process::Process;

const PATIENCE: Duration = Duration::from_secs(60);
/// A step that takes 10 s is taken for a hung engine, and one of 256 tokens may take them where other tests use the cores.
const SHORT_STEPS: [&str; 2] = ["--max-num-batched-tokens", "64"];

/// A running cluster.
pub struct Cluster {
    /// Its HTTP API.
    pub http: HttpClient,
    /// The name of the model that it serves.
    pub model: String,
    /// Metrics of each worker.
    pub worker_metrics: Vec<HttpClient>,
    processes: Vec<Process>,
    /// Read again and again by workers that simulate it.
    profile: Option<NamedTempFile>,
}

impl Cluster {
    /// `thalweg up` with so many workers, ready to serve.
    pub fn up(binary: &str, model: &Path, workers: usize, args: &[&str]) -> Self {
        let count = workers.to_string();
        let model = model.to_str().expect("a path in UTF-8");
        let mut all = vec!["up", "--model", model, "--http", "127.0.0.1:0", "--workers", &count];
        if !args.contains(&SHORT_STEPS[0]) {
            all.extend(SHORT_STEPS);
        }
        all.extend(args);
        let mut process = Process::start(binary, &all);
        let line = process.stdout_line();
        let ready = line.strip_prefix("ready: ").and_then(|rest| rest.split_once(" at http://"));
        let (name, url) = ready.unwrap_or_else(|| panic!("expected the ready line, got {line:?}"));
        let address = url.split('/').next().and_then(|a| a.parse().ok()).expect("an address");
        let worker_metrics = process.log().iter().filter_map(metrics_address).map(HttpClient::new).collect();
        Self {
            http: HttpClient::new(address),
            model: name.to_owned(),
            worker_metrics,
            processes: vec![process],
            profile: None,
        }
    }

    /// `thalweg up` with so many workers that simulate this profile: they yield tokens at its rate, whatever the cores do meanwhile.
    pub fn simulated(binary: &str, model: &Path, workers: usize, profile: &str) -> Self {
        let file = NamedTempFile::new().expect("the temporary folder can be written to");
        std::fs::write(&file, profile).expect("the temporary folder can be written to");
        let path = file.path().to_str().expect("a path in UTF-8");
        let mut cluster = Self::up(binary, model, workers, &["--engine", "sim", "--profile", path]);
        cluster.profile = Some(file);
        cluster
    }

    /// A `thalweg router` in front of so many `thalweg worker`s, ready to serve. Process 0 is the router.
    pub async fn of_processes(binary: &str, model: &Path, workers: usize, worker_args: &[&str]) -> Self {
        let model = model.to_str().expect("a path in UTF-8");
        let start = |number: usize| {
            let id = format!("worker-{number}");
            let mut args = vec!["worker", "--model", model, "--worker-id", &id];
            args.extend(["--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
            args.extend(SHORT_STEPS.iter().chain(worker_args));
            Process::start(binary, &args)
        };
        let mut running: Vec<_> = (0..workers).map(start).collect();
        let serves: Vec<_> = running.iter_mut().map(|worker| worker.logged("worker serves")).collect();
        let text = |event: &Value, field: &str| event[field].as_str().expect("a field of text").to_owned();
        let addresses: Vec<_> =
            serves.iter().map(|event| format!("grpc://{}", text(event, "grpc"))).collect();
        let mut args = vec!["router", "--http", "127.0.0.1:0"];
        args.extend(addresses.iter().flat_map(|address| ["--worker", address]));
        let mut router = Process::start(binary, &args);
        let http = text(&router.logged("router listens"), "http");
        let cluster = Self {
            http: HttpClient::new(http.parse().expect("an address")),
            model: text(&serves[0], "model"),
            worker_metrics: serves.iter().filter_map(metrics_address).map(HttpClient::new).collect(),
            processes: std::iter::once(router).chain(running).collect(),
            profile: None,
        };
        let ready = cluster.eventually("workers ready", async || {
            let ready = cluster.metrics().await.sum("thalweg_router_worker_state", "state=\"ready\"");
            ready == Some(workers as f64)
        });
        ready.await;
        cluster
    }

    /// What the router counts.
    pub async fn metrics(&self) -> Scrape {
        Scrape::parse(&self.http.get("/metrics").await.text)
    }

    /// Asks again and again until it is so. Asking takes its time, so that this is no busy loop.
    pub async fn eventually(&self, what: &str, holds: impl AsyncFn() -> bool) {
        let until = async {
            while !holds().await {
                tokio::task::yield_now().await;
            }
        };
        let result = tokio::time::timeout(PATIENCE, until).await;
        assert!(result.is_ok(), "{what} did not come about");
    }

    /// Kills one process like a crash.
    pub fn kill(&mut self, process: usize) {
        self.processes.remove(process).kill();
    }

    /// Ends every process in order, the router first.
    pub fn stop(self) {
        self.processes.into_iter().for_each(Process::stop);
    }
}

fn metrics_address(event: &Value) -> Option<SocketAddr> {
    (event["message"] == "worker serves").then(|| event["metrics"].as_str()?.parse().ok())?
}
