//! Requests over HTTP/1.1, and the answers as they stream in.

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::time::{Instant, timeout};

use crate::answer::Answer;
use crate::error::LoadError;
use crate::plan::Plan;
use crate::record::{Failure, Record};
use crate::sse::EventReader;

/// Where the server says which worker answered.
const WORKER: &str = "x-thalweg-worker";
/// Longest list of models that is read.
const MODELS_BYTES_MAX: usize = 1 << 20;

/// A server, as one plan talks to it.
pub(crate) struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
    base: String,
    generate: Uri,
    headers: HeaderMap,
    timeout: std::time::Duration,
}

#[derive(serde::Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(serde::Deserialize)]
struct Model {
    id: String,
}

impl Client {
    pub(crate) fn new(plan: &Plan) -> Result<Self, LoadError> {
        let base = plan.url.to_string();
        let generate = format!("{base}{}", plan.endpoint.path())
            .parse()
            .map_err(|error| LoadError::Plan { what: format!("{base} cannot be asked: {error}") })?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(key) = &plan.api_key {
            headers.insert(AUTHORIZATION, key.header());
        }
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let pool = Pool::builder(TokioExecutor::new()).build(connector);
        Ok(Self { pool, base, generate, headers, timeout: plan.timeout })
    }

    /// The server's first model.
    pub(crate) async fn first_model(&self) -> Result<String, LoadError> {
        let failed = |reason: String| LoadError::Models { url: self.base.clone(), reason };
        let uri = format!("{}/v1/models", self.base).parse().map_err(|error| failed(format!("{error}")))?;
        let response = timeout(self.timeout, self.send(Method::GET, uri, Vec::new()));
        let response =
            response.await.map_err(|_| failed("no answer".into()))?.map_err(|error| failed(words(&error)))?;
        if response.status() != StatusCode::OK {
            return Err(failed(response.status().to_string()));
        }
        let body = Limited::new(response.into_body(), MODELS_BYTES_MAX).collect();
        let body = body.await.map_err(|error| failed(error.to_string()))?.to_bytes();
        let models: Models = serde_json::from_slice(&body).map_err(|error| failed(error.to_string()))?;
        let first = models.data.into_iter().next();
        first.map(|model| model.id).ok_or_else(|| failed("it serves no model".into()))
    }

    /// Sends one request and follows its answer to the end; gives the answer's text too.
    pub(crate) async fn generate(&self, body: Vec<u8>) -> (Record, String) {
        let sent = Instant::now();
        let mut answer = Answer::default();
        let outcome = timeout(self.timeout, self.follow(body, sent, &mut answer)).await;
        answer.finish(sent.elapsed(), outcome.unwrap_or(Err(Failure::Timeout)))
    }

    async fn follow(&self, body: Vec<u8>, sent: Instant, answer: &mut Answer) -> Result<(), Failure> {
        let response =
            self.send(Method::POST, self.generate.clone(), body).await.map_err(|_| Failure::Connection)?;
        let worker = response.headers().get(WORKER);
        answer.set_worker(worker.and_then(|name| name.to_str().ok()));
        if response.status() != StatusCode::OK {
            return Err(Failure::Status(response.status().as_u16()));
        }
        let mut body = response.into_body();
        let mut reader = EventReader::default();
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else { return Err(Failure::Cut) };
            let Some(bytes) = frame.data_ref() else { continue };
            let now = sent.elapsed();
            reader.push(bytes, |data| answer.take(data, now)).map_err(|_| Failure::Malformed)?;
        }
        answer.end()
    }

    async fn send(
        &self,
        method: Method,
        uri: Uri,
        body: Vec<u8>,
    ) -> Result<Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.headers_mut() = self.headers.clone();
        self.pool.request(request).await
    }
}

/// The causes too, which hyper's errors leave to their sources.
fn words(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |cause| cause.source())
        .fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}
