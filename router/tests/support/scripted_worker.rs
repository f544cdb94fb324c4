//! A real gRPC server that answers as the test says.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use thalweg_membership::GrpcAddress;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1::worker_server::{Worker, WorkerServer};
use thalweg_proto::{block_hash, v1};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_stream::wrappers::{IntervalStream, TcpListenerStream, WatchStream};
use tonic::{Request, Response, Status};

use crate::tokenizer;

/// How the next `Generate` is answered, whichever worker gets it.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// max_tokens tokens, then the end.
    Answer,
    /// An error instead of a stream.
    Refuse(ErrorCode),
    /// A stream with nothing in it.
    EndEmpty,
    /// So many tokens, then silence until the client goes away.
    Hold(u32),
    /// So many tokens, then the end of the stream without a finish.
    BreakAfter(u32),
    /// Tokens of another attempt in between.
    LateTokens,
}

/// What all workers of a test share.
#[derive(Default)]
pub(crate) struct Scene {
    steps: Mutex<VecDeque<Step>>,
    seen: watch::Sender<Vec<(String, v1::GenerateRequest)>>,
    cancelled: watch::Sender<usize>,
    pub(crate) tokenizers_sent: AtomicUsize,
}

impl Scene {
    pub(crate) fn new(steps: impl IntoIterator<Item = Step>) -> Arc<Self> {
        Arc::new(Self { steps: Mutex::new(steps.into_iter().collect()), ..Self::default() })
    }

    /// Who got which request, in order.
    pub(crate) fn seen(&self) -> Vec<(String, v1::GenerateRequest)> {
        self.seen.borrow().clone()
    }

    pub(crate) async fn wait_for_seen(&self, count: usize) {
        self.seen.subscribe().wait_for(|seen| seen.len() >= count).await.unwrap();
    }

    pub(crate) async fn wait_for_cancelled(&self, count: usize) {
        self.cancelled.subscribe().wait_for(|n| *n >= count).await.unwrap();
    }
}

/// What a worker says of itself, unless a test changes it.
pub(crate) fn about(id: &str) -> v1::DescribeResponse {
    let step = |batch, step_seconds| v1::DecodeRate { batch, step_seconds, samples: 0 };
    v1::DescribeResponse {
        worker_id: id.to_owned(),
        epoch: 1,
        models: vec!["tiny".to_owned()],
        fingerprint: bytes::Bytes::from_static(b"print"),
        block_size: 16,
        hash_version: block_hash::HASH_VERSION,
        max_model_len: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        kv_blocks_total: 1_000,
        protocol_min: 1,
        protocol_max: 1,
        hardware: "test".to_owned(),
        version: "0".to_owned(),
        profile: Some(v1::Rates {
            prefill_tokens_per_second: 1_000.0,
            prefill_samples: 0,
            decode: vec![step(1, 0.010), step(8, 0.015)],
        }),
        ..Default::default()
    }
}

/// A worker on a runtime of its own, so that killing it breaks its connections too.
pub(crate) struct ScriptedWorker {
    pub(crate) address: GrpcAddress,
    pub(crate) load: Arc<watch::Sender<v1::LoadReport>>,
    /// Sends no more load reports, like a stopped process.
    pub(crate) mute: Arc<watch::Sender<bool>>,
    runtime: Option<Runtime>,
}

impl ScriptedWorker {
    pub(crate) fn start(scene: &Arc<Scene>, about: v1::DescribeResponse) -> Self {
        Self::start_at(scene, about, SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    pub(crate) fn start_at(scene: &Arc<Scene>, about: v1::DescribeResponse, at: SocketAddr) -> Self {
        let report = v1::LoadReport {
            worker_id: about.worker_id.clone(),
            epoch: about.epoch,
            state: v1::WorkerState::Ready.into(),
            kv_blocks_total: 1_000,
            kv_blocks_free: 1_000,
            ..Default::default()
        };
        let (load, mute) = (Arc::new(watch::Sender::new(report)), Arc::new(watch::Sender::new(false)));
        let service =
            Service { scene: Arc::clone(scene), about, load: Arc::clone(&load), mute: Arc::clone(&mute) };
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = std::net::TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = GrpcAddress::from(listener.local_addr().unwrap());
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let server = tonic::transport::Server::builder().add_service(WorkerServer::new(service));
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self { address, load, mute, runtime: Some(runtime) }
    }

    pub(crate) fn socket(&self) -> SocketAddr {
        format!("{}:{}", self.address.host(), self.address.port()).parse().unwrap()
    }

    /// Ends it without a word; its address is free afterwards.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A runtime may only be waited for outside of another one.
            let end = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
            end.join().unwrap();
        }
    }
}

impl Drop for ScriptedWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Service {
    scene: Arc<Scene>,
    about: v1::DescribeResponse,
    load: Arc<watch::Sender<v1::LoadReport>>,
    mute: Arc<watch::Sender<bool>>,
}

/// Counts a request as running until it is dropped; one that did not end in order was cancelled.
struct Running {
    service: Service,
    ended: bool,
}

impl Running {
    fn new(service: Service, request: &v1::GenerateRequest) -> Self {
        service.load.send_modify(|load| {
            load.running += 1;
            load.booked.insert(request.router_id.clone(), request.booking);
        });
        Self { service, ended: false }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.service.load.send_modify(|load| {
            load.running -= 1;
            load.steps += 1;
        });
        if !self.ended {
            self.service.scene.cancelled.send_modify(|n| *n += 1);
        }
    }
}

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Worker for Service {
    type GenerateStream = BoxStream<v1::GenerateResponse>;
    type WatchLoadStream = BoxStream<v1::LoadReport>;
    type FetchTokenizerStream = BoxStream<v1::FetchTokenizerResponse>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let step = self.scene.steps.lock().pop_front().unwrap_or(Step::Answer);
        let entry = (self.about.worker_id.clone(), request.clone());
        self.scene.seen.send_modify(|seen| seen.push(entry));
        let max_tokens = request.sampling.as_ref().map_or(0, |s| s.max_tokens);
        let (tokens, then) = match step {
            Step::Refuse(code) => return Err(code.status(format!("scripted {}", code.as_str()))),
            Step::Answer | Step::LateTokens => (max_tokens, Then::Finish),
            Step::EndEmpty => (0, Then::End),
            Step::BreakAfter(tokens) => (tokens, Then::End),
            Step::Hold(tokens) => (tokens, Then::Hold),
        };
        let mut running = Running::new(self.clone(), &request);
        let late = matches!(step, Step::LateTokens);
        let messages = stream::iter((0..tokens).flat_map(move |i| {
            let finish = matches!(then, Then::Finish) && i + 1 == max_tokens;
            let real = message(&request, request.attempt_id, i, finish);
            let other = late.then(|| message(&request, request.attempt_id + 1_000, 99, false));
            other.into_iter().chain([real])
        }));
        let ending = stream::once(async move {
            if matches!(then, Then::Hold) {
                std::future::pending::<()>().await;
            }
            running.ended = true;
            drop(running);
        });
        let answer =
            messages.map(|m| Some(Ok(m))).chain(ending.map(|()| None)).filter_map(std::future::ready);
        Ok(Response::new(Box::pin(answer)))
    }

    async fn abort(&self, _: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        Ok(Response::new(v1::AbortResponse {}))
    }

    async fn watch_load(
        &self,
        _: Request<v1::WatchLoadRequest>,
    ) -> Result<Response<Self::WatchLoadStream>, Status> {
        let (load, mute) = (Arc::clone(&self.load), Arc::clone(&self.mute));
        let heartbeat = IntervalStream::new(tokio::time::interval(Duration::from_millis(250))).map(drop);
        let changes = WatchStream::new(self.load.subscribe()).map(drop);
        let reports = stream::select(heartbeat, changes)
            .filter(move |()| std::future::ready(!*mute.borrow()))
            .map(move |()| Ok(load.borrow().clone()));
        Ok(Response::new(Box::pin(reports)))
    }

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::DescribeResponse>, Status> {
        Ok(Response::new(self.about.clone()))
    }

    async fn fetch_tokenizer(
        &self,
        _: Request<v1::FetchTokenizerRequest>,
    ) -> Result<Response<Self::FetchTokenizerStream>, Status> {
        self.scene.tokenizers_sent.fetch_add(1, Ordering::SeqCst);
        let bundle = serde_json::to_vec(&tokenizer::bundle(true, 512)).unwrap();
        let chunks: Vec<_> = bundle
            .chunks(1_000)
            .map(|chunk| Ok(v1::FetchTokenizerResponse { chunk: chunk.to_vec().into() }))
            .collect();
        Ok(Response::new(Box::pin(stream::iter(chunks))))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        self.load.send_modify(|load| load.state = v1::WorkerState::Draining.into());
        Ok(Response::new(v1::DrainResponse { running: self.load.borrow().running }))
    }
}

#[derive(Clone, Copy)]
enum Then {
    Finish,
    End,
    Hold,
}

/// Token `i` of every choice.
fn message(request: &v1::GenerateRequest, attempt_id: u64, i: u32, finish: bool) -> v1::GenerateResponse {
    let finish = if finish { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
    let delta = |choice: &v1::ChoiceState| v1::ChoiceDelta {
        index: choice.index,
        token_ids: vec![i],
        logprobs: Vec::new(),
        finish_reason: finish.into(),
    };
    v1::GenerateResponse {
        attempt_id,
        prompt: (i == 0).then(v1::PromptInfo::default),
        deltas: request.choices.iter().map(delta).collect(),
    }
}
