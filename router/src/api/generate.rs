//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::fmt::Write;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::WorkerId;

use crate::auth::Grant;
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
    let grant = grant(&request);
    let log = api.router.usage_log.clone();
    let mut record =
        UsageRecord::begin(Arc::clone(&api.metrics), log, Arc::clone(&grant), client_id, endpoint.as_str());
    let traceparent = headers::traceparent(request.headers());
    let (valid, prompts) = match prepare(&api, endpoint, &grant, request).await {
        Ok(prepared) => prepared,
        Err(error) => {
            record.end(Outcome::Failed(error.code));
            return Err(error.into());
        }
    };
    let is_stream = valid.reply().stream;
    let head = reply_head(endpoint, valid.model(), is_stream);
    record.accepted(&valid.model().name, &head.id);
    let session = Session::new(&api, &grant, valid, &prompts, head, &traceparent, record);
    if is_stream { stream::respond(&api, session).await } else { whole::respond(&api, session).await }
}

/// What the layer in front of all routes let this request do.
pub(super) fn grant(request: &Request) -> Arc<Grant> {
    request.extensions().get::<Arc<Grant>>().cloned().unwrap_or_else(|| Arc::new(Grant::open()))
}

/// Body to token ids, off the reactor.
async fn prepare(
    api: &Arc<Api>,
    endpoint: Endpoint,
    grant: &Arc<Grant>,
    request: Request,
) -> Result<(ValidRequest, Vec<TokenizedPrompt>), RouterError> {
    let bytes = body::read(request, &api.router.config).await?;
    // To tokenise what will be refused would take time from what will not.
    api.router.refuse_when_full()?;
    let parse = || {
        let (shared, grant, bytes) = (Arc::clone(api), Arc::clone(grant), bytes.clone());
        api.pool.run(move || parse_and_tokenize(&shared, endpoint, &grant, &bytes))
    };
    let (request, prompts) = api.router.once_acquainted(parse).await?;
    check_structure(&request).await?;
    Ok((request, prompts))
}

/// Not in the pool: who waits for a grammar takes no time from those who have none.
async fn check_structure(request: &ValidRequest) -> Result<(), RouterError> {
    let Some(structure) = request.structure().cloned() else { return Ok(()) };
    let model = Arc::clone(request.model());
    let checked = tokio::task::spawn_blocking(move || structure.check(&model)).await;
    checked.unwrap_or_else(|error| {
        tracing::error!(%error, "a grammar could not be compiled");
        Err(RouterError::new(
            ErrorCode::Internal,
            "the grammar could not be compiled; the router's log says why",
        ))
    })
}

fn parse_and_tokenize(
    api: &Api,
    endpoint: Endpoint,
    grant: &Grant,
    bytes: &Bytes,
) -> Result<(ValidRequest, Vec<TokenizedPrompt>), RouterError> {
    let draw_seed = || api.seeds.draw();
    let served = api.served(&draw_seed);
    let body = parse_object(bytes)?;
    let mut request = match endpoint {
        Endpoint::Chat => parse_chat(body, &served)?,
        Endpoint::Completions => parse_completion(body, &served)?,
    };
    request.restrict(grant)?;
    let prompts = tokenize_request(&mut request)?;
    request.let_think(&prompts);
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
