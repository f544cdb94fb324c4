//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::future::ready;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use crate::error::RouterError;
use crate::models::ModelEntry;
use crate::request::common::find_model;

use super::Api;
use super::error::ApiError;

pub(super) async fn list(State(api): State<Arc<Api>>) -> Json<Value> {
    Json(all(&api).await)
}

/// OpenAI's list of what is served.
pub(super) async fn all(api: &Api) -> Value {
    let any = || match api.router.models.list() {
        models if models.is_empty() => Err(RouterError::new(ErrorCode::Unavailable, "no model is known")),
        models => Ok(models),
    };
    let models = api.router.once_acquainted(|| ready(any())).await.unwrap_or_default();
    let models: Vec<_> = models.iter().map(|m| card(m)).collect();
    json!({"object": "list", "data": models})
}

pub(super) async fn one(
    State(api): State<Arc<Api>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let model = api.router.once_acquainted(|| ready(find_model(&id, &api.router.models))).await?;
    Ok(Json(card(&model)))
}

/// OpenAI's model object with vLLM's `max_model_len`; `parent` of an adapter is its model. Where vLLM puts folders of the
/// server into `root`, here stands the name.
fn card(model: &ModelEntry) -> Value {
    json!({
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "thalweg",
        "root": model.name,
        "parent": model.adapter.as_ref().map(|adapter| &adapter.base),
        "max_model_len": model.max_model_len,
    })
}
