//! The same inference over gRPC: `Inference` of `proto/thalweg/v1/inference.proto`, for callers within the cluster's
//! network. What a request means, costs and may do is decided where it is for HTTP.

mod calls;
mod guard;
mod reply;
mod server;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use futures::stream::{self, StreamExt};
use thalweg_proto::v1;
use thalweg_proto::v1::inference_server::Inference;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::auth::Grant;
use crate::error::RouterError;
use crate::request::Endpoint;
use crate::sse::chunk;

use super::asked::Asked;
use super::body::too_large;
use super::generate::begin;
use super::headers::id_of;
use super::models;
use super::script::ChunkScript;
use super::session::Session;
use super::stream::{Events, Script};
use super::trace::Trace;
use super::{Api, whole};
use calls::Calls;

pub(crate) use server::{GrpcListener, GrpcServer};

/// The metadata that says how long the caller waits.
const TIMEOUT: &str = "grpc-timeout";

/// Answers callers; every answer that is on its way is counted.
#[derive(Clone)]
struct InferenceService {
    api: Arc<Api>,
    calls: Calls,
}

type Reply = Pin<Box<dyn Stream<Item = Result<v1::InferenceResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for InferenceService {
    type ChatStream = Reply;
    type CompleteStream = Reply;

    async fn chat(&self, request: Request<v1::InferenceRequest>) -> Result<Response<Reply>, Status> {
        Ok(self.answer(Endpoint::Chat, request))
    }

    async fn complete(&self, request: Request<v1::InferenceRequest>) -> Result<Response<Reply>, Status> {
        Ok(self.answer(Endpoint::Completions, request))
    }

    async fn list_models(
        &self,
        _request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let mut json = Vec::new();
        chunk::json(&mut json, &models::all(&self.api).await);
        Ok(Response::new(v1::ListModelsResponse { json: json.into() }))
    }
}

impl InferenceService {
    /// Returns at once, and whatever is wrong ends the stream: the caller's deadline is ours to tell of, not the
    /// transport's. Dropping the stream, as the transport does when the caller goes away, cancels all that was begun.
    fn answer(&self, endpoint: Endpoint, request: Request<v1::InferenceRequest>) -> Response<Reply> {
        let (metadata, mut extensions, message) = request.into_parts();
        let headers = metadata.into_headers();
        let asked = Asked {
            grant: extensions.remove::<Arc<Grant>>().unwrap_or_else(|| Arc::new(Grant::open())),
            client_id: id_of(&headers),
            trace: Trace::of(&headers),
            patience: headers.get(TIMEOUT).and_then(|v| v.to_str().ok()).and_then(patience),
        };
        let mut own = MetadataMap::new();
        if let Ok(id) = asked.client_id.parse() {
            own.insert("x-request-id", id);
        }
        let (api, call) = (Arc::clone(&self.api), self.calls.begin());
        let begun = async move {
            let bytes_max = api.router.config.limits.body_bytes_max;
            let fits = message.json.len() <= bytes_max;
            let body = async move { if fits { Ok(message.json) } else { Err(too_large(bytes_max)) } };
            begin(&api, endpoint, &asked, body).await
        };
        let replies = stream::once(begun).map(replies).flatten().map(move |item| {
            let _running = &call;
            item.map(|json| v1::InferenceResponse { json }).map_err(|error| reply::status(&error))
        });
        let mut response = Response::new(Box::pin(replies) as Reply);
        *response.metadata_mut() = own;
        response
    }
}

type Json = Result<bytes::Bytes, RouterError>;

/// The messages of an answer, or why there is none.
fn replies(begun: Result<Session, RouterError>) -> Pin<Box<dyn Stream<Item = Json> + Send>> {
    let mut session = match begun {
        Ok(session) => session,
        Err(error) => return Box::pin(stream::once(std::future::ready(Err(error)))),
    };
    if !session.request.reply().stream {
        return Box::pin(stream::once(async move { whole::bytes(&mut session).await.map(Into::into) }));
    }
    let script = Script::Chunks(ChunkScript::new(&session));
    // HTTP/2 has pings of its own.
    let events = Events::new(session, script, Duration::ZERO);
    let frames = stream::unfold(events, |mut events| async move { Some((events.next().await?, events)) });
    Box::pin(frames.flat_map(|frame| {
        stream::iter(match frame {
            Ok(bytes) => reply::chunks(&bytes).map(Ok).collect(),
            Err(error) => vec![Err(error)],
        })
    }))
}

/// `100m`: at most eight digits and a unit, as gRPC has it. None of what is not sound: it asks for nothing.
fn patience(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read() {
        let check =
            |text: &str, ms: Option<u64>| assert_eq!(patience(text), ms.map(Duration::from_millis), "{text}");
        check("100m", Some(100));
        check("2S", Some(2000));
        check("1M", Some(60_000));
        check("1H", Some(3_600_000));
        check("5000u", Some(5));
        check("7000000n", Some(7));
        for wrong in ["", "m", "1", "1x", "-1S", "123456789S", "1ž"] {
            check(wrong, None);
        }
    }
}
