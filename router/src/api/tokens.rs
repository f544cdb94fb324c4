//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use bytes::Bytes;
use serde_json::{Value, json};

use crate::error::RouterError;
use crate::request::{parse_detokenize, parse_object, parse_tokenize};
use crate::router::RouterState;
use crate::tokenize;

use super::error::ApiError;
use super::{Api, body};

pub(super) async fn tokenize(State(api): State<Arc<Api>>, request: Request) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(request, &api.router.config).await?;
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
    let bytes = body::read(request, &api.router.config).await?;
    let work = |bytes: &Bytes, router: &RouterState| {
        let request = parse_detokenize(parse_object(bytes)?, &router.models)?;
        Ok(json!({"prompt": request.model.tokenizer.decode(&request.tokens, false)}))
    };
    Ok(Json(in_pool(&api, bytes, work).await?))
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
