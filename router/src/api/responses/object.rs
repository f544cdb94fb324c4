//! The response object.

use serde_json::{Map, Value, json};

use crate::error::RouterError;
use crate::sse::chunk::ReplyHead;
use crate::usage::Usage;

use super::super::headers::unix_seconds;

/// What is the same in every state of a response.
pub(super) struct Object {
    id: String,
    created_at: u64,
    model: String,
    echo: Map<String, Value>,
}

/// How far a response is.
pub(super) enum State<'a> {
    InProgress,
    Completed,
    /// The tokens ran out.
    Incomplete,
    Failed(&'a RouterError),
}

impl Object {
    pub(super) fn new(head: &ReplyHead, echo: Map<String, Value>) -> Self {
        Self { id: head.id.clone(), created_at: head.created, model: head.model.clone(), echo }
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The object with what has been put out so far; counts are told at its end alone.
    pub(super) fn at(&self, state: &State<'_>, output: &[Value], usage: Option<Usage>) -> Value {
        let (status, error, details) = match state {
            State::InProgress => ("in_progress", Value::Null, Value::Null),
            State::Completed => ("completed", Value::Null, Value::Null),
            State::Incomplete => ("incomplete", Value::Null, json!({"reason": "max_output_tokens"})),
            State::Failed(error) => ("failed", failure(error), Value::Null),
        };
        let completed_at = matches!(state, State::Completed).then(unix_seconds);
        let object = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": completed_at,
            "status": status,
            "background": false,
            "error": error,
            "incomplete_details": details,
            "model": self.model,
            "output": output,
            "usage": usage.map(counts),
        });
        match object {
            Value::Object(mut fields) => {
                fields.extend(self.echo.clone());
                Value::Object(fields)
            }
            other => other,
        }
    }
}

/// OpenAI has few codes for what fails on its side.
fn failure(error: &RouterError) -> Value {
    let code = if error.code.http().as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
    json!({"code": code, "message": crate::error::bounded(&error.message)})
}

fn counts(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens.unwrap_or(0)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
