//! `GET /health`, `/ready` and `/metrics`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{StatusCode, header};
use serde_json::{Value, json};

use crate::router::RouterState;
use crate::workers::health::HealthState;

use super::Api;

/// The process lives.
pub(super) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Requests can be served: 503 with the reason while they cannot.
pub(super) async fn ready(State(api): State<Arc<Api>>) -> Response {
    match not_ready(&api.router) {
        None => Json(json!({"status": "ready"})).into_response(),
        Some(reason) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready", "reason": reason})))
                .into_response()
        }
    }
}

fn not_ready(router: &RouterState) -> Option<&'static str> {
    match () {
        () if router.draining() => Some("this router is draining"),
        () if !router.workers.list().iter().any(|w| w.state() == HealthState::Ready) => {
            Some("no worker is ready")
        }
        () => None,
    }
}

/// Prometheus' text format.
pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Response {
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], api.router.metrics_text()).into_response()
}
