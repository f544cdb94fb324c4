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
use thalweg_serve::http::{self, Closing};
use thalweg_serve::{Claim, GuardedListener};
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

/// An address that is ours; nobody can connect yet.
pub(crate) struct HttpClaim {
    /// As configured.
    address: SocketAddr,
    claim: Claim,
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

impl HttpClaim {
    /// Takes the address.
    pub(crate) fn take(address: SocketAddr) -> Result<Self, HttpError> {
        let claim = Claim::take(address).map_err(|source| HttpError { address, source })?;
        Ok(Self { address, claim })
    }

    /// Serves until `stop`.
    pub(crate) fn serve(
        self,
        engine: EngineHandle,
        metrics: Arc<WorkerMetrics>,
        index: Arc<dyn CacheIndex>,
        stop: CancellationToken,
    ) -> Result<HttpServer, HttpError> {
        let address = self.claim.address();
        let failed = |source| HttpError { address: self.address, source };
        let listener = self.claim.listen().map_err(failed)?;
        let addition = Arc::<OnceLock<Addition>>::default();
        let shared = Shared { engine, metrics, index, addition: Arc::clone(&addition) };
        let listener = GuardedListener::new(listener, STALL_TIMEOUT);
        let closing = Closing { close: stop, ..Closing::default() };
        let task = tokio::spawn(http::serve(listener, routes(shared), closing));
        Ok(HttpServer { address, task, addition })
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
