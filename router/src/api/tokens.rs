//! `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`.

use std::future::ready;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::error::RouterError;
use crate::models::ModelEntry;
use crate::request::common::find_model;
use crate::request::{parse_detokenize, parse_object, parse_tokenize};
use crate::router::RouterState;
use crate::tokenize;

use super::error::ApiError;
use super::{Api, body};

pub(super) async fn tokenize(State(api): State<Arc<Api>>, request: Request) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(request, &api).await?;
    let work = |bytes: &Bytes, router: &RouterState| {
        let request = parse_tokenize(parse_object(bytes)?, &router.models)?;
        let tokens = tokenize::tokenize(&request.prompt, &request.model, None)?;
        let texts = request
            .return_token_strs
            .then(|| tokens.iter().map(|id| request.model.tokenizer.token_text(*id)).collect::<Vec<_>>());
        Ok(json!({
            "count": tokens.len(),
            "max_model_len": request.model.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }))
    };
    Ok(Json(in_pool(&api, bytes, work).await?))
}

pub(super) async fn detokenize(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(request, &api).await?;
    let work = |bytes: &Bytes, router: &RouterState| {
        let request = parse_detokenize(parse_object(bytes)?, &router.models)?;
        Ok(json!({"prompt": request.model.tokenizer.decode(&request.tokens, false)}))
    };
    Ok(Json(in_pool(&api, bytes, work).await?))
}

/// What clients that tokenise by the two above need to know beside them, as vLLM tells it: of the first model, which those
/// mean too where none is named.
pub(super) async fn info(State(api): State<Arc<Api>>) -> Result<Json<Value>, ApiError> {
    let first = || match api.router.models.list().first() {
        Some(model) => Ok(Arc::clone(model)),
        None => find_model("", &api.router.models),
    };
    let model = api.router.once_acquainted(|| ready(first())).await?;
    Ok(Json(tokenizer_info(&model)))
}

fn tokenizer_info(model: &ModelEntry) -> Value {
    let bundle = model.tokenizer.bundle();
    let text = |id: Option<u32>| id.map(|id| model.tokenizer.token_text(id));
    // Of several ids that end an answer, the one that the model's files call so.
    let named = |name: &str| bundle.template_tokens.get(name).cloned();
    let eos = named("eos_token").or_else(|| text(bundle.eos_ids.first().copied()));
    json!({
        "model": model.name,
        "bos_token": text(bundle.bos_id),
        "eos_token": eos,
        "pad_token": named("pad_token").or_else(|| eos.clone()),
        "add_bos_token": bundle.add_bos,
        "model_max_length": model.max_model_len,
        "chat_template": model.template.as_ref().map(|template| template.source()),
    })
}

/// Off the reactor, and again while the model may still become known.
async fn in_pool(
    api: &Api,
    bytes: Bytes,
    work: impl Fn(&Bytes, &RouterState) -> Result<Value, RouterError> + Copy + Send + 'static,
) -> Result<Value, RouterError> {
    let run = || {
        let (router, bytes) = (Arc::clone(&api.router), bytes.clone());
        api.pool.run(move || work(&bytes, &router))
    };
    api.router.once_acquainted(run).await
}
