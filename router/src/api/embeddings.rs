//! `POST /v1/embeddings`: each input goes its own way to a worker, as prompts of other requests do.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderValue, header};
use serde::Serialize;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::WorkerId;

use crate::auth::Grant;
use crate::dispatch::{GenerationEvent, Tokenized};
use crate::error::RouterError;
use crate::request::{Encoding, ValidEmbedding, parse_embedding, parse_object};
use crate::tokenize::tokenize_inputs;
use crate::usage::{Outcome, Usage, UsageRecord};

use super::answer::{Answer, Event};
use super::asked::{Asked, prompt_id};
use super::error::ApiError;
use super::generate::name_worker;
use super::{Api, body, headers};

/// As metrics and records call it.
const ENDPOINT: &str = "embeddings";
/// Inputs of one request that wait and run at a time: enough to fill the batches of some workers, and no more than others
/// should find before them in the queue.
const AT_ONCE_MAX: usize = 64;

pub(super) async fn embeddings(State(api): State<Arc<Api>>, request: Request) -> Response {
    let asked = Asked::over_http(&request);
    let mut record = asked.record(&api, ENDPOINT);
    let answered = embed(&api, &asked, request, &mut record).await;
    record.end(answered.as_ref().map_or_else(|error| Outcome::Failed(error.code), |_| Outcome::Complete));
    answered.unwrap_or_else(|error| ApiError(error).into_response())
}

async fn embed(
    api: &Arc<Api>,
    asked: &Asked,
    request: Request,
    record: &mut UsageRecord,
) -> Result<Response, RouterError> {
    let (request, inputs) = prepare(api, &asked.grant, request).await?;
    let id = format!("embd-{}", headers::fresh_id());
    record.accepted(&request.model().name, &id);
    let mut tokenized = tokenized(api, asked, &request, inputs, &id);
    tokenized.iter_mut().for_each(|input| input.taken = Arc::clone(record.taken()));
    let at_once = api.router.requests_at_once(&asked.grant).clamp(1, AT_ONCE_MAX);
    let answer = Answer::new(&api.router.dispatcher, tokenized.clone(), Some(at_once));
    let Embedded { vectors, worker } = collect(answer, &tokenized, record).await?;
    let prompt_tokens = tokenized.iter().map(|t| t.prompt_ids.len() as u64).sum();
    // Thousands of vectors are megabytes of digits.
    let json = api.pool.run(move || to_json(&request, vectors, id, prompt_tokens)).await?;
    let mut response = Response::new(Body::from(json));
    let content_type = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, content_type);
    name_worker(api, response.headers_mut(), worker.as_ref());
    Ok(response)
}

/// A sound request, and the token ids of its inputs.
type Prepared = (ValidEmbedding, Vec<Arc<[u32]>>);

/// Body to token ids, off the reactor.
async fn prepare(api: &Arc<Api>, grant: &Arc<Grant>, request: Request) -> Result<Prepared, RouterError> {
    let bytes = body::read(request, api).await?;
    api.router.refuse_when_full()?;
    let parse = || {
        let (shared, grant, bytes) = (Arc::clone(api), Arc::clone(grant), bytes.clone());
        api.pool.run(move || parse_and_tokenize(&shared, &grant, &bytes))
    };
    api.router.once_acquainted(parse).await
}

fn parse_and_tokenize(api: &Api, grant: &Grant, bytes: &Bytes) -> Result<Prepared, RouterError> {
    let router = &api.router;
    let mut request =
        parse_embedding(parse_object(bytes)?, &router.models, &|model| router.workers.embedding(model))?;
    request.restrict(grant)?;
    let inputs = tokenize_inputs(&mut request)?;
    Ok((request, inputs))
}

fn tokenized(
    api: &Api,
    asked: &Asked,
    request: &ValidEmbedding,
    inputs: Vec<Arc<[u32]>>,
    id: &str,
) -> Vec<Tokenized> {
    let count = inputs.len();
    let one = |(at, prompt_ids)| Tokenized {
        request_id: prompt_id(id, at, count),
        embedding: Some(request.info()),
        priority: request.priority(),
        ..asked.tokenized(api, request.model(), prompt_ids, request.cache_salt())
    };
    inputs.into_iter().enumerate().map(one).collect()
}

/// Vectors in the order of the inputs, and who made the first one.
struct Embedded {
    vectors: Vec<Vec<f32>>,
    worker: Option<WorkerId>,
}

async fn collect(
    mut answer: Answer,
    inputs: &[Tokenized],
    record: &mut UsageRecord,
) -> Result<Embedded, RouterError> {
    let mut vectors = vec![Vec::new(); inputs.len()];
    let (mut first, mut usage) = (None, Usage::default());
    while let Some(item) = answer.next().await {
        match item.map_err(|error| with_progress(error, &vectors))? {
            (_, Event::Placed(worker, _)) => {
                record.worker(worker.as_str());
                first.get_or_insert(worker);
            }
            (at, Event::Output(GenerationEvent::Prompt(info))) => {
                usage.cached_tokens += u64::from(info.cached_tokens);
                record.progress(usage);
                vectors[at] = info.embedding;
            }
            (_, Event::Output(GenerationEvent::Deltas(_))) => {}
        }
    }
    if vectors.iter().any(Vec::is_empty) {
        let message = "a worker ended an input without its embedding";
        return Err(RouterError::new(ErrorCode::Internal, message));
    }
    Ok(Embedded { vectors, worker: first })
}

/// Who ran out of time is told how many inputs fit into it.
fn with_progress(error: RouterError, vectors: &[Vec<f32>]) -> RouterError {
    if error.code != ErrorCode::DeadlineExceeded {
        return error;
    }
    let done = vectors.iter().filter(|vector| !vector.is_empty()).count();
    let message = format!("{}; {done} of {} inputs were done by then", error.message, vectors.len());
    RouterError { message, ..error }
}

/// OpenAI's list of embeddings with vLLM's `id` and `created`.
#[derive(Serialize)]
struct Reply<'a> {
    object: &'static str,
    id: String,
    created: u64,
    model: &'a str,
    data: Vec<Item>,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct Item {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: u64,
    total_tokens: u64,
}

fn to_json(
    request: &ValidEmbedding,
    vectors: Vec<Vec<f32>>,
    id: String,
    prompt_tokens: u64,
) -> Result<Vec<u8>, RouterError> {
    let item = |(index, mut vector): (usize, Vec<f32>)| {
        if let Some(dimensions) = request.dimensions() {
            shorten(&mut vector, dimensions);
        }
        let embedding = match request.encoding() {
            Encoding::Float => Vector::Float(vector),
            Encoding::Base64 => Vector::Base64(base64(&vector)),
        };
        Item { object: "embedding", index, embedding }
    };
    let reply = Reply {
        object: "list",
        id,
        created: headers::unix_seconds(),
        model: &request.model().name,
        data: vectors.into_iter().enumerate().map(item).collect(),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    };
    serde_json::to_vec(&reply).map_err(|error| RouterError::new(ErrorCode::Internal, error.to_string()))
}

/// The first `dimensions` numbers, of length 1 again.
fn shorten(vector: &mut Vec<f32>, dimensions: usize) {
    vector.truncate(dimensions);
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
}

fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_vectors_have_the_length_1() {
        let check = |vector: &[f32], dimensions: usize, expected: &[f32]| {
            let mut vector = vector.to_vec();
            shorten(&mut vector, dimensions);
            assert_eq!(vector, expected);
        };
        check(&[0.3, 0.4, 0.866], 2, &[0.6, 0.8]);
        check(&[-0.5, 0.5], 1, &[-1.0]);
        check(&[0.0, 1.0], 1, &[0.0]);
    }

    /// RFC 4648 by another hand: 1.0 is 00 00 80 3f.
    #[test]
    fn base64_is_of_little_endian_numbers() {
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[1.0, -2.0]), "AACAPwAAAMA=");
    }
}
