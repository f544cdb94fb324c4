//! Parse, don't validate: bodies become requests whose every field is known to be right, and nobody checks again.

mod chat;
pub(crate) mod common;
mod completion;
mod embedding;
pub(crate) mod fields;
mod json;
pub mod limits;
mod messages;
mod prompts;
pub(crate) mod responses;
mod restrict;
mod sampling;
pub(crate) mod structured;
mod text;
mod thoughts;
mod tool_prompt;
mod tools;
mod unsupported;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use serde_json::Value;
use thalweg_proto::v1;

use crate::config::Surface;
use crate::models::{ModelEntry, Models};
use crate::output::reader::Reading;

pub use chat::parse_chat;
pub use completion::parse_completion;
pub(crate) use embedding::Encoding;
pub use embedding::{EmbeddingsOf, ValidEmbedding, parse_embedding};
pub use json::parse_object;
use structured::Structure;
pub use text::{DetokenizeRequest, TokenizeRequest, parse_detokenize, parse_tokenize};

/// What requests are checked against.
pub struct Served<'a> {
    /// The models of this moment.
    pub models: &'a Models,
    /// Largest `n`.
    pub choices_max: u32,
    /// How answers are read.
    pub surface: &'a Surface,
    /// Draws the seed of a request that brings none.
    pub draw_seed: &'a dyn Fn() -> u64,
}

/// Which of OpenAI's shapes the reply takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `POST /v1/chat/completions`.
    Chat,
    /// `POST /v1/completions`.
    Completions,
    /// `POST /v1/responses`.
    Responses,
}

impl Endpoint {
    /// The prompt is a conversation, and the answer an assistant's.
    pub(crate) fn is_chat(self) -> bool {
        self != Self::Completions
    }

    /// As metrics and records call it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Responses => "responses",
        }
    }
}

/// What stands before the first output token.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// Text, in which control tokens count as such.
    Text {
        /// The text.
        text: String,
        /// Adds the beginning of sequence where the model wants one.
        bos: bool,
    },
    /// Token ids, all within the vocabulary, taken as they are.
    Ids(Vec<u32>),
    /// A chat for the model's template.
    Chat(Chat),
}

/// A chat in the form that templates expect.
#[derive(Clone, Debug, PartialEq)]
pub struct Chat {
    pub(crate) messages: Value,
    pub(crate) tools: Value,
    pub(crate) kwargs: Value,
    pub(crate) add_generation_prompt: bool,
    pub(crate) continue_final_message: bool,
}

/// A generation request in which every field has been checked, but for the prompt's length: that needs the tokenizer.
#[derive(Clone)]
pub struct ValidRequest {
    endpoint: Endpoint,
    model: Arc<ModelEntry>,
    prompts: Vec<Prompt>,
    /// Of each prompt, the last tokens that count.
    truncate_to: Option<usize>,
    choices: u32,
    sampling: v1::SamplingParams,
    max_tokens: MaxTokens,
    /// What the client calls it.
    max_tokens_field: &'static str,
    cache_salt: String,
    /// None: not given.
    priority: Option<i32>,
    reply: ReplyOptions,
    structure: Option<Structure>,
}

/// How many tokens each choice may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// The client's wish; with the prompt it must fit the context. 0 where nothing is to follow the prompt.
    Explicit(u32),
    /// At most this, or what the context leaves.
    Default(u32),
}

/// How the answer is put together: what the worker never hears of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReplyOptions {
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) echo: bool,
    pub(crate) return_token_ids: bool,
    /// Log probabilities call tokens by their ids.
    pub(crate) names_are_ids: bool,
    pub(crate) stop: Vec<String>,
    pub(crate) include_stop: bool,
    pub(crate) skip_special: bool,
    /// Asked for by the client; `echo` makes the worker send prompt logprobs too.
    pub(crate) logprobs: Option<u32>,
    pub(crate) prompt_logprobs: Option<u32>,
    /// What to look for in the text.
    pub(crate) reading: Reading,
}

impl ValidRequest {
    /// The shape of the reply.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The model asked for.
    pub fn model(&self) -> &Arc<ModelEntry> {
        &self.model
    }

    /// At least one, the first time.
    pub(crate) fn take_prompts(&mut self) -> Vec<Prompt> {
        std::mem::take(&mut self.prompts)
    }

    /// Tokens of each prompt that count at most, from its end; None if all do.
    pub(crate) fn truncate_to(&self) -> Option<usize> {
        self.truncate_to
    }

    /// Choices per prompt, at least one.
    pub fn choices(&self) -> u32 {
        self.choices
    }

    /// Everything about sampling but `max_tokens`.
    pub fn sampling(&self) -> &v1::SamplingParams {
        &self.sampling
    }

    /// Tokens wanted.
    pub fn max_tokens(&self) -> MaxTokens {
        self.max_tokens
    }

    /// Root of the block hashes, beside the tenant; empty if none.
    pub fn cache_salt(&self) -> &str {
        &self.cache_salt
    }

    /// Lower runs earlier.
    pub fn priority(&self) -> i32 {
        self.priority.unwrap_or(0)
    }

    /// What the answer must be a text of.
    pub(crate) fn structure(&self) -> Option<&Structure> {
        self.structure.as_ref()
    }

    /// How to put the answer together.
    pub fn reply(&self) -> &ReplyOptions {
        &self.reply
    }
}
