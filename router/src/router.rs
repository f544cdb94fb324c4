//! A router from start to drained.

mod background;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use rand::RngExt;
use thalweg_cache_index::{CacheIndex, Replica};
use thalweg_membership::Membership;
use thalweg_proto::code::ErrorCode;
use thalweg_serve::GuardedListener;
use thalweg_serve::http::{self, Closing};
use thalweg_serve::trust::ClientTrust;
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use crate::admission::{AdmissionLimits, Gate, Usage};
use crate::api;
use crate::api::grpc::{GrpcListener, GrpcServer};
use crate::auth::{Grant, Keys};
use crate::config::RouterConfig;
use crate::dispatch::Dispatcher;
use crate::error::{RouterError, RouterStartError};
use crate::metrics::Metrics;
use crate::models::Models;
use crate::responses_store::{Metrics as StoreMetrics, Store};
use crate::usage_log::UsageLog;
use crate::workers::health::HealthState;
use crate::workers::{Room, Workers};

/// How long clients may take to read why they were cut off, once what was begun of a response has been kept: Redis has 2 s
/// for that.
const LAST_WORDS: Duration = Duration::from_secs(3);

/// What every request handler shares.
pub struct RouterState {
    /// Settings.
    pub config: RouterConfig,
    /// Served models.
    pub models: Arc<Models>,
    /// Known workers.
    pub workers: Arc<Workers>,
    /// Way to the workers.
    pub dispatcher: Arc<Dispatcher>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Where records of requests are written, if anywhere.
    pub(crate) usage_log: Option<UsageLog>,
    /// Answers that are kept for later requests.
    pub(crate) responses: Arc<Store>,
    /// Who may ask.
    pub(crate) keys: Arc<Keys>,
    /// Routers that share the limits.
    routers: AtomicUsize,
    gate: Arc<Gate>,
    replica: Arc<Replica>,
    index: Arc<dyn CacheIndex>,
    membership: Arc<dyn Membership>,
    draining: AtomicBool,
    starting: AtomicBool,
    started: Instant,
}

impl RouterState {
    fn new(
        config: RouterConfig,
        trust: ClientTrust,
        index: Arc<dyn CacheIndex>,
        membership: Arc<dyn Membership>,
    ) -> Result<Arc<Self>, RouterStartError> {
        let replica = index.replica();
        let random = || format!("router-{:016x}", rand::rng().random::<u64>());
        let router_id = config.router_id.clone().unwrap_or_else(random);
        let (models, metrics) = (Arc::<Models>::default(), Arc::<Metrics>::default());
        let timeouts = &config.timeouts;
        let workers = Arc::new(Workers::new(
            router_id,
            timeouts.connect_timeout,
            trust,
            Arc::clone(&models),
            Arc::clone(&replica),
        ));
        let started = Instant::now();
        let gate = Gate::new(AdmissionLimits::from(&config.limits), timeouts.queue_timeout, {
            let workers = Arc::clone(&workers);
            move |model| match workers.room(model) {
                // One that serves it may be found any moment.
                Room::NoWorker(_) if started.elapsed() < ACQUAINTANCE => Room::Requests(0),
                room => room,
            }
        });
        let dispatcher = Arc::new(Dispatcher::new(
            &config,
            Arc::clone(&workers),
            Arc::clone(&replica),
            Arc::clone(&gate),
            Arc::clone(&metrics),
        ));
        let draining = AtomicBool::new(false);
        let starting = AtomicBool::new(true);
        let surface = &config.surface;
        let keys = Arc::new(surface.keys()?);
        let usage_log = metrics.register(|registry| surface.open_usage_log(registry))?;
        let store_metrics = metrics.register(StoreMetrics::register);
        let responses = Arc::new(Store::new(&config.responses, config.index_redis.as_ref(), store_metrics));
        Ok(Arc::new(Self {
            usage_log,
            responses,
            keys,
            routers: AtomicUsize::new(1),
            config,
            models,
            workers,
            dispatcher,
            metrics,
            gate,
            replica,
            index,
            membership,
            draining,
            starting,
            started,
        }))
    }

    /// What a key's tenant may have in this router at a time; None: as the flags say.
    pub(crate) fn tenant_limit(&self, grant: &Grant) -> Option<Usage> {
        let all = AdmissionLimits::from(&self.config.limits);
        let tenant = grant.tenant_limit(all.tenant);
        let routers = self.routers.load(Ordering::Relaxed);
        (tenant != all.tenant).then(|| AdmissionLimits { tenant, ..all }.shared_by(routers).tenant)
    }

    /// Requests without an API key are refused.
    pub fn needs_key(&self) -> bool {
        self.keys.open().is_none()
    }

    /// Requests of a key's tenant that this router takes at a time, waiting and running.
    pub(crate) fn requests_at_once(&self, grant: &Grant) -> usize {
        let all = AdmissionLimits::from(&self.config.limits);
        let own = AdmissionLimits { tenant: grant.tenant_limit(all.tenant), ..all };
        let share = own.shared_by(self.routers.load(Ordering::Relaxed));
        share.tenant.requests.min(share.queued.requests)
    }

    /// Routers that serve this API, this one included, as far as membership tells.
    pub(crate) fn live_routers(&self) -> usize {
        self.routers.load(Ordering::Relaxed)
    }

    /// The router is going away: /ready fails.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Workers that take requests.
    pub(crate) fn workers_ready(&self) -> usize {
        self.workers.list().iter().filter(|w| w.state() == HealthState::Ready).count()
    }

    /// It has yet to get to know its workers: none has been ready, and there was little time or they are being started.
    pub(crate) fn starting(&self) -> bool {
        let is_over = !self.config.starts_workers && self.started.elapsed() > ACQUAINTANCE;
        if is_over || self.workers_ready() > 0 {
            self.starting.store(false, Ordering::Release);
        }
        self.starting.load(Ordering::Acquire)
    }

    /// Looks for a model that a request names, and again as workers become known, for as long as a new router may need to get to
    /// know them: only then is a model missing.
    pub(crate) async fn once_acquainted<T, F: Future<Output = Result<T, RouterError>>>(
        &self,
        look: impl Fn() -> F,
    ) -> Result<T, RouterError> {
        let is_missing =
            |error: &RouterError| matches!(error.code, ErrorCode::ModelNotFound | ErrorCode::Unavailable);
        let mut changes = self.workers.changes();
        loop {
            changes.borrow_and_update();
            let result = look().await;
            if !result.as_ref().is_err_and(is_missing) || self.started.elapsed() >= ACQUAINTANCE {
                return result;
            }
            if timeout_at(self.started + ACQUAINTANCE, changes.changed()).await.is_err() {
                return look().await;
            }
        }
    }

    /// An error when the queue is full, whatever the request.
    pub(crate) fn refuse_when_full(&self) -> Result<(), RouterError> {
        self.gate.refuse_when_full()
    }

    /// The text that /metrics serves, all gauges up to date.
    pub fn metrics_text(&self) -> String {
        let gauges = &self.metrics.gauges;
        gauges.queue_depth.set(self.gate.waiting() as i64);
        gauges.streams.set(self.dispatcher.running() as i64);
        gauges.stream_buffer_bytes.set(self.dispatcher.buffered_bytes() as i64);
        gauges.mass_loss.set(self.workers.mass_loss() as i64);
        gauges.poisoned_prompts.set(self.dispatcher.poisoned() as i64);
        gauges.index_blocks.set(self.replica.stats().blocks as i64);
        gauges.full_listeners.set(thalweg_serve::full_listeners() as i64);
        gauges.accept_errors.inner().store(thalweg_serve::accept_errors(), Ordering::Relaxed);
        self.metrics.show_workers(&self.workers);
        self.metrics.index.set(&self.index.stats());
        self.metrics.encode(&self.membership.stats())
    }
}

/// A new router takes this long at most to get to know its workers: requests for a model that it does not know wait meanwhile, and
/// then it says that it is ready without any worker.
const ACQUAINTANCE: Duration = Duration::from_secs(5);

/// The router.
pub struct Router;

/// A router that listens. Dropping it stops everything at once.
pub struct RunningRouter {
    http: SocketAddr,
    state: Arc<RouterState>,
    closing: Closing,
    cut_short: CancellationToken,
    server: JoinHandle<()>,
    grpc: Option<GrpcServer>,
    background: JoinSet<()>,
}

impl Router {
    /// Listens, connects to the members as they come, and serves.
    pub async fn start(
        config: RouterConfig,
        membership: Arc<dyn Membership>,
        index: Arc<dyn CacheIndex>,
    ) -> Result<RunningRouter, RouterStartError> {
        config.check()?;
        let bind = |source| RouterStartError::Bind { address: config.http, source };
        let listener = TcpListener::bind(config.http).await.map_err(bind)?;
        let http = listener.local_addr().map_err(bind)?;
        let trust = ClientTrust::load(&config.trust)?;
        let state = RouterState::new(config, trust, index, Arc::clone(&membership))?;
        let grpc = GrpcListener::bind(&state.config, state.keys.are_needed()).await?;

        let mut background = JoinSet::new();
        background.spawn(Arc::clone(&state.workers).follow(membership.watch(), CancellationToken::new()));
        background::spawn(&mut background, &state, membership.routers());
        background.spawn(Arc::clone(&state.keys).follow());

        let closing = Closing::default();
        let listener = GuardedListener::new(listener, state.config.timeouts.client_stall_timeout);
        let opened = api::open(Arc::clone(&state));
        let server = tokio::spawn(http::serve(listener, api::routes(&opened), closing.clone()));
        let grpc = match grpc {
            Some(listener) => Some(listener.serve(&opened, &closing).await?),
            None => None,
        };
        let grpc_address = grpc.as_ref().map(|grpc| tracing::field::display(grpc.address));
        tracing::info!(%http, grpc = grpc_address, router = state.workers.router_id(), "router listens");
        let cut_short = CancellationToken::new();
        Ok(RunningRouter { http, state, closing, cut_short, server, grpc, background })
    }
}

impl RunningRouter {
    /// Where it listens; tells the port when 0 was asked for.
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Where it serves gRPC, if it does.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(|grpc| grpc.address)
    }

    /// What its handlers share.
    pub fn state(&self) -> &Arc<RouterState> {
        &self.state
    }

    /// Returns once so many workers can take requests.
    pub async fn ready(&self, workers: usize) {
        self.state.workers.wait_for_ready(workers).await;
    }

    /// Ends a drain as if its time were over, once it is cancelled.
    pub fn cut_short(&self) -> CancellationToken {
        self.cut_short.clone()
    }

    /// Fails /ready, goes on accepting for the drain delay while it asks clients to go, then finishes what runs within the
    /// drain timeout. What remains is told so and ends.
    pub async fn shutdown(mut self) {
        let timeouts = self.state.config.timeouts.clone();
        self.state.draining.store(true, Ordering::Release);
        self.closing.drain.cancel();
        let _ = timeout(timeouts.drain_delay, self.cut_short.cancelled()).await;
        self.closing.close.cancel();
        let cut_short = self.cut_short.clone();
        let in_time = tokio::select! {
            biased;
            () = cut_short.cancelled() => false,
            ended = timeout(timeouts.drain_timeout, self.served()) => ended.is_ok(),
        };
        if !in_time {
            let streams = self.state.dispatcher.running();
            tracing::warn!(streams, "drain is over, open requests are cut off");
            self.state.dispatcher.stop();
            // Clients are told; one that does not read is left.
            let _ = timeout(LAST_WORDS, self.served()).await;
        }
        if let Some(log) = &self.state.usage_log {
            log.flush().await;
        }
        self.background.shutdown().await;
        tracing::info!(router = self.state.workers.router_id(), "router has ended");
    }
}

impl RunningRouter {
    /// Returns once the last answer has been given, HTTP and gRPC.
    async fn served(&mut self) {
        let grpc = async {
            if let Some(grpc) = &mut self.grpc {
                grpc.ended().await;
            }
        };
        let http = async {
            if !self.server.is_finished() {
                let _ = (&mut self.server).await;
            }
        };
        tokio::join!(http, grpc);
    }
}

impl Drop for RunningRouter {
    fn drop(&mut self) {
        self.state.dispatcher.stop();
        self.server.abort();
    }
}
