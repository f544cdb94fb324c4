//! Errors as OpenAI's clients read them.

use std::any::Any;
use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use crate::error::{RouterError, echo};
use crate::sse::chunk::error_object;

/// A reply that says why there is no other.
pub(super) struct ApiError(pub(super) RouterError);

impl From<RouterError> for ApiError {
    fn from(error: RouterError) -> Self {
        Self(error)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.0.code.http(), Json(error_object(&self.0))).into_response();
        if let Some(after) = self.0.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        response
    }
}

/// At least 1, so that clients back off at all.
fn whole_seconds(after: Duration) -> u64 {
    (after.as_secs() + u64::from(after.subsec_nanos() > 0)).max(1)
}

/// A path that nothing serves: an answer that is told from a model that is not there.
pub(super) async fn no_such_path(request: Request) -> Response {
    let message = format!(
        "there is nothing at {}; try POST /v1/chat/completions, POST /v1/completions or GET /v1/models",
        echo(request.uri().path())
    );
    plain(StatusCode::NOT_FOUND, "not_found", message)
}

/// The path is right, the method is not.
pub(super) async fn method_not_allowed(request: Request) -> Response {
    let message = format!(
        "{} is not served at {}; the Allow header tells what is",
        echo(request.method().as_str()),
        echo(request.uri().path())
    );
    plain(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// A handler panicked; its request alone is lost.
pub(super) fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let reason = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message");
    tracing::error!(reason, "a request handler panicked");
    ApiError(RouterError::new(
        ErrorCode::Internal,
        "the request could not be served; the router's log says why",
    ))
    .into_response()
}

fn plain(status: StatusCode, code: &str, message: String) -> Response {
    let body: Value = json!({"error": {
        "message": message, "type": "invalid_request_error", "param": null, "code": code,
    }});
    (status, Json(body)).into_response()
}
