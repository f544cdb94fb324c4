//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use serde_json::{Value, json};

use crate::request::{parse_detokenize, parse_object, parse_tokenize};
use crate::tokenize;

use super::error::ApiError;
use super::{Api, body};

pub(super) async fn tokenize(State(api): State<Arc<Api>>, request: Request) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(request, &api.router.config).await?;
    let router = Arc::clone(&api.router);
    let work = move || {
        let request = parse_tokenize(parse_object(&bytes)?, &router.models)?;
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
    Ok(Json(api.pool.run(work).await?))
}

pub(super) async fn detokenize(
    State(api): State<Arc<Api>>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(request, &api.router.config).await?;
    let router = Arc::clone(&api.router);
    let work = move || {
        let request = parse_detokenize(parse_object(&bytes)?, &router.models)?;
        Ok(json!({"prompt": request.model.tokenizer.decode(&request.tokens, false)}))
    };
    Ok(Json(api.pool.run(work).await?))
}
