//! Assembly of one worker: model, engine, gRPC, metrics, publisher; and its orderly end.

mod calibrate;
mod error;
mod memory;
mod model;
mod publisher;
mod sim;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thalweg_cache_index::CacheIndex;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::{PROTOCOL, block_hash, v1};
use thalweg_serve::trust::TrustConfig;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::engine::{Engine, EngineConfig, EngineHandle, Rates};
use crate::http::{HttpClaim, HttpServer};
use crate::kv;
use crate::metrics::{CacheConfig, WorkerMetrics};
use crate::runner::Runner;
use crate::service;
use crate::service::{Channels, GrpcClaim, GrpcServer, Identity, WorkerService};
use publisher::{PendingEvents, Publisher};

pub use error::StartError;
pub use model::{Embedding, SharedModel, gpus};

/// Starts workers.
#[derive(Debug)]
pub struct Worker;

/// What one worker is called and where it listens; port 0 takes a free one.
#[derive(Clone, Debug)]
pub struct WorkerAddress {
    /// Name, kept across restarts.
    pub id: WorkerId,
    /// gRPC service.
    pub grpc: SocketAddr,
    /// /metrics, /health and /ready.
    pub metrics: SocketAddr,
    /// Whom gRPC serves.
    pub trust: TrustConfig,
}

/// A worker that serves. Dropping it stops everything without a drain.
pub struct RunningWorker {
    id: WorkerId,
    engine: EngineHandle,
    grpc: GrpcServer,
    http: HttpServer,
    publisher: JoinHandle<()>,
    /// Ends gRPC, with streams that have no end of their own.
    closing: DropGuard,
    /// Ends the rest.
    stop: DropGuard,
}

/// What a step in flight gets to complete at the end. A device that hangs would keep the process for ever.
const ENGINE_END_TIMEOUT: Duration = Duration::from_secs(5);

/// A worker whose addresses are its own and whose certificates are read. Nobody can connect to it yet.
pub struct BoundWorker {
    id: WorkerId,
    grpc: GrpcClaim,
    http: HttpClaim,
}

impl Worker {
    /// Takes the addresses, so that one in use is told before a model is loaded.
    pub fn bind(address: WorkerAddress) -> Result<BoundWorker, StartError> {
        let grpc = GrpcClaim::take(address.grpc, &address.trust)?;
        let http = HttpClaim::take(address.metrics)?;
        Ok(BoundWorker { id: address.id, grpc, http })
    }

    /// Both at once.
    pub async fn start(
        address: WorkerAddress,
        model: &Arc<SharedModel>,
        index: Arc<dyn CacheIndex>,
    ) -> Result<RunningWorker, StartError> {
        Self::bind(address)?.start(model, index).await
    }
}

impl BoundWorker {
    /// Serves a loaded model. Several workers of one process may share it.
    pub async fn start(
        self,
        model: &Arc<SharedModel>,
        index: Arc<dyn CacheIndex>,
    ) -> Result<RunningWorker, StartError> {
        let Self { id, grpc, http } = self;
        let plan = model.plan();
        let (runner, profile) = {
            let model = Arc::clone(model);
            tokio::task::spawn_blocking(move || prepare(&model)).await.map_err(StartError::panicked)??
        };
        let pending = PendingEvents::default();
        let plan = EngineConfig { prefill_rate: profile.prefill_tokens_per_second, ..plan.clone() };
        let engine = Engine::start(plan.clone(), runner, Some(Box::new(pending.clone())))?;
        let faults = model.sim().map(|sim| sim.faults().clone());
        let metrics = Arc::new(WorkerMetrics::new(&model.names()[0], &cache_config(model)));
        let epoch =
            WorkerEpoch(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64));
        let (closing, stop) = (CancellationToken::new(), CancellationToken::new());
        let service = WorkerService {
            engine: engine.clone(),
            model: model.served().clone(),
            description: describe(&id, epoch, model, &profile),
            tokenizer: model.tokenizer_json(),
            grammars: model.grammars(),
            identity: Identity { worker_id: id.to_string(), epoch: epoch.0 },
            counters: metrics.events().clone(),
            channels: Channels::default(),
            trial: Arc::new(Semaphore::new(1)),
            closing: closing.clone(),
            faults: faults.clone(),
        };
        let grpc = grpc.serve(service, closing.clone()).await?;
        grpc.not_serving_after({
            let engine = engine.clone();
            async move { engine.draining().await }
        });
        let http = http.serve(engine.clone(), metrics.clone(), index.clone(), stop.clone())?;
        let publisher = Publisher { worker: id.clone(), epoch, index, pending, faults };
        let publisher = tokio::spawn(publisher.run(stop.clone(), move || metrics.events().published()));
        if !plan.enable_prefix_caching {
            tracing::info!(worker = %id, "prefix caching is off: routers learn nothing of this cache");
        }
        tracing::info!(
            worker = %id,
            grpc = %grpc.address,
            metrics = %http.address,
            model = model.names()[0],
            context = plan.max_model_len,
            kv_blocks = ?plan.kv_blocks,
            "worker serves"
        );
        let (closing, stop) = (closing.drop_guard(), stop.drop_guard());
        Ok(RunningWorker { id, engine, grpc, http, publisher, closing, stop })
    }
}

/// What takes time and memory, done before anything is announced.
fn prepare(model: &SharedModel) -> Result<(Box<dyn Runner>, Rates), StartError> {
    let mut runner = model.runner()?;
    let profile = match model.sim() {
        Some(sim) => sim.rates(model.plan()),
        None => calibrate::profile(runner.as_mut(), model.plan())?,
    };
    Ok((runner, profile))
}

impl RunningWorker {
    /// Its name.
    pub fn id(&self) -> &WorkerId {
        &self.id
    }

    /// Where its gRPC service listens.
    pub fn grpc_address(&self) -> SocketAddr {
        self.grpc.address
    }

    /// Where /metrics, /health and /ready are.
    pub fn metrics_address(&self) -> SocketAddr {
        self.http.address
    }

    /// Lets whoever started the worker put lines of his own into the text of /metrics; once.
    pub fn add_metrics(&self, add: impl Fn(String) -> String + Send + Sync + 'static) {
        self.http.add_metrics(Box::new(add));
    }

    /// The engine, for tests and for whoever watches over it.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Drains: refuses new work, finishes what runs within `timeout`, hands the rest over with an error that routers resume
    /// elsewhere, and ends.
    pub async fn shutdown(self, timeout: Duration) {
        tracing::info!(worker = %self.id, "draining");
        self.engine.drain();
        if tokio::time::timeout(timeout, self.engine.drained()).await.is_err() {
            let load = self.engine.stats();
            tracing::warn!(
                worker = %self.id,
                handed_over = load.running + load.waiting,
                "drain timeout is over, what still runs is handed over"
            );
        }
        if tokio::time::timeout(ENGINE_END_TIMEOUT, self.engine.shutdown()).await.is_err() {
            tracing::error!(worker = %self.id, "the device does not answer, ending without it");
        }
        drop(self.closing);
        self.grpc.ended().await;
        drop(self.stop);
        self.http.ended().await;
        if let Err(error) = self.publisher.await {
            tracing::error!(%error, "publisher panicked");
        }
        tracing::info!(worker = %self.id, "worker has ended");
    }
}

/// What routers may rely on. `abort_choices`: a worker that does not know the field would end the whole request; `grammar`:
/// it would answer whatever it likes.
const FEATURES: [&str; 7] =
    ["resume", "logprobs", "prompt_logprobs", "logit_bias", "abort_choices", "channel", "grammar"];

/// Of those that embed prompts: others would take a request for one as one for text.
const EMBED: &str = "embed";

fn describe(id: &WorkerId, epoch: WorkerEpoch, model: &SharedModel, profile: &Rates) -> v1::DescribeResponse {
    let plan = model.plan();
    v1::DescribeResponse {
        worker_id: id.to_string(),
        epoch: epoch.0,
        models: model.names().to_vec(),
        fingerprint: model.fingerprint(),
        block_size: plan.block_tokens as u32,
        hash_version: block_hash::HASH_VERSION,
        max_model_len: plan.max_model_len as u32,
        max_num_seqs: plan.max_num_seqs as u32,
        max_num_batched_tokens: plan.max_num_batched_tokens as u32,
        kv_blocks_total: published_blocks(plan) as u64,
        protocol_min: *PROTOCOL.start(),
        protocol_max: *PROTOCOL.end(),
        features: features(model),
        hardware: model.hardware().to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        profile: Some(service::rates(profile)),
        adapters: model.adapters().iter().map(|adapter| adapter.name.clone()).collect(),
        adapter_fingerprints: model.adapters().iter().map(|adapter| adapter.fingerprint.clone()).collect(),
        embedding: model.embedding().map(service::embedding_info),
    }
}

fn features(model: &SharedModel) -> Vec<String> {
    FEATURES.into_iter().chain(model.embedding().map(|_| EMBED)).map(str::to_owned).collect()
}

/// Blocks of the group whose hashes are published: full attention, or sliding where the model has only that.
fn published_blocks(plan: &EngineConfig) -> usize {
    if plan.has_group[kv::FULL] { plan.kv_blocks[kv::FULL] } else { plan.kv_blocks[kv::SLIDING] }
}

fn cache_config(model: &SharedModel) -> CacheConfig {
    let plan = model.plan();
    CacheConfig {
        block_size: plan.block_tokens,
        blocks: published_blocks(plan) as u64,
        dtype: model.kv_dtype().name().to_owned(),
        prefix_caching: plan.enable_prefix_caching,
    }
}
