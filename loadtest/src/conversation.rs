//! A conversation as it grows, and the requests that it makes.

use serde::Serialize;

use crate::plan::{Endpoint, Plan};

/// What will be said: an opening, then user turns that each wait for the answer to the one before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conversation {
    pub(crate) opening: Vec<Message>,
    pub(crate) turns: Vec<String>,
}

/// A message of a chat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Message {
    pub(crate) role: String,
    pub(crate) content: String,
}

/// What has been said.
pub(crate) struct History<'a> {
    plan: &'a Plan,
    model: &'a str,
    messages: Vec<Message>,
}

#[derive(Serialize)]
struct Body<'a> {
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'a [Message]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<String>,
    max_tokens: u32,
    temperature: f32,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    ignore_eos: bool,
    stream: bool,
    stream_options: StreamOptions,
}

#[derive(Serialize)]
struct StreamOptions {
    include_usage: bool,
}

impl Message {
    pub(crate) fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into() }
    }
}

impl<'a> History<'a> {
    pub(crate) fn new(plan: &'a Plan, model: &'a str, opening: Vec<Message>) -> Self {
        Self { plan, model, messages: opening }
    }

    pub(crate) fn add(&mut self, role: &str, content: String) {
        self.messages.push(Message::new(role, content));
    }

    /// The next request's body.
    pub(crate) fn body(&self) -> Vec<u8> {
        let chat = self.plan.endpoint == Endpoint::Chat;
        let text =
            || self.messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>().join(" ");
        let body = Body {
            model: self.model,
            messages: chat.then_some(&self.messages),
            prompt: (!chat).then(text),
            max_tokens: self.plan.max_tokens,
            temperature: self.plan.temperature,
            ignore_eos: self.plan.ignore_eos,
            stream: true,
            stream_options: StreamOptions { include_usage: true },
        };
        serde_json::to_vec(&body).expect("strings and numbers can be written as JSON")
    }
}
