//! A small HTTP client that shows everything: status, headers, events one by one.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Nothing in these tests takes so long.
const PATIENCE: Duration = Duration::from_secs(120);

/// Talks to one router.
#[derive(Clone)]
pub struct HttpClient {
    address: SocketAddr,
    client: Client<HttpConnector, Full<Bytes>>,
}

/// A reply, read to its end.
#[derive(Debug)]
pub struct Reply {
    /// Status line.
    pub status: StatusCode,
    /// All headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub text: String,
}

/// A reply that is read event by event. Dropping it hangs up.
pub struct EventStream {
    /// Status line.
    pub status: StatusCode,
    /// All headers.
    pub headers: HeaderMap,
    body: Incoming,
    text: String,
    /// The beginning of a character whose end is in the next frame.
    begun: Vec<u8>,
}

impl HttpClient {
    /// Talks to this address.
    pub fn new(address: SocketAddr) -> Self {
        // Without idle connections a dropped reply closes its connection.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http();
        Self { address, client }
    }

    /// A GET, read to its end.
    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, &[], Bytes::new()).await.read().await
    }

    /// A POST of a JSON body, read to its end.
    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_bytes(path, body.to_string()).await
    }

    /// A POST of a JSON text with these headers and no others, read to its end.
    pub async fn post_with(&self, path: &str, headers: &[(&str, &str)], body: String) -> Reply {
        self.send(Method::POST, path, headers, body.into()).await.read().await
    }

    /// A POST of whatever bytes, read to its end.
    pub async fn post_bytes(&self, path: &str, body: impl Into<Bytes>) -> Reply {
        self.send(Method::POST, path, &[("content-type", "application/json")], body.into()).await.read().await
    }

    /// A POST whose reply is read event by event.
    pub async fn open(&self, path: &str, body: &Value) -> EventStream {
        let headers = [("content-type", "application/json")];
        self.send(Method::POST, path, &headers, body.to_string().into()).await
    }

    /// Any request at all.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> EventStream {
        self.try_send(method, path, headers, body).await.expect("an answer")
    }

    /// Any request at all, or why there is no answer.
    pub async fn try_send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> Result<EventStream, String> {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).expect("a sound request");
        let response = tokio::time::timeout(PATIENCE, self.client.request(request)).await;
        let response = response.map_err(|_| format!("no answer within {PATIENCE:?}"))?;
        let (parts, body) = response.map_err(|error| format!("{error:?}"))?.into_parts();
        Ok(EventStream {
            status: parts.status,
            headers: parts.headers,
            body,
            text: String::new(),
            begun: Vec::new(),
        })
    }
}

impl Reply {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error} in {:?}", self.text))
    }

    /// The body's error object.
    pub fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    /// A header, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|v| v.to_str().ok())
    }

    /// The data of every event.
    pub fn events(&self) -> Vec<String> {
        let data = |event: &str| event.strip_prefix("data: ").map(str::to_owned);
        self.text.split("\n\n").filter_map(data).collect()
    }

    /// Every chunk of a stream that is complete.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.text);
        events.iter().map(|e| serde_json::from_str(e).expect("a chunk is JSON")).collect()
    }
}

impl EventStream {
    /// The next event, comments included, without its blank line; None at the end.
    pub async fn next(&mut self) -> Option<String> {
        self.try_next().await.expect("a sound frame in time")
    }

    /// The same, or how the stream broke.
    pub async fn try_next(&mut self) -> Result<Option<String>, String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event = self.text[..end].to_owned();
                self.text.drain(..end + 2);
                return Ok(Some(event));
            }
            let frame = tokio::time::timeout(PATIENCE, self.body.frame()).await;
            let frame = frame.map_err(|_| format!("nothing for {PATIENCE:?}"))?;
            let Some(frame) = frame else { return Ok(None) };
            let data = frame.map_err(|error| format!("{error:?}"))?.into_data().unwrap_or_default();
            self.push(&data)?;
        }
    }

    fn push(&mut self, data: &[u8]) -> Result<(), String> {
        self.begun.extend_from_slice(data);
        let valid = match std::str::from_utf8(&self.begun) {
            Ok(text) => text.len(),
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(error) => return Err(error.to_string()),
        };
        let text = self.begun.drain(..valid).collect();
        self.text.push_str(&String::from_utf8(text).map_err(|error| error.to_string())?);
        Ok(())
    }

    /// Everything up to the end, or how it broke.
    pub async fn try_read(self) -> Result<Reply, String> {
        let Self { status, headers, body, mut text, begun: mut rest } = self;
        let collected = tokio::time::timeout(PATIENCE, body.collect()).await;
        let collected = collected.map_err(|_| format!("no end within {PATIENCE:?}"))?;
        rest.extend_from_slice(&collected.map_err(|error| format!("{error:?}"))?.to_bytes());
        text.push_str(std::str::from_utf8(&rest).map_err(|error| error.to_string())?);
        Ok(Reply { status, headers, text })
    }

    /// Everything up to the end.
    pub async fn read(self) -> Reply {
        self.try_read().await.expect("a whole body in time")
    }
}
