//! Chunks of a streamed answer. What is the same in all chunks of a stream is written once; a token costs its own text.

use serde::Serialize;
use serde_json::Value;

use crate::error::{RouterError, bounded, echo};
use crate::request::Endpoint;
use crate::usage::Usage;

/// Last line of a stream that is complete.
pub(crate) const DONE: &[u8] = b"data: [DONE]\n\n";

/// A comment, so that no proxy takes the connection for idle.
pub(crate) const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// What all replies of a request begin with.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ReplyHead {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: String,
}

/// Writes the chunks of one stream.
pub(crate) struct ChunkWriter {
    endpoint: Endpoint,
    /// `data: {"id":..,"choices":[` up to the first choice.
    prefix: Vec<u8>,
    /// From the end of the last choice on.
    suffix: Vec<u8>,
}

/// One choice's part of a chunk.
#[derive(Default)]
pub(crate) struct ChunkChoice<'a> {
    pub(crate) index: usize,
    pub(crate) text: &'a str,
    /// Already JSON.
    pub(crate) logprobs: Option<&'a [u8]>,
    pub(crate) token_ids: Option<&'a [u32]>,
    /// Only in a completion's first chunk.
    pub(crate) prompt_token_ids: Option<&'a [u32]>,
}

impl ChunkWriter {
    pub(crate) fn new(endpoint: Endpoint, head: &ReplyHead, include_usage: bool) -> Self {
        let mut prefix = b"data: ".to_vec();
        json(&mut prefix, head);
        prefix.pop();
        prefix.extend_from_slice(b",\"choices\":[");
        let suffix: &[u8] = if include_usage { b"],\"usage\":null}\n\n" } else { b"]}\n\n" };
        Self { endpoint, prefix, suffix: suffix.to_vec() }
    }

    /// Chunks from here on carry this usage.
    pub(crate) fn tell_usage(&mut self, usage: &Usage) {
        self.suffix.clear();
        write_usage(&mut self.suffix, usage);
    }

    /// The chunk that names the speaker of a chat's choice.
    pub(crate) fn role(&self, out: &mut Vec<u8>, index: usize, prompt_token_ids: Option<&[u32]>) {
        self.open(out, index);
        out.extend_from_slice(b"\"delta\":{\"role\":\"assistant\",\"content\":\"\"},");
        out.extend_from_slice(b"\"logprobs\":null,\"finish_reason\":null}");
        match prompt_token_ids {
            None => out.extend_from_slice(&self.suffix),
            Some(ids) => {
                out.extend_from_slice(b"],\"prompt_token_ids\":");
                json(out, ids);
                out.extend_from_slice(&self.suffix[1..]);
            }
        }
    }

    /// A chunk with new text.
    pub(crate) fn text(&self, out: &mut Vec<u8>, choice: &ChunkChoice<'_>) {
        self.open(out, choice.index);
        match self.endpoint {
            Endpoint::Chat | Endpoint::Responses => {
                out.extend_from_slice(b"\"delta\":{\"content\":");
                json(out, choice.text);
                out.push(b'}');
            }
            Endpoint::Completions => {
                out.extend_from_slice(b"\"text\":");
                json(out, choice.text);
            }
        }
        out.extend_from_slice(b",\"logprobs\":");
        out.extend_from_slice(choice.logprobs.unwrap_or(b"null"));
        out.extend_from_slice(b",\"finish_reason\":null");
        for (name, ids) in [("prompt_token_ids", choice.prompt_token_ids), ("token_ids", choice.token_ids)] {
            if let Some(ids) = ids {
                out.extend_from_slice(b",\"");
                out.extend_from_slice(name.as_bytes());
                out.extend_from_slice(b"\":");
                json(out, ids);
            }
        }
        out.push(b'}');
        out.extend_from_slice(&self.suffix);
    }

    /// The last chunk of a choice.
    pub(crate) fn finish(&self, out: &mut Vec<u8>, index: usize, reason: &str, stop_reason: &impl Serialize) {
        self.open(out, index);
        let empty: &[u8] = match self.endpoint {
            Endpoint::Chat | Endpoint::Responses => b"\"delta\":{}",
            Endpoint::Completions => b"\"text\":\"\"",
        };
        out.extend_from_slice(empty);
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":");
        json(out, reason);
        out.extend_from_slice(b",\"stop_reason\":");
        json(out, stop_reason);
        out.push(b'}');
        out.extend_from_slice(&self.suffix);
    }

    /// The chunk without choices that ends a stream whose client asked for usage.
    pub(crate) fn usage(&self, out: &mut Vec<u8>, usage: &Usage) {
        out.extend_from_slice(&self.prefix);
        write_usage(out, usage);
    }

    /// A chunk of a chat whose delta is something else than content.
    pub(super) fn delta(&self, out: &mut Vec<u8>, index: usize, delta: &impl Serialize) {
        self.open(out, index);
        out.extend_from_slice(b"\"delta\":");
        json(out, delta);
        out.extend_from_slice(b",\"logprobs\":null,\"finish_reason\":null}");
        out.extend_from_slice(&self.suffix);
    }

    fn open(&self, out: &mut Vec<u8>, index: usize) {
        out.extend_from_slice(&self.prefix);
        out.extend_from_slice(b"{\"index\":");
        json(out, &index);
        out.push(b',');
    }
}

/// The end of a chunk behind its choices.
fn write_usage(out: &mut Vec<u8>, usage: &Usage) {
    out.extend_from_slice(b"],\"usage\":");
    json(out, usage);
    out.extend_from_slice(b"}\n\n");
}

/// The event that ends a stream which could not be completed.
pub(crate) fn error_event(out: &mut Vec<u8>, error: &RouterError) {
    out.extend_from_slice(b"data: ");
    json(out, &error_object(error));
    out.extend_from_slice(b"\n\n");
}

/// OpenAI's error object.
pub(crate) fn error_object(error: &RouterError) -> Value {
    serde_json::json!({"error": {
        "message": bounded(&error.message),
        "type": error.code.openai_type(),
        "param": error.param.as_deref().map(echo),
        "code": error.code.as_str(),
    }})
}

/// Appends a value as JSON. Writing to memory what serde can represent does not fail.
pub(crate) fn json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    if let Err(error) = serde_json::to_writer(&mut *out, value) {
        debug_assert!(false, "a reply could not be written as JSON: {error}");
        tracing::error!(%error, "a reply could not be written as json");
    }
}
