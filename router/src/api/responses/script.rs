//! What a response says from its first event to its last, and how it is kept.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::error::{RouterError, bounded, echo};
use crate::output::choice::Piece;
use crate::output::logprobs::ChatLogprobs;
use crate::request::ReplyOptions;
use crate::request::responses::Kept;
use crate::responses_store::Store;
use crate::sse::chunk::ReplyHead;
use crate::usage::Usage;

use super::super::session::Session;
use super::object::{Object, State};
use super::output::{Events, Output, Part};

/// One response on its way.
pub(crate) struct ResponseScript {
    object: Object,
    output: Output,
    events: Events,
    keeping: Keeping,
    has_logprobs: bool,
    has_opened: bool,
    /// The model was cut off for want of tokens.
    is_cut: bool,
}

/// What is kept of a response, and for whom.
pub(super) struct Keeping {
    store: Arc<Store>,
    tenant: String,
    history: Vec<Value>,
    input: Vec<Value>,
    is_wanted: bool,
}

impl Keeping {
    pub(super) fn new(
        store: &Arc<Store>,
        tenant: &str,
        history: Vec<Value>,
        input: Vec<Value>,
        is_wanted: bool,
    ) -> Self {
        Self { store: Arc::clone(store), tenant: tenant.to_owned(), history, input, is_wanted }
    }

    /// Keeps the response and says in it whether that went well.
    async fn keep(&mut self, id: &str, response: Value) -> Value {
        if !self.is_wanted {
            return response;
        }
        let (history, input) = (std::mem::take(&mut self.history), std::mem::take(&mut self.input));
        let mut kept = Kept { history, input, response };
        let written = serde_json::to_vec(&kept);
        let is_kept = match written {
            Ok(bytes) => self.store.keep(&self.tenant, id, bytes).await,
            // Values of JSON always have a text.
            Err(_) => false,
        };
        kept.response["store"] = json!(is_kept);
        kept.response
    }
}

impl ResponseScript {
    pub(super) fn new(
        head: &ReplyHead,
        echo: Map<String, Value>,
        keeping: Keeping,
        options: &ReplyOptions,
        is_stream: bool,
    ) -> Self {
        Self {
            object: Object::new(head, echo),
            output: Output::default(),
            events: Events::new(is_stream),
            keeping,
            has_logprobs: options.logprobs.is_some(),
            has_opened: false,
            is_cut: false,
        }
    }

    /// Takes more of the answer.
    pub(crate) fn piece(&mut self, session: &Session, piece: &Piece) {
        self.open();
        let logprobs = if self.has_logprobs && !piece.logprobs.is_empty() {
            ChatLogprobs::new(session.token_names(), &piece.logprobs).into_values()
        } else {
            Vec::new()
        };
        let part = Part { reasoning: &piece.reasoning, text: &piece.text, calls: &piece.calls, logprobs };
        self.output.push(part, &mut self.events);
        self.is_cut |= piece.finish.as_ref().is_some_and(|finish| finish.reason == "length");
    }

    /// The answer is complete: the last event is sent once the response has been kept, so that the next request finds
    /// it. Returns the response object.
    pub(crate) async fn finish(&mut self, usage: Usage) -> Value {
        self.open();
        let (state, status, event) = match self.is_cut {
            true => (State::Incomplete, "incomplete", "response.incomplete"),
            false => (State::Completed, "completed", "response.completed"),
        };
        self.output.finish(status, &mut self.events);
        let response = self.object.at(&state, self.output.items(), Some(usage));
        let response = self.keeping.keep(self.object.id(), response).await;
        self.events.send(event, || json!({"response": response}));
        response
    }

    /// The answer could not be completed: what there is of it is closed and kept like any other response. What was not begun
    /// has no response that could have failed.
    pub(crate) async fn fail(&mut self, error: &RouterError, usage: Usage) {
        if self.has_opened {
            self.output.break_off(&mut self.events);
            let response = self.object.at(&State::Failed(error), self.output.items(), Some(usage));
            let response = self.keeping.keep(self.object.id(), response).await;
            self.events.send("response.failed", || json!({"response": response}));
            return;
        }
        self.events.send("error", || {
            let param = error.param.as_deref().map(echo);
            json!({"code": error.code.as_str(), "message": bounded(&error.message), "param": param})
        });
    }

    /// What has come to be sent.
    pub(crate) fn take_into(&mut self, out: &mut Vec<u8>) {
        self.events.take_into(out);
    }

    fn open(&mut self) {
        if std::mem::replace(&mut self.has_opened, true) {
            return;
        }
        for event in ["response.created", "response.in_progress"] {
            self.events.send(event, || json!({"response": self.object.at(&State::InProgress, &[], None)}));
        }
    }
}
