//! Replies as gRPC carries them.

use bytes::Bytes;
use tonic::{Code, Status};

use crate::error::{RouterError, bounded};
use crate::sse::chunk::{DONE, error_object};

/// When a new try may succeed, in seconds.
const RETRY_AFTER: &str = "retry-after";

/// A status whose details are OpenAI's error object.
pub(super) fn status(error: &RouterError) -> Status {
    let message = bounded(&error.message).into_owned();
    let mut metadata = error.code.status("").metadata().clone();
    if let Some(after) = error.retry_after {
        let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
        metadata.insert(RETRY_AFTER, seconds.into());
    }
    Status::with_details_and_metadata(error.code.grpc(), message, details(&error_object(error)), metadata)
}

/// A status for who shows no key that is known here.
pub(super) fn unauthenticated(message: &str) -> Status {
    let error = serde_json::json!({"error": {
        "message": message, "type": "authentication_error", "param": null, "code": "invalid_api_key",
    }});
    Status::with_details(Code::Unauthenticated, message, details(&error))
}

/// The chunks of a stretch of server-sent events that each are one line of JSON, as `ChunkWriter` writes them.
pub(super) fn chunks(events: &Bytes) -> impl Iterator<Item = Bytes> {
    const BEFORE: &[u8] = b"data: ";
    const BEHIND: &[u8] = b"\n\n";
    let is_chunk = |event: &&[u8]| event.starts_with(BEFORE) && *event != DONE;
    let whole = events.clone();
    split(events)
        .filter(is_chunk)
        .map(move |event| {
            let json = &event[BEFORE.len()..event.len() - BEHIND.len()];
            whole.slice_ref(json)
        })
        .collect::<Vec<_>>()
        .into_iter()
}

/// Events with the empty line behind each.
fn split(mut events: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let end = events.windows(2).position(|pair| pair == b"\n\n")? + 2;
        let (event, rest) = events.split_at(end);
        events = rest;
        Some(event)
    })
}

fn details(error: &serde_json::Value) -> Bytes {
    error.to_string().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};
    use thalweg_proto::code::ErrorCode;

    use super::*;

    #[test]
    fn chunks_lose_their_framing() {
        let check = |events: &'static str, expected: &[&str]| {
            assert!(chunks(&Bytes::from_static(events.as_bytes())).eq(expected.iter().map(|c| c.as_bytes())));
        };
        check("data: {\"a\":1}\n\ndata: {\"b\":\"\\n\\n\"}\n\n", &["{\"a\":1}", "{\"b\":\"\\n\\n\"}"]);
        check(": keep-alive\n\ndata: {}\n\ndata: [DONE]\n\n", &["{}"]);
        check("", &[]);
    }

    #[test]
    fn an_error_is_a_status_with_openais_object() {
        let error =
            RouterError { param: Some("n".to_owned()), ..RouterError::new(ErrorCode::Overloaded, "full") };
        let status = status(&error.retry_after(Duration::from_millis(1500)));
        assert_eq!((status.code(), status.message()), (Code::ResourceExhausted, "full"));
        assert_eq!(ErrorCode::of(&status), ErrorCode::Overloaded);
        assert_eq!(status.metadata().get("retry-after").unwrap(), "2");
        let details: Value = serde_json::from_slice(status.details()).unwrap();
        assert_eq!(details["error"]["code"], "overloaded");
        assert_eq!(details["error"]["param"], json!("n"));
    }
}
