//! A real gRPC server that answers as the test says.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use hashbrown::HashMap;
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

/// How the next `Generate` is answered, whichever worker gets it. Every choice goes on behind what it has already.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Up to max_tokens tokens, then the end.
    Answer,
    /// The same with a pause before each token.
    Paced(Duration),
    /// An error instead of a stream.
    Refuse(ErrorCode),
    /// A stream with nothing in it.
    EndEmpty,
    /// So many tokens, then silence until the client goes away.
    Hold(u32),
    /// So many tokens, then the end of the stream without a finish.
    BreakAfter(u32),
    /// So many tokens, then an error.
    FailAfter(u32, ErrorCode),
    /// So many tokens, then the whole worker ends without a word.
    CrashAfter(u32),
    /// The same without a token, after a while.
    CrashIn(Duration),
    /// So many tokens, then another one of a choice that nobody asked for.
    NonsenseAfter(u32),
    /// Tokens of another attempt in between.
    LateTokens,
}

/// What all workers of a test share.
#[derive(Default)]
pub(crate) struct Scene {
    steps: Mutex<VecDeque<Step>>,
    seen: watch::Sender<Vec<(String, v1::GenerateRequest)>>,
    cancelled: watch::Sender<usize>,
    /// Prompts that begin with this token are answered by this step, whatever the script says.
    pub(crate) by_first_token: Mutex<HashMap<u32, Step>>,
    /// What workers were told to abort.
    aborts: watch::Sender<Vec<v1::AbortRequest>>,
    pub(crate) tokenizers_sent: AtomicUsize,
    /// What workers say that they had of each prompt.
    pub(crate) cached_tokens: AtomicU32,
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

    pub(crate) async fn wait_for_abort(&self) -> v1::AbortRequest {
        let mut aborts = self.aborts.subscribe();
        let aborts = aborts.wait_for(|aborts| !aborts.is_empty()).await.unwrap();
        aborts[0].clone()
    }

    fn step(&self, request: &v1::GenerateRequest) -> Step {
        let first = request.prompt_ids.first().copied().unwrap_or_default();
        let by_prompt = self.by_first_token.lock().get(&first).cloned();
        by_prompt.or_else(|| self.steps.lock().pop_front()).unwrap_or(Step::Answer)
    }

    pub(crate) async fn wait_for_cancelled(&self, count: usize) {
        self.cancelled.subscribe().wait_for(|n| *n >= count).await.unwrap();
    }
}

/// Width of the embeddings of `embeds`.
pub(crate) const WIDTH: u32 = 4;

/// `about` of a worker that makes embeddings.
pub(crate) fn embeds(id: &str) -> v1::DescribeResponse {
    let embedding = v1::EmbeddingInfo { width: WIDTH, pooling: v1::Pooling::Last.into() };
    v1::DescribeResponse { features: vec!["embed".to_owned()], embedding: Some(embedding), ..about(id) }
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
    life: Life,
    served: Arc<AtomicUsize>,
}

/// What a worker runs on; empty once it is dead.
type Life = Arc<Mutex<Option<Runtime>>>;

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
        let (life, served) = (Life::default(), Arc::<AtomicUsize>::default());
        let service = Service {
            scene: Arc::clone(scene),
            about,
            load: Arc::clone(&load),
            mute: Arc::clone(&mute),
            life: Arc::clone(&life),
            served: Arc::clone(&served),
        };
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
        *life.lock() = Some(runtime);
        Self { address, load, mute, life, served }
    }

    pub(crate) fn socket(&self) -> SocketAddr {
        format!("{}:{}", self.address.host(), self.address.port()).parse().unwrap()
    }

    /// Requests that came to it.
    pub(crate) fn served(&self) -> usize {
        self.served.load(Ordering::SeqCst)
    }

    /// Ends it without a word; its address is free afterwards.
    pub(crate) fn kill(&mut self) {
        end(&self.life).join().unwrap();
    }

    /// The same worker in a new life at the same address.
    pub(crate) fn restart(&mut self, scene: &Arc<Scene>, about: v1::DescribeResponse) {
        self.kill();
        let address = self.socket();
        *self = Self::start_at(scene, about, address);
    }
}

fn end(life: &Life) -> std::thread::JoinHandle<()> {
    let runtime = life.lock().take();
    // A runtime may only be waited for outside of another one.
    std::thread::spawn(move || {
        if let Some(runtime) = runtime {
            runtime.shutdown_timeout(Duration::from_secs(5));
        }
    })
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
    life: Life,
    served: Arc<AtomicUsize>,
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
    type OpenChannelStream = BoxStream<v1::ChannelMessage>;
    type WatchLoadStream = BoxStream<v1::LoadReport>;
    type FetchTokenizerStream = BoxStream<v1::FetchTokenizerResponse>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let step = self.scene.step(&request);
        self.served.fetch_add(1, Ordering::SeqCst);
        let entry = (self.about.worker_id.clone(), request.clone());
        self.scene.seen.send_modify(|seen| seen.push(entry));
        let longest = request.choices.iter().map(|c| c.output_ids.len() as u32).min().unwrap_or(0);
        let max_tokens = request.sampling.as_ref().map_or(0, |s| s.max_tokens);
        // An embedding is one message.
        let rest = if request.pooling == 0 { max_tokens - longest } else { 1 };
        let (tokens, then) = match step {
            Step::Refuse(code) => return Err(code.status(format!("scripted {}", code.as_str()))),
            Step::Answer | Step::LateTokens | Step::Paced(_) => (rest, Then::End),
            Step::EndEmpty => (0, Then::End),
            Step::BreakAfter(tokens) => (tokens, Then::End),
            Step::Hold(tokens) => (tokens, Then::Hold),
            Step::FailAfter(tokens, code) => (tokens, Then::Fail(code)),
            Step::CrashAfter(tokens) => (tokens, Then::Crash(Duration::ZERO)),
            Step::CrashIn(time) => (0, Then::Crash(time)),
            Step::NonsenseAfter(tokens) => (tokens, Then::Nonsense(request.attempt_id)),
        };
        let pace = if let Step::Paced(pace) = step { pace } else { Duration::ZERO };
        let mut running = Running::new(self.clone(), &request);
        let late = matches!(step, Step::LateTokens);
        let cached_tokens = self.scene.cached_tokens.load(Ordering::SeqCst);
        let messages = stream::iter((0..tokens).flat_map(move |i| {
            let real = message(&request, request.attempt_id, i, cached_tokens);
            let other = late.then(|| message(&request, request.attempt_id + 1_000, 99, 0));
            other.into_iter().chain([real])
        }));
        let messages = messages.then(move |message| async move {
            if !pace.is_zero() {
                tokio::time::sleep(pace).await;
            }
            Ok(message)
        });
        let life = Arc::clone(&self.life);
        let ending = stream::once(async move {
            let last = match then {
                Then::End => None,
                Then::Fail(code) => Some(Err(code.status("scripted failure"))),
                Then::Nonsense(attempt_id) => Some(Ok(nonsense(attempt_id))),
                Then::Hold => std::future::pending().await,
                Then::Crash(time) => {
                    tokio::time::sleep(time).await;
                    end(&life);
                    std::future::pending().await
                }
            };
            running.ended = true;
            drop(running);
            last
        });
        Ok(Response::new(Box::pin(messages.chain(ending.filter_map(std::future::ready)))))
    }

    async fn open_channel(
        &self,
        _request: Request<v1::OpenChannelRequest>,
    ) -> Result<Response<Self::OpenChannelStream>, Status> {
        Err(Status::unimplemented("this worker has no channels"))
    }

    async fn abort(&self, request: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        self.scene.aborts.send_modify(|aborts| aborts.push(request.into_inner()));
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
    End,
    Hold,
    Fail(ErrorCode),
    Crash(Duration),
    Nonsense(u64),
}

/// The next token but `i` of every choice: its position, 100 times the choice added. The last one finishes the choice.
fn message(
    request: &v1::GenerateRequest,
    attempt_id: u64,
    i: u32,
    cached_tokens: u32,
) -> v1::GenerateResponse {
    if request.pooling != 0 {
        return embedding(request, attempt_id, cached_tokens);
    }
    let max_tokens = request.sampling.as_ref().map_or(0, |s| s.max_tokens);
    let delta = |choice: &v1::ChoiceState| {
        let at = choice.output_ids.len() as u32 + i;
        let finish =
            if at + 1 == max_tokens { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
        (at < max_tokens).then(|| v1::ChoiceDelta {
            index: choice.index,
            token_ids: vec![at + 100 * choice.index],
            logprobs: Vec::new(),
            finish_reason: finish.into(),
        })
    };
    v1::GenerateResponse {
        attempt_id,
        prompt: (i == 0).then(|| v1::PromptInfo { cached_tokens, ..Default::default() }),
        deltas: request.choices.iter().filter_map(delta).collect(),
    }
}

/// The unit vector whose direction is the prompt's first token.
fn embedding(request: &v1::GenerateRequest, attempt_id: u64, cached_tokens: u32) -> v1::GenerateResponse {
    let at = request.prompt_ids[0] % WIDTH;
    let embedding = (0..WIDTH).map(|i| if i == at { 1.0 } else { 0.0 }).collect();
    let finish_reason = v1::FinishReason::Length.into();
    v1::GenerateResponse {
        attempt_id,
        prompt: Some(v1::PromptInfo { embedding, cached_tokens, ..Default::default() }),
        deltas: vec![v1::ChoiceDelta { finish_reason, ..Default::default() }],
    }
}

fn nonsense(attempt_id: u64) -> v1::GenerateResponse {
    let deltas = vec![v1::ChoiceDelta { index: 77, token_ids: vec![1], ..Default::default() }];
    v1::GenerateResponse { attempt_id, prompt: None, deltas }
}
