//! Deltas of a chat that are no content: thoughts and tool calls, in OpenAI's shapes.

use serde::Serialize;

use crate::output::part::CallDelta;

use super::chunk::ChunkWriter;

#[derive(Serialize)]
struct ReasoningDelta<'a> {
    reasoning_content: &'a str,
}

#[derive(Serialize)]
struct CallsDelta<'a> {
    tool_calls: [Call<'a>; 1],
}

/// `index` always; `id`, `type` and the name in the first delta of a call alone, since clients add strings up.
#[derive(Serialize)]
struct Call<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl ChunkWriter {
    /// A chunk with more of the thoughts.
    pub(crate) fn reasoning(&self, out: &mut Vec<u8>, index: usize, text: &str) {
        self.delta(out, index, &ReasoningDelta { reasoning_content: text });
    }

    /// A chunk with more of one tool call.
    pub(crate) fn call(&self, out: &mut Vec<u8>, index: usize, call: &CallDelta) {
        let head = call.head.as_ref();
        let function = Function { name: head.map(|h| h.name.as_str()), arguments: &call.arguments };
        let id = head.map(|h| h.id.as_str());
        let call = Call { index: call.index, id, kind: head.map(|_| "function"), function };
        self.delta(out, index, &CallsDelta { tool_calls: [call] });
    }
}
