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
use crate::usage::Outcome;

use super::asked::Asked;
use super::error::ApiError;
use super::script::ChunkScript;
use super::session::Session;
use super::stream::Script;
use super::{Api, body, headers, stream, whole};

pub(super) async fn chat(State(api): State<Arc<Api>>, request: Request) -> Response {
    generate(api, Endpoint::Chat, request).await.unwrap_or_else(IntoResponse::into_response)
}

pub(super) async fn completions(State(api): State<Arc<Api>>, request: Request) -> Response {
    generate(api, Endpoint::Completions, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn generate(api: Arc<Api>, endpoint: Endpoint, request: Request) -> Result<Response, ApiError> {
    let asked = Asked::over_http(&request);
    let shared = Arc::clone(&api);
    let body = async move { body::read(request, &shared).await };
    let session = begin(&api, endpoint, &asked, body).await?;
    if session.request.reply().stream {
        let script = Script::Chunks(ChunkScript::new(&session));
        stream::respond(&api, session, script).await
    } else {
        whole::respond(&api, session).await
    }
}

/// Reads, checks and tokenises a request, to run at the first call of the session's `next`.
pub(super) async fn begin(
    api: &Arc<Api>,
    endpoint: Endpoint,
    asked: &Asked,
    body: impl Future<Output = Result<Bytes, RouterError>>,
) -> Result<Session, RouterError> {
    let mut record = asked.record(api, endpoint.as_str());
    let prepared = match body.await {
        Ok(bytes) => prepare(api, endpoint, &asked.grant, bytes).await,
        Err(error) => Err(error),
    };
    let (valid, prompts) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            record.end(Outcome::Failed(error.code));
            return Err(error);
        }
    };
    let head = reply_head(endpoint, valid.model(), valid.reply().stream);
    record.accepted(&valid.model().name, &head.id);
    Ok(Session::new(api, asked, valid, &prompts, head, record))
}

/// Body to token ids, off the reactor.
async fn prepare(
    api: &Arc<Api>,
    endpoint: Endpoint,
    grant: &Arc<Grant>,
    bytes: Bytes,
) -> Result<(ValidRequest, Vec<TokenizedPrompt>), RouterError> {
    // To tokenise what will be refused would take time from what will not.
    api.router.refuse_when_full()?;
    let parse = || {
        let (shared, grant, bytes) = (Arc::clone(api), Arc::clone(grant), bytes.clone());
        api.pool.run(move || parse_and_tokenize(&shared, endpoint, &grant, &bytes))
    };
    let (request, prompts) = api.router.once_acquainted(parse).await?;
    let most = api.router.requests_at_once(grant);
    if prompts.len() > most {
        let message = format!(
            "`prompt` holds {} prompts, but only {most} may be here at a time; send fewer",
            prompts.len()
        );
        return Err(RouterError::field("prompt", message));
    }
    check_structure(&request).await?;
    Ok((request, prompts))
}

/// Not in the pool: who waits for a grammar takes no time from those who have none.
pub(super) async fn check_structure(request: &ValidRequest) -> Result<(), RouterError> {
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
        Endpoint::Completions => parse_completion(body, &served)?,
        // A response's conversation is put together before it comes here.
        Endpoint::Chat | Endpoint::Responses => parse_chat(body, &served)?,
    };
    request.restrict(grant)?;
    let prompts = tokenize_request(&mut request)?;
    request.let_think(&prompts);
    Ok((request, prompts))
}

pub(super) fn reply_head(endpoint: Endpoint, model: &ModelEntry, stream: bool) -> ReplyHead {
    let (prefix, object) = match (endpoint, stream) {
        (Endpoint::Chat, false) => ("chatcmpl-", "chat.completion"),
        (Endpoint::Chat, true) => ("chatcmpl-", "chat.completion.chunk"),
        (Endpoint::Completions, _) => ("cmpl-", "text_completion"),
        (Endpoint::Responses, _) => ("resp_", "response"),
    };
    let mut system_fingerprint = "fp_".to_owned();
    for byte in model.fingerprint.iter().take(6) {
        // Writing to a string does not fail.
        let _ = write!(system_fingerprint, "{byte:02x}");
    }
    ReplyHead {
        id: format!("{prefix}{}", headers::fresh_id()),
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
