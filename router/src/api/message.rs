//! The message of a chat's whole reply.

use serde::Serialize;

use crate::output::part::CallDelta;

#[derive(Serialize)]
pub(super) struct Message {
    role: &'static str,
    /// Null where the model only called tools.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// One call, complete but where the answer was cut off.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct ToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: Function,
}

#[derive(Debug, PartialEq, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl Message {
    pub(super) fn new(text: String, reasoning_content: String, tool_calls: Vec<ToolCall>) -> Self {
        let content = (!text.is_empty() || tool_calls.is_empty()).then_some(text);
        Self { role: "assistant", content, refusal: None, reasoning_content, tool_calls }
    }
}

impl ToolCall {
    /// Adds deltas up, as a client of a stream does.
    pub(super) fn add(calls: &mut Vec<Self>, deltas: Vec<CallDelta>) {
        for delta in deltas {
            if let Some(head) = delta.head {
                let function = Function { name: head.name, arguments: delta.arguments };
                calls.push(Self { id: head.id, kind: "function", function });
            } else if let Some(call) = calls.get_mut(delta.index) {
                call.function.arguments.push_str(&delta.arguments);
            }
        }
    }
}
