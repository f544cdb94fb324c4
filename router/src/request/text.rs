//! `POST /tokenize` and `POST /detokenize`, in vLLM's shapes.

use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::RouterError;
use crate::models::{ModelEntry, Models};

use super::Prompt;
use super::chat::{ChatValues, chat};
use super::common::{self, take};
use super::fields::{Fields, token_ids};
use super::json::kind;

/// A text or a chat whose ids are wanted.
#[derive(Clone)]
pub struct TokenizeRequest {
    pub(crate) model: Arc<ModelEntry>,
    pub(crate) prompt: Prompt,
    pub(crate) return_token_strs: bool,
}

/// Ids whose text is wanted.
#[derive(Clone)]
pub struct DetokenizeRequest {
    pub(crate) model: Arc<ModelEntry>,
    pub(crate) tokens: Vec<u32>,
}

/// Reads either form, `prompt` or `messages`. Without `model` the first one served is meant, as in vLLM.
pub fn parse_tokenize(mut body: Map<String, Value>, models: &Models) -> Result<TokenizeRequest, RouterError> {
    let values = ChatValues::take(&mut body);
    let prompt = take(&mut body, "prompt").filter(|p| !p.is_null());
    let fields = Fields::new(&body);
    let model = model_or_first(&fields, models)?;
    let bos = fields.boolean("add_special_tokens")?;
    let prompt = match (prompt, values.has_messages()) {
        (Some(Value::String(text)), false) => {
            // They mean nothing to a text, and are yet to be what they are said to be.
            values.check(&fields)?;
            fields.boolean("add_generation_prompt")?;
            Prompt::Text { text, bos: bos.unwrap_or(true) }
        }
        (Some(Value::String(_)), true) => {
            return Err(fields.error("prompt", "and `messages` exclude each other; send one of them"));
        }
        (Some(other), _) => {
            return Err(fields.error("prompt", format!("must be a string, not {}", kind(&other))));
        }
        (None, true) => Prompt::Chat(chat(values, &fields, &model)?.0),
        (None, false) => return Err(fields.error("prompt", "is missing; send `prompt` or `messages`")),
    };
    let return_token_strs = fields.boolean("return_token_strs")?.unwrap_or(false);
    Ok(TokenizeRequest { model, prompt, return_token_strs })
}

/// Reads `tokens`.
pub fn parse_detokenize(body: Map<String, Value>, models: &Models) -> Result<DetokenizeRequest, RouterError> {
    let fields = Fields::new(&body);
    let model = model_or_first(&fields, models)?;
    let Some(values) = fields.array("tokens")? else {
        return Err(fields.error("tokens", "is missing; send an array of token ids"));
    };
    let tokens = token_ids(values, model.tokenizer.vocab_size(), "tokens")?;
    Ok(DetokenizeRequest { model, tokens })
}

fn model_or_first(fields: &Fields<'_>, models: &Models) -> Result<Arc<ModelEntry>, RouterError> {
    match (fields.string("model")?, models.list().first()) {
        (None, Some(first)) => Ok(first.clone()),
        (Some(name), _) => common::find_model(name, models),
        (None, None) => common::find_model("", models),
    }
}
