//! What comes and goes beside the body: ids, the worker's name.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_ID_BYTES_MAX: usize = 128;

/// Name of the worker that serves a request.
pub(super) const WORKER: HeaderName = HeaderName::from_static("x-thalweg-worker");

/// The id by which the client knows its request: what it sent, or one of ours.
#[derive(Clone)]
pub(super) struct RequestId(pub(super) String);

/// Reads x-request-id or draws one, and puts it on the reply.
pub(super) async fn request_id(mut request: Request, next: Next) -> Response {
    let id = id_of(request.headers());
    let header = HeaderValue::from_str(&id);
    request.extensions_mut().insert(RequestId(id));
    let mut response = next.run(request).await;
    if let Ok(header) = header {
        response.headers_mut().insert(REQUEST_ID, header);
    }
    response
}

/// The client's own id, if it is sound, or one of ours.
pub(super) fn id_of(headers: &HeaderMap) -> String {
    let sent = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    sent.filter(|id| is_sound_id(id)).map_or_else(fresh_id, str::to_owned)
}

/// 128 random bits. Workers know requests by ids of ours, since two clients may send the same one.
pub(super) fn fresh_id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

pub(super) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Visible ASCII of a modest length: it goes into logs and headers as it is.
fn is_sound_id(id: &str) -> bool {
    (1..=REQUEST_ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
}

/// Seeds of requests that bring none: random, or one after the other from a configured start.
pub(super) struct Seeds {
    configured: Option<u64>,
    drawn: AtomicU64,
}

impl Seeds {
    pub(super) fn new(configured: Option<u64>) -> Self {
        Self { configured, drawn: AtomicU64::new(0) }
    }

    pub(super) fn draw(&self) -> u64 {
        match self.configured {
            None => rand::random(),
            Some(start) => start.wrapping_add(self.drawn.fetch_add(1, Ordering::Relaxed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_checked() {
        let check = |id: &str, sound: bool| assert_eq!(is_sound_id(id), sound, "{id:?}");
        check("abc-123", true);
        check("", false);
        check("a b", false);
        check("a\tb", false);
        check("ž", false);
        check(&"x".repeat(128), true);
        check(&"x".repeat(129), false);
    }
}
