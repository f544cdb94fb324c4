//! Responses that were kept: read, listed, forgotten.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use http::Uri;
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use crate::error::RouterError;
use crate::request::responses::Kept;

use super::super::Api;
use super::super::asked::grant;
use super::super::error::ApiError;
use super::items::{Page, query};

/// `GET /v1/responses/{id}`.
pub(crate) async fn retrieve(
    State(api): State<Arc<Api>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    refuse_stream(request.uri())?;
    let kept = read(&api, &grant(&request).tenant, &id).await?;
    Ok(Json(kept.response))
}

/// `DELETE /v1/responses/{id}`.
pub(crate) async fn delete(
    State(api): State<Arc<Api>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    api.router.responses.forget(&grant(&request).tenant, &id).await?;
    Ok(Json(json!({"id": id, "object": "response", "deleted": true})))
}

/// `GET /v1/responses/{id}/input_items`.
pub(crate) async fn input_items(
    State(api): State<Arc<Api>>,
    Path(id): Path<String>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let page = Page::read(request.uri())?;
    let kept = read(&api, &grant(&request).tenant, &id).await?;
    Ok(Json(page.of(kept.input)?))
}

/// A kept response of this tenant, parsed off the reactor.
pub(super) async fn read(api: &Api, tenant: &str, id: &str) -> Result<Kept, RouterError> {
    let bytes = api.router.responses.find(tenant, id).await?;
    let id = id.to_owned();
    let parse = move || {
        serde_json::from_slice(&bytes).map_err(|error| {
            tracing::error!(%error, response = id, "a kept response cannot be read");
            let message =
                "the response was kept by another version and cannot be read; send the whole conversation";
            RouterError::new(ErrorCode::Internal, message)
        })
    };
    api.pool.run(parse).await
}

fn refuse_stream(uri: &Uri) -> Result<(), RouterError> {
    match query(uri)?.iter().find(|(name, value)| name == "stream" && value != "false") {
        Some(_) => Err(RouterError::field("stream", "`stream` is not available here; leave it out")),
        None => Ok(()),
    }
}
