//! The HTTP surface: OpenAI's endpoints, vLLM's extensions, health and metrics.

mod answer;
mod asked;
mod body;
mod cors;
mod embeddings;
mod error;
mod generate;
pub(crate) mod grpc;
mod headers;
mod health;
mod message;
pub(crate) mod metrics;
mod models;
mod openapi;
mod pool;
mod responses;
mod script;
mod session;
mod stream;
mod tokens;
mod trace;
mod whole;

use std::sync::Arc;

use axum::Router;
use axum::middleware;
use axum::routing::{get, post};
use tower::util::option_layer;
use tower_http::catch_panic::CatchPanicLayer;

use crate::auth::layer::{Door, guard};
use crate::request::Served;
use crate::router::RouterState;

use body::BodyRoom;
use metrics::ApiMetrics;
use pool::BlockingPool;

/// What the handlers share.
pub(crate) struct Api {
    router: Arc<RouterState>,
    metrics: Arc<ApiMetrics>,
    pool: BlockingPool,
    bodies: BodyRoom,
    seeds: headers::Seeds,
}

/// What HTTP and gRPC have in common.
pub(crate) struct Opened {
    api: Arc<Api>,
    door: Arc<Door>,
}

/// Makes what all requests share; once for each router.
pub(crate) fn open(state: Arc<RouterState>) -> Opened {
    let api = Arc::new(Api {
        metrics: Arc::new(state.metrics.register(ApiMetrics::register)),
        pool: BlockingPool::default(),
        bodies: BodyRoom::new(state.config.limits.body_buffer_bytes_max),
        seeds: headers::Seeds::new(state.config.router_seed),
        router: state,
    });
    let metrics_public = api.router.config.surface.metrics_public;
    let door = |registry: &mut _| Door::new(Arc::clone(&api.router.keys), metrics_public, registry);
    let door = Arc::new(api.router.metrics.register(door));
    Opened { api, door }
}

/// Every route, with the layers around them.
pub(crate) fn routes(opened: &Opened) -> Router {
    let (api, door) = (Arc::clone(&opened.api), Arc::clone(&opened.door));
    let cors = cors::layer(&api.router.config.surface);
    let routes = Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::info))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(openapi::document))
        .fallback(error::no_such_path)
        .method_not_allowed_fallback(error::method_not_allowed)
        // A panic in a handler costs its own request only.
        .layer(CatchPanicLayer::custom(error::panicked))
        .with_state(api);
    // One route for everything, so that the layers see each request before any path is told from another.
    Router::new()
        .fallback_service(routes)
        .layer(middleware::from_fn_with_state(door, guard))
        // Browsers ask without a key whether they may ask with one.
        .layer(option_layer(cors))
        // Outermost, so that every reply carries the request's id.
        .layer(middleware::from_fn(headers::request_id))
}

impl Api {
    fn served<'a>(&'a self, draw_seed: &'a dyn Fn() -> u64) -> Served<'a> {
        let choices_max = self.router.config.limits.choices_max;
        Served { models: &self.router.models, choices_max, surface: &self.router.config.surface, draw_seed }
    }
}
