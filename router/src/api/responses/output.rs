//! Pieces of an answer to output items, and the events that tell of them. The same for streams and whole replies.

use serde_json::{Map, Value, json};

use crate::output::part::CallDelta;
use crate::request::responses::fresh_id;
use crate::sse::chunk;

/// Numbered events on their way to a client; a whole reply has none.
pub(super) struct Events {
    is_wanted: bool,
    sequence: u64,
    out: Vec<u8>,
}

/// What a piece brings, with its log probabilities in this API's shape.
pub(super) struct Part<'a> {
    pub(super) reasoning: &'a str,
    pub(super) text: &'a str,
    pub(super) calls: &'a [CallDelta],
    pub(super) logprobs: Vec<Value>,
}

/// The items of one answer, of which the last may be open.
#[derive(Default)]
pub(super) struct Output {
    closed: Vec<Value>,
    open: Option<Open>,
    /// Of tokens whose text is still held back.
    logprobs: Vec<Value>,
}

/// An item that grows.
struct Open {
    id: String,
    text: String,
    kind: Kind,
}

enum Kind {
    Reasoning,
    Message { logprobs: Vec<Value> },
    Call { call_id: String, name: String },
}

impl Events {
    pub(super) fn new(is_wanted: bool) -> Self {
        Self { is_wanted, sequence: 0, out: Vec::new() }
    }

    /// One event; `fields` has what follows its type and number.
    pub(super) fn send(&mut self, kind: &str, fields: impl FnOnce() -> Value) {
        if !self.is_wanted {
            return;
        }
        let mut event = Map::new();
        event.insert("type".to_owned(), json!(kind));
        event.insert("sequence_number".to_owned(), json!(self.sequence));
        if let Value::Object(fields) = fields() {
            event.extend(fields);
        }
        self.sequence += 1;
        self.out.extend_from_slice(b"event: ");
        self.out.extend_from_slice(kind.as_bytes());
        self.out.extend_from_slice(b"\ndata: ");
        chunk::json(&mut self.out, &event);
        self.out.extend_from_slice(b"\n\n");
    }

    pub(super) fn take_into(&mut self, out: &mut Vec<u8>) {
        out.append(&mut self.out);
    }
}

impl Output {
    /// The items that are complete.
    pub(super) fn items(&self) -> &[Value] {
        &self.closed
    }

    pub(super) fn push(&mut self, mut part: Part<'_>, events: &mut Events) {
        self.logprobs.append(&mut part.logprobs);
        if !part.reasoning.is_empty() {
            self.within(|kind| matches!(kind, Kind::Reasoning), || Open::new("rs", Kind::Reasoning), events);
            self.grow(part.reasoning, Vec::new(), events);
        }
        if !part.text.is_empty() {
            let message = || Open::new("msg", Kind::Message { logprobs: Vec::new() });
            self.within(|kind| matches!(kind, Kind::Message { .. }), message, events);
            let logprobs = std::mem::take(&mut self.logprobs);
            self.grow(part.text, logprobs, events);
        }
        for call in part.calls {
            if let Some(head) = &call.head {
                let kind = Kind::Call { call_id: head.id.clone(), name: head.name.clone() };
                self.within(|_| false, || Open::new("fc", kind), events);
            }
            if !call.arguments.is_empty() {
                self.grow(&call.arguments, Vec::new(), events);
            }
        }
        // What is thought or called has none in this API.
        if !part.reasoning.is_empty() || !part.calls.is_empty() {
            self.logprobs.clear();
        }
    }

    /// The answer is over. Without any item it is an empty message.
    pub(super) fn finish(&mut self, status: &'static str, events: &mut Events) {
        if self.open.is_none() && self.closed.is_empty() {
            self.within(|_| false, || Open::new("msg", Kind::Message { logprobs: Vec::new() }), events);
        }
        self.close(status, events);
    }

    /// Nothing more will come.
    pub(super) fn break_off(&mut self, events: &mut Events) {
        self.close("incomplete", events);
    }

    /// Goes on with the open item if it is of the kind, else closes it and opens another.
    fn within(&mut self, is_it: impl Fn(&Kind) -> bool, new: impl FnOnce() -> Open, events: &mut Events) {
        if self.open.as_ref().is_some_and(|open| is_it(&open.kind)) {
            return;
        }
        self.close("completed", events);
        let open = new();
        let at = self.closed.len();
        events.send(
            "response.output_item.added",
            || json!({"output_index": at, "item": open.item("in_progress", false)}),
        );
        if let Some(part) = open.part("", &[]) {
            events.send(
                "response.content_part.added",
                || json!({"item_id": open.id, "output_index": at, "content_index": 0, "part": part}),
            );
        }
        self.open = Some(open);
    }

    fn grow(&mut self, text: &str, mut more: Vec<Value>, events: &mut Events) {
        let at = self.closed.len();
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let id = &open.id;
        match &mut open.kind {
            Kind::Message { logprobs } => {
                events.send("response.output_text.delta", || {
                    json!({"item_id": id, "output_index": at, "content_index": 0, "delta": text, "logprobs": more})
                });
                logprobs.append(&mut more);
            }
            Kind::Reasoning => events.send(
                "response.reasoning_text.delta",
                || json!({"item_id": id, "output_index": at, "content_index": 0, "delta": text}),
            ),
            Kind::Call { .. } => events.send(
                "response.function_call_arguments.delta",
                || json!({"item_id": id, "output_index": at, "delta": text}),
            ),
        }
    }

    fn close(&mut self, status: &'static str, events: &mut Events) {
        let Some(open) = self.open.take() else { return };
        let (at, id, text) = (self.closed.len(), &open.id, &open.text);
        match &open.kind {
            Kind::Message { logprobs } => events.send("response.output_text.done", || {
                json!({"item_id": id, "output_index": at, "content_index": 0, "text": text, "logprobs": logprobs})
            }),
            Kind::Reasoning => events.send("response.reasoning_text.done", || {
                json!({"item_id": id, "output_index": at, "content_index": 0, "text": text})
            }),
            Kind::Call { name, .. } => events.send("response.function_call_arguments.done", || {
                json!({"item_id": id, "output_index": at, "name": name, "arguments": text})
            }),
        }
        if let Some(part) = open.whole_part() {
            events.send(
                "response.content_part.done",
                || json!({"item_id": id, "output_index": at, "content_index": 0, "part": part}),
            );
        }
        let item = open.item(status, true);
        events.send("response.output_item.done", || json!({"output_index": at, "item": item}));
        self.closed.push(item);
    }
}

impl Open {
    fn new(prefix: &str, kind: Kind) -> Self {
        Self { id: fresh_id(prefix), text: String::new(), kind }
    }

    /// The item with its content, or as it begins.
    fn item(&self, status: &str, is_whole: bool) -> Value {
        let content: Vec<_> = self.whole_part().into_iter().filter(|_| is_whole).collect();
        match &self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status,
            }),
            Kind::Message { .. } => json!({
                "id": self.id, "type": "message", "role": "assistant", "status": status, "content": content,
            }),
            Kind::Call { call_id, name } => json!({
                "id": self.id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": self.text,
            }),
        }
    }

    fn whole_part(&self) -> Option<Value> {
        match &self.kind {
            Kind::Message { logprobs } => self.part(&self.text, logprobs),
            _ => self.part(&self.text, &[]),
        }
    }

    /// The only content part of an item; calls have none.
    fn part(&self, text: &str, logprobs: &[Value]) -> Option<Value> {
        match &self.kind {
            Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
            Kind::Message { .. } => {
                Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}))
            }
            Kind::Call { .. } => None,
        }
    }
}
