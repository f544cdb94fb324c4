//! Responses that were kept: read, listed, forgotten.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use bytes::Bytes;
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

/// A kept response as it was kept.
#[derive(Clone)]
pub(super) struct Found {
    id: String,
    bytes: Bytes,
}

/// A kept response of this tenant.
pub(super) async fn find(api: &Api, tenant: &str, id: &str) -> Result<Found, RouterError> {
    let bytes = api.router.responses.find(tenant, id).await?;
    Ok(Found { id: id.to_owned(), bytes })
}

impl Found {
    /// Takes time in proportion to its size: never call it on the reactor.
    pub(super) fn parse(&self) -> Result<Kept, RouterError> {
        serde_json::from_slice(&self.bytes).map_err(|error| {
            tracing::error!(%error, response = self.id, "a kept response cannot be read");
            let message =
                "the response was kept by another version and cannot be read; send the whole conversation";
            RouterError::new(ErrorCode::Internal, message)
        })
    }
}

async fn read(api: &Api, tenant: &str, id: &str) -> Result<Kept, RouterError> {
    let found = find(api, tenant, id).await?;
    api.pool.run(move || found.parse()).await
}

fn refuse_stream(uri: &Uri) -> Result<(), RouterError> {
    match query(uri)?.iter().find(|(name, value)| name == "stream" && value != "false") {
        Some(_) => Err(RouterError::field("stream", "`stream` is not available here; leave it out")),
        None => Ok(()),
    }
}
