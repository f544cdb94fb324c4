//! Dispatch against real gRPC servers that answer by script.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

#[path = "../support/members.rs"]
mod members;
#[path = "../support/script.rs"]
mod script;
#[path = "../support/scripted_worker.rs"]
mod scripted_worker;
#[path = "../support/tokenizer.rs"]
mod tokenizer;

mod adapters;
mod balance;
mod before_first_token;
mod cache;
mod embeddings;
mod membership;
mod poison;
mod resume;
mod whole_life;
mod workers;

use std::sync::Arc;
use std::time::Duration;

use members::Members;
use script::{Scene, Step, about};
use scripted_worker::ScriptedWorker;
use thalweg_cache_index::MemoryIndex;
use thalweg_proto::block_hash::{HashRoot, full_blocks};
use thalweg_proto::ids::WorkerEpoch;
use thalweg_proto::v1;
use thalweg_router::config::RouterConfig;
use thalweg_router::dispatch::{Generation, GenerationEvent, Tokenized};
use thalweg_router::error::RouterError;
use thalweg_router::router::{Router, RunningRouter};
use thalweg_router::workers::Worker;
use thalweg_router::workers::health::HealthState;
use tokio::time::Instant;

/// A router with scripted workers behind it.
struct Stage {
    scene: Arc<Scene>,
    workers: Vec<ScriptedWorker>,
    membership: Arc<Members>,
    index: Arc<MemoryIndex>,
    router: RunningRouter,
}

fn config() -> RouterConfig {
    RouterConfig {
        http: ([127, 0, 0, 1], 0).into(),
        router_id: Some("router".to_owned()),
        router_seed: Some(11),
        ..RouterConfig::default()
    }
}

async fn stage_of(config: RouterConfig, abouts: Vec<v1::DescribeResponse>, steps: Vec<Step>) -> Stage {
    let scene = Scene::new(steps);
    let workers: Vec<ScriptedWorker> =
        abouts.into_iter().map(|about| ScriptedWorker::start(&scene, about)).collect();
    let membership = Arc::new(Members::new(workers.iter().map(|w| w.address.clone())));
    let index = Arc::new(MemoryIndex::new());
    let router = Router::start(config, Arc::<Members>::clone(&membership), Arc::<MemoryIndex>::clone(&index));
    let router = router.await.unwrap();
    router.state().workers.wait_for_ready(workers.len()).await;
    Stage { scene, workers, membership, index, router }
}

async fn stage(count: usize, steps: Vec<Step>) -> Stage {
    stage_of(config(), (0..count).map(|i| about(&format!("w{i}"))).collect(), steps).await
}

impl Stage {
    fn request(&self, max_tokens: u32) -> Tokenized {
        Tokenized {
            request_id: "r".to_owned(),
            model: self.router.state().models.get("tiny").unwrap(),
            prompt_ids: (0..100).collect(),
            sampling: v1::SamplingParams { max_tokens, ..Default::default() },
            grammar: None,
            embedding: None,
            n: 1,
            tenant: "default".to_owned(),
            tenant_limit: None,
            scope: v1::CacheScope { scope: "default".to_owned(), salt: String::new() },
            priority: 0,
            deadline: Instant::now() + Duration::from_secs(60),
            traceparent: String::new(),
            tracestate: String::new(),
            taken: Arc::default(),
        }
    }

    /// Dispatches in a task of its own and reads to the end.
    fn spawn(&self, request: Tokenized) -> tokio::task::JoinHandle<Outcome> {
        let dispatcher = Arc::clone(&self.router.state().dispatcher);
        tokio::spawn(async move {
            match dispatcher.dispatch(request).await {
                Ok(generation) => read(generation).await,
                Err(error) => (Vec::new(), Err(error)),
            }
        })
    }

    /// Ends a worker and starts it again in its next life.
    fn restart(&mut self, index: usize, epoch: u64) {
        let again = v1::DescribeResponse { epoch, ..about(&format!("w{index}")) };
        self.workers[index].restart(&self.scene, again);
    }

    async fn wait_for_epoch(&self, id: &str, epoch: u64) {
        while self.worker(id).epoch != WorkerEpoch(epoch) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.wait_for_state(id, HealthState::Ready).await;
    }

    /// Whether /metrics has this line.
    fn shows(&self, line: &str) -> bool {
        self.router.state().metrics_text().lines().any(|l| l == line)
    }

    /// The series of a counter that are not 0, by their labels.
    fn counted(&self, name: &str) -> Vec<(String, f64)> {
        let text = self.router.state().metrics_text();
        let start = format!("thalweg_router_{name}_total");
        let series = text.lines().filter_map(|line| {
            let (labels, count) = line.strip_prefix(&start)?.rsplit_once(' ')?;
            Some((labels.trim_matches(['{', '}']).to_owned(), count.parse().unwrap()))
        });
        let mut series: Vec<_> = series.filter(|(_, count)| *count > 0.0).collect();
        series.sort_by(|a, b| a.0.cmp(&b.0));
        series
    }

    async fn dispatch(&self, max_tokens: u32) -> Result<Generation, RouterError> {
        self.router.state().dispatcher.dispatch(self.request(max_tokens)).await
    }

    /// Of the blocks of `request`'s prompt.
    fn keys(&self) -> Vec<u64> {
        let root = HashRoot { fingerprint: b"print", adapter: "", scope: "default", salt: "" };
        full_blocks(root.hash(), &self.request(1).prompt_ids, 16).iter().map(|b| b.index_key()).collect()
    }

    fn worker(&self, id: &str) -> Arc<Worker> {
        let workers = self.router.state().workers.list();
        Arc::clone(workers.iter().find(|w| w.id.as_str() == id).unwrap())
    }

    async fn wait_for_state(&self, id: &str, state: HealthState) {
        self.worker(id).watch_state().wait_for(|s| *s == state).await.unwrap();
    }

    /// No booking, no permit, no buffer is left, and the workers say the same.
    async fn wait_until_idle(&self) {
        let state = self.router.state();
        let idle = || {
            let workers = state.workers.list();
            // What a worker that does not answer reported last says nothing.
            let unloaded = |w: &Worker| {
                w.state() != HealthState::Ready || (w.load().running == 0 && w.load().waiting == 0)
            };
            let quiet = |w: &Arc<Worker>| w.open_bookings() == 0 && unloaded(w);
            workers.iter().all(quiet)
                && state.dispatcher.running() == 0
                && state.dispatcher.buffered_bytes() == 0
        };
        let patience = async {
            while !idle() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), patience).await.expect("everything is given back");
        assert!(state.metrics_text().contains("thalweg_router_queue_depth 0"));
    }
}

/// Tokens until the end, and how it ended.
type Outcome = (Vec<u32>, Result<(), RouterError>);

/// The position of a worker of `stage` by its name.
fn index_of(id: &str) -> usize {
    id[1..].parse().unwrap()
}

/// Whoever has read everything lets go.
async fn read(mut generation: Generation) -> Outcome {
    let mut tokens = Vec::new();
    while let Some(event) = generation.next().await {
        match event {
            Ok(GenerationEvent::Prompt(_)) => {}
            Ok(GenerationEvent::Deltas(deltas)) => {
                tokens.extend(deltas.into_iter().flat_map(|d| d.token_ids))
            }
            Err(error) => return (tokens, Err(error)),
        }
    }
    (tokens, Ok(()))
}
