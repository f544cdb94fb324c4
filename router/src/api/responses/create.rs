//! `POST /v1/responses`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use thalweg_proto::code::ErrorCode;

use crate::auth::Grant;
use crate::error::RouterError;
use crate::request::responses::{Draft, Echo, parse_responses, translated};
use crate::request::{Endpoint, ValidRequest, parse_object};
use crate::responses_store::Reach;
use crate::tokenize::{TokenizedPrompt, tokenize_request};
use crate::usage::Outcome;

use super::super::asked::Asked;
use super::super::error::ApiError;
use super::super::generate::{check_structure, name_worker, reply_head};
use super::super::session::Session;
use super::super::stream::{self, Script};
use super::super::{Api, body, whole};
use super::script::{Keeping, ResponseScript};
use super::stored::find;

/// A request that is ready to run, and what its reply repeats.
type Prepared = (ValidRequest, Vec<TokenizedPrompt>, Echo);

pub(crate) async fn create(State(api): State<Arc<Api>>, request: Request) -> Response {
    answer(api, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn answer(api: Arc<Api>, request: Request) -> Result<Response, ApiError> {
    let asked = Asked::over_http(&request);
    let mut record = asked.record(&api, Endpoint::Responses.as_str());
    let prepared = match body::read(request, &api).await {
        Ok(bytes) => prepare(&api, &asked.grant, bytes).await,
        Err(error) => Err(error),
    };
    let (valid, prompts, echo) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            record.end(Outcome::Failed(error.code));
            return Err(translated(error).into());
        }
    };
    let is_stream = valid.reply().stream;
    let head = reply_head(Endpoint::Responses, valid.model(), is_stream);
    record.accepted(&valid.model().name, &head.id);
    let keeping =
        Keeping::new(&api.router.responses, &asked.grant.tenant, echo.history, echo.input, echo.store);
    let mut script = ResponseScript::new(&head, echo.fields, keeping, valid.reply(), is_stream);
    let mut session = Session::new(&api, &asked, valid, &prompts, head, record);
    if is_stream {
        return stream::respond(&api, session, Script::Response(Box::new(script))).await;
    }
    let mut pieces = Vec::new();
    while session.next(&mut pieces).await? {
        for piece in pieces.drain(..) {
            script.piece(&session, &piece);
        }
    }
    let reply = script.finish(session.assembly.usage()).await;
    let mut response = whole::json_reply(&reply);
    name_worker(&api, response.headers_mut(), session.worker.as_ref());
    Ok(response)
}

/// A body that has been read.
enum Read {
    Ready(Box<Prepared>),
    Continues(Box<Continuing>),
}

/// A request that goes on from a response, which has to be found first.
#[derive(Clone)]
struct Continuing {
    draft: Draft,
    previous: String,
    store: bool,
}

/// Body to token ids, off the reactor: at one go where nothing has to be looked up, since who waits for a thread twice comes
/// to the queue behind all those who wait once.
async fn prepare(api: &Arc<Api>, grant: &Arc<Grant>, bytes: Bytes) -> Result<Prepared, RouterError> {
    // To tokenise what will be refused would take time from what will not.
    api.router.refuse_when_full()?;
    let first = || {
        let (shared, grant, bytes) = (Arc::clone(api), Arc::clone(grant), bytes.clone());
        api.pool.run(move || {
            let draft = Draft::read(parse_object(&bytes)?)?;
            let store = may_keep(&shared, &draft)?;
            Ok(match draft.previous.clone() {
                Some(previous) => Read::Continues(Box::new(Continuing { draft, previous, store })),
                None => Read::Ready(Box::new(parse_and_tokenize(&shared, &grant, draft, Vec::new(), store)?)),
            })
        })
    };
    let (request, prompts, echo) = match api.router.once_acquainted(first).await? {
        Read::Ready(prepared) => *prepared,
        Read::Continues(continuing) => go_on(api, grant, &continuing).await?,
    };
    check_structure(&request).await?;
    Ok((request, prompts, echo))
}

async fn go_on(api: &Arc<Api>, grant: &Arc<Grant>, continuing: &Continuing) -> Result<Prepared, RouterError> {
    let found = find(api, &grant.tenant, &continuing.previous).await.map_err(of_previous)?;
    let parse = || {
        let (shared, grant, found) = (Arc::clone(api), Arc::clone(grant), found.clone());
        let Continuing { draft, store, .. } = continuing.clone();
        api.pool.run(move || {
            let history = found.parse()?.into_items();
            parse_and_tokenize(&shared, &grant, draft, history, store)
        })
    };
    api.router.once_acquainted(parse).await
}

fn parse_and_tokenize(
    api: &Api,
    grant: &Grant,
    draft: Draft,
    history: Vec<serde_json::Value>,
    store: bool,
) -> Result<Prepared, RouterError> {
    let draw_seed = || api.seeds.draw();
    let served = api.served(&draw_seed);
    let (mut request, echo) = parse_responses(draft, history, store, &served)?;
    request.restrict(grant)?;
    let prompts = tokenize_request(&mut request)?;
    request.let_think(&prompts);
    Ok((request, prompts, echo))
}

/// Whether the answer is to be kept. A refusal where the client relies on what would not be found again.
fn may_keep(api: &Api, draft: &Draft) -> Result<bool, RouterError> {
    let routers = api.router.live_routers();
    let why_not = match api.router.responses.reach() {
        Reach::Cluster => None,
        Reach::Process if routers <= 1 => None,
        Reach::Process => Some(format!(
            "{routers} routers serve this API, and without Redis each would keep responses to itself; start them with \
             --index redis://.."
        )),
        Reach::Nowhere => Some(
            "this router keeps no responses (--response-store none); start it with another one".to_owned(),
        ),
    };
    let Some(why_not) = why_not else { return Ok(draft.store.unwrap_or(true)) };
    let wish = match (&draft.previous, draft.store) {
        (Some(_), _) => "previous_response_id",
        (None, Some(true)) => "store",
        (None, _) => return Ok(false),
    };
    let message = format!("`{wish}` is not available: {why_not}; or send the whole conversation in `input`");
    Err(RouterError::field(wish, message))
}

fn of_previous(error: RouterError) -> RouterError {
    match error.code {
        ErrorCode::ResponseNotFound => {
            RouterError { param: Some("previous_response_id".to_owned()), ..error }
        }
        _ => error,
    }
}
