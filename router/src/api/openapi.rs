//! `GET /openapi.json`: this API in OpenAPI 3.1. A test holds it against the routes and their replies.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, header};

static DOCUMENT: LazyLock<String> =
    LazyLock::new(|| include_str!("openapi.json").replacen("VERSION", env!("CARGO_PKG_VERSION"), 1));

pub(super) async fn document() -> Response {
    let json = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    (json, DOCUMENT.as_str()).into_response()
}
