//! Replies in one piece.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use crate::error::RouterError;
use crate::output::choice::{Finish, Piece, StopReason, TokenInfo};
use crate::output::logprobs::{ChatLogprobs, CompletionLogprobs, prompt_logprobs};
use crate::sse::chunk::{ReplyHead, json};
use crate::usage::Usage;

use super::Api;
use super::error::ApiError;
use super::generate::name_worker;
use super::message::{Message, ToolCall};
use super::session::Session;

/// Waits for every choice and answers.
pub(super) async fn respond(api: &Api, mut session: Session) -> Result<Response, ApiError> {
    let choices = collect(&mut session).await?;
    let mut response = json_reply(&reply(&session, choices));
    name_worker(api, response.headers_mut(), session.worker.as_ref());
    Ok(response)
}

/// The same as bytes.
pub(super) async fn bytes(session: &mut Session) -> Result<Vec<u8>, RouterError> {
    let choices = collect(session).await?;
    let mut out = Vec::new();
    json(&mut out, &reply(session, choices));
    Ok(out)
}

/// A reply in JSON.
pub(super) fn json_reply(reply: &impl Serialize) -> Response {
    Json(reply).into_response()
}

async fn collect(session: &mut Session) -> Result<Vec<Collected>, RouterError> {
    let mut choices: Vec<_> = (0..session.assembly.choices()).map(|_| Collected::default()).collect();
    let mut pieces = Vec::new();
    while session.next(&mut pieces).await? {
        for piece in pieces.drain(..) {
            choices[piece.choice].add(piece);
        }
    }
    Ok(choices)
}

/// What has come of one choice.
#[derive(Default)]
struct Collected {
    text: String,
    reasoning: String,
    calls: Vec<ToolCall>,
    token_ids: Vec<u32>,
    logprobs: Vec<TokenInfo>,
    finish: Option<Finish>,
}

impl Collected {
    fn add(&mut self, piece: Piece) {
        self.text.push_str(&piece.text);
        self.reasoning.push_str(&piece.reasoning);
        ToolCall::add(&mut self.calls, piece.calls);
        self.token_ids.extend(piece.token_ids);
        self.logprobs.extend(piece.logprobs);
        self.finish = piece.finish.or(self.finish.take());
    }
}

#[derive(Serialize)]
struct Reply<'a> {
    #[serde(flatten)]
    head: &'a ReplyHead,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(flatten)]
    content: Content,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Content {
    Message(Message),
    Text(String),
}

#[derive(Serialize)]
#[serde(untagged)]
enum Logprobs {
    Chat(ChatLogprobs),
    Completion(CompletionLogprobs),
}

fn reply(session: &Session, choices: Vec<Collected>) -> Reply<'_> {
    let is_chat = session.request.endpoint().is_chat();
    let choices = choices.into_iter().enumerate();
    Reply {
        head: &session.head,
        choices: choices
            .map(|(index, collected)| {
                if is_chat {
                    chat_choice(session, index, collected)
                } else {
                    choice(session, index, collected)
                }
            })
            .collect(),
        usage: session.assembly.usage(),
        prompt_logprobs: is_chat.then(|| prompt_logprobs_of(session, 0)).flatten(),
        prompt_token_ids: is_chat.then(|| prompt_ids_of(session, 0)).flatten(),
    }
}

fn chat_choice<'a>(session: &Session, index: usize, collected: Collected) -> Choice<'a> {
    let options = session.request.reply();
    let logprobs = options
        .logprobs
        .map(|_| Logprobs::Chat(ChatLogprobs::new(session.token_names(), &collected.logprobs)));
    let content = Content::Message(Message::new(collected.text, collected.reasoning, collected.calls));
    let (finish_reason, stop_reason) = finish(collected.finish);
    Choice {
        index,
        content,
        logprobs,
        finish_reason,
        stop_reason,
        token_ids: options.return_token_ids.then_some(collected.token_ids),
        prompt_logprobs: None,
        prompt_token_ids: None,
    }
}

fn choice(session: &Session, index: usize, mut collected: Collected) -> Choice<'_> {
    let options = session.request.reply();
    let prompt = session.assembly.prompt_of(index);
    let echo = session.assembly.echo(prompt);
    if let Some(echo) = echo {
        collected.text.insert_str(0, echo.text());
        let echoed = echo.token_infos(session.assembly.prompt_logprobs(prompt));
        collected.logprobs.splice(0..0, echoed);
    }
    let logprobs = options.logprobs.map(|count| {
        let names = session.token_names();
        let logprobs = CompletionLogprobs::new(names, &collected.logprobs, count, echo.is_some());
        Logprobs::Completion(logprobs)
    });
    let (finish_reason, stop_reason) = finish(collected.finish);
    Choice {
        index,
        content: Content::Text(collected.text),
        logprobs,
        finish_reason,
        stop_reason,
        token_ids: options.return_token_ids.then_some(collected.token_ids),
        prompt_logprobs: prompt_logprobs_of(session, prompt),
        prompt_token_ids: prompt_ids_of(session, prompt),
    }
}

fn prompt_logprobs_of(session: &Session, prompt: usize) -> Option<Value> {
    let count = session.request.reply().prompt_logprobs?;
    let tokenizer = &session.request.model().tokenizer;
    Some(prompt_logprobs(tokenizer, session.assembly.prompt_logprobs(prompt), count))
}

fn prompt_ids_of(session: &Session, prompt: usize) -> Option<&[u32]> {
    session.request.reply().return_token_ids.then(|| session.assembly.prompt_ids(prompt))
}

/// A reply is only put together once every choice has ended.
fn finish(finish: Option<Finish>) -> (&'static str, Option<StopReason>) {
    finish.map_or(("stop", None), |f| (f.reason, f.stop))
}
