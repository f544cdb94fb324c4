//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use thalweg_proto::ids::WorkerId;

use crate::error::RouterError;
use crate::models::ModelEntry;
use crate::request::{Endpoint, ValidRequest, parse_chat, parse_completion, parse_object};
use crate::sse::chunk::ReplyHead;
use crate::tokenize::{TokenizedPrompt, tokenize_request};
use crate::usage::{Outcome, UsageRecord};

use super::error::ApiError;
use super::session::Session;
use super::{Api, body, headers, stream, whole};

pub(super) async fn chat(State(api): State<Arc<Api>>, request: Request) -> Response {
    generate(api, Endpoint::Chat, request).await.unwrap_or_else(IntoResponse::into_response)
}

pub(super) async fn completions(State(api): State<Arc<Api>>, request: Request) -> Response {
    generate(api, Endpoint::Completions, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn generate(api: Arc<Api>, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    let client_id =
        request.extensions().get::<headers::RequestId>().map(|id| id.0.clone()).unwrap_or_default();
    let mut record = UsageRecord::begin(Arc::clone(&api.metrics), client_id, endpoint);
    let traceparent = headers::traceparent(request.headers());
    let (valid, prompts) = match prepare(&api, endpoint, request).await {
        Ok(prepared) => prepared,
        Err(error) => {
            record.end(Outcome::Failed(error.code));
            return Err(error.into());
        }
    };
    let is_stream = valid.reply().stream;
    let head = reply_head(endpoint, valid.model(), is_stream);
    record.accepted(&valid.model().name, &head.id);
    let session = Session::new(&api, valid, &prompts, head, &traceparent, record);
    if is_stream { stream::respond(&api, session).await } else { whole::respond(&api, session).await }
}

/// Body to token ids, off the reactor.
async fn prepare(
    api: &Arc<Api>,
    endpoint: Endpoint,
    request: Request,
) -> Result<(ValidRequest, Vec<TokenizedPrompt>), RouterError> {
    let bytes = body::read(request, &api.router.config).await?;
    // To tokenise what will be refused would take time from what will not.
    api.router.refuse_when_full()?;
    let parse = || {
        let (shared, bytes) = (Arc::clone(api), bytes.clone());
        api.pool.run(move || parse_and_tokenize(&shared, endpoint, &bytes))
    };
    api.router.once_acquainted(parse).await
}

fn parse_and_tokenize(
    api: &Api,
    endpoint: Endpoint,
    bytes: &Bytes,
) -> Result<(ValidRequest, Vec<TokenizedPrompt>), RouterError> {
    let draw_seed = || api.seeds.draw();
    let served = api.served(&draw_seed);
    let body = parse_object(bytes)?;
    let mut request = match endpoint {
        Endpoint::Chat => parse_chat(body, &served)?,
        Endpoint::Completions => parse_completion(body, &served)?,
    };
    let prompts = tokenize_request(&mut request)?;
    Ok((request, prompts))
}

fn reply_head(endpoint: Endpoint, model: &ModelEntry, stream: bool) -> ReplyHead {
    let (prefix, object) = match (endpoint, stream) {
        (Endpoint::Chat, false) => ("chatcmpl", "chat.completion"),
        (Endpoint::Chat, true) => ("chatcmpl", "chat.completion.chunk"),
        (Endpoint::Completions, _) => ("cmpl", "text_completion"),
    };
    let mut system_fingerprint = "fp_".to_owned();
    for byte in model.fingerprint.iter().take(6) {
        // Writing to a string does not fail.
        let _ = write!(system_fingerprint, "{byte:02x}");
    }
    ReplyHead {
        id: format!("{prefix}-{}", headers::fresh_id()),
        object,
        created: headers::unix_seconds(),
        model: model.name.clone(),
        system_fingerprint,
    }
}

/// Puts the worker's name on a reply, unless that is turned off.
pub(super) fn name_worker(api: &Api, headers: &mut HeaderMap, worker: Option<&WorkerId>) {
    let wanted = worker.filter(|_| api.router.config.worker_header);
    if let Some(value) = wanted.and_then(|w| HeaderValue::from_str(w.as_str()).ok()) {
        headers.insert(headers::WORKER, value);
    }
}
