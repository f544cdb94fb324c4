//! A real gRPC server that answers as the test says.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use thalweg_membership::GrpcAddress;
use thalweg_proto::v1;
use thalweg_proto::v1::worker_server::{Worker, WorkerServer};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_stream::wrappers::{IntervalStream, TcpListenerStream, WatchStream};
use tonic::{Request, Response, Status};

use crate::script::{Scene, Step, Then, message, nonsense};
use crate::tokenizer;

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
            self.service.scene.count_cancelled();
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
        let step = self.scene.begin(&self.about.worker_id, &request);
        self.served.fetch_add(1, Ordering::SeqCst);
        let (tokens, then) = step.plays(&request)?;
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
        self.scene.note_abort(request.into_inner());
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
