//! `GET /health`, `/ready` and `/metrics`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::{Value, json};

use super::Api;

/// The process lives.
pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// This router takes requests: 503 while it drains, and at first until it knows a worker (for some seconds at most, or as long as
/// `thalweg up` takes to start its own). From then on it does not depend on workers: their outage would take every router out of
/// the balancer, and clients would not learn why.
pub(super) async fn ready(State(api): State<Arc<Api>>) -> Response {
    let workers_ready = api.router.workers_ready();
    let reason = match () {
        () if api.router.draining() => "this router is draining",
        () if api.router.starting() => "no worker is ready yet",
        () => return Json(json!({"status": "ready", "workers_ready": workers_ready})).into_response(),
    };
    let body = json!({"status": "not ready", "reason": reason, "workers_ready": workers_ready});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

/// Prometheus' text format.
pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Response {
    api.router.models.list().iter().for_each(|model| api.metrics.know(&model.name));
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], api.router.metrics_text()).into_response()
}
