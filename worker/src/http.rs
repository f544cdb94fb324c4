//! Metrics and health of one worker, for people, Prometheus and Kubernetes.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use thalweg_cache_index::CacheIndex;
use thalweg_serve::GuardedListener;
use thalweg_serve::http::{self, Closing};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::engine::EngineHandle;
use crate::metrics::{CONTENT_TYPE, WorkerMetrics};

/// The metrics address is taken, or not ours.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for metrics: {source}; choose another with --metrics")]
pub struct HttpError {
    address: SocketAddr,
    source: std::io::Error,
}

/// Who reads nothing for so long is cut off.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// An address that is ours, with nobody answering yet.
pub(crate) struct HttpListener {
    pub(crate) address: SocketAddr,
    listener: TcpListener,
}

/// A server that answers.
pub(crate) struct HttpServer {
    pub(crate) address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
    addition: Arc<OnceLock<Addition>>,
}

/// Puts further lines into the text of /metrics.
pub(crate) type Addition = Box<dyn Fn(String) -> String + Send + Sync>;

#[derive(Clone)]
struct Shared {
    engine: EngineHandle,
    metrics: Arc<WorkerMetrics>,
    index: Arc<dyn CacheIndex>,
    addition: Arc<OnceLock<Addition>>,
}

impl HttpListener {
    /// Takes the address.
    pub(crate) async fn bind(address: SocketAddr) -> Result<Self, HttpError> {
        let failed = |source| HttpError { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        Ok(Self { address: listener.local_addr().map_err(failed)?, listener })
    }

    /// Serves until `stop`.
    pub(crate) fn serve(
        self,
        engine: EngineHandle,
        metrics: Arc<WorkerMetrics>,
        index: Arc<dyn CacheIndex>,
        stop: CancellationToken,
    ) -> HttpServer {
        let addition = Arc::<OnceLock<Addition>>::default();
        let shared = Shared { engine, metrics, index, addition: Arc::clone(&addition) };
        let listener = GuardedListener::new(self.listener, STALL_TIMEOUT);
        let closing = Closing { close: stop, ..Closing::default() };
        let task = tokio::spawn(http::serve(listener, routes(shared), closing));
        HttpServer { address: self.address, task, addition }
    }
}

impl HttpServer {
    /// The first addition stays.
    pub(crate) fn add_metrics(&self, addition: Addition) {
        if self.addition.set(addition).is_err() {
            tracing::error!("metrics were added to twice");
        }
    }

    /// Waits for the end; call behind `stop`. A client that keeps its connection open does not hold this up.
    pub(crate) async fn ended(mut self) {
        let grace = Duration::from_secs(1);
        if tokio::time::timeout(grace, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

fn routes(shared: Shared) -> Router {
    Router::new()
        .route("/metrics", get(exposition))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .with_state(shared)
}

async fn exposition(State(shared): State<Shared>) -> impl IntoResponse {
    shared.metrics.observe(shared.engine.take_observations());
    let text = shared.metrics.render(&shared.engine.stats(), &shared.index.stats());
    let text = match shared.addition.get() {
        Some(add) => add(text),
        None => text,
    };
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text)
}

/// Alive: the engine runs. A restart is the cure where it does not.
async fn health(State(shared): State<Shared>) -> (StatusCode, String) {
    match shared.engine.failure() {
        None => (StatusCode::OK, "ok\n".to_owned()),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("the engine has ended: {reason}\n")),
    }
}

/// Takes new work.
async fn ready(State(shared): State<Shared>) -> (StatusCode, String) {
    if shared.engine.failure().is_none() && shared.engine.stats().draining {
        return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
    }
    health(State(shared)).await
}
