//! `POST /v1/completions`: body to request.

use serde_json::{Map, Value};

use crate::error::RouterError;

use super::common::{self, take};
use super::fields::{Fields, invalid, token_ids};
use super::json::kind;
use super::limits::{PROMPTS_MAX, TOTAL_CHOICES_MAX};
use super::unsupported::refuse_unsupported;
use super::{Endpoint, MaxTokens, Prompt, Served, ValidRequest, sampling, structured};

/// OpenAI's own default, vLLM's too.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Reads a completions request for one of the models served.
pub fn parse_completion(
    mut body: Map<String, Value>,
    served: &Served<'_>,
) -> Result<ValidRequest, RouterError> {
    let prompt = take(&mut body, "prompt");
    let fields = Fields::new(&body);
    let model = common::model(&fields, served.models)?;
    refuse_unsupported(&fields)?;
    super::tools::refuse_forced(&fields)?;
    let (mut params, mut reply) = common::sampling_and_reply(&fields, model.tokenizer.vocab_size(), served)?;
    if fields.get("logprobs").is_some_and(Value::is_boolean) {
        return Err(fields.error("logprobs", "must be the number of alternatives here, not a boolean"));
    }
    reply.logprobs = common::alternatives(&fields, "logprobs")?;
    reply.echo = fields.boolean("echo")?.unwrap_or(false);
    params.logprobs = reply.logprobs;
    params.prompt_logprobs = match (reply.echo, reply.logprobs) {
        (true, Some(count)) => Some(count.max(reply.prompt_logprobs.unwrap_or(0))),
        _ => reply.prompt_logprobs,
    };
    let explicit = fields.count("max_tokens", 1)?;
    common::check_min_tokens(&fields, params.min_tokens, explicit)?;
    let bos = fields.boolean("add_special_tokens")?.unwrap_or(true);
    let prompts = prompts(prompt, model.tokenizer.vocab_size(), bos)?;
    let choices = sampling::choices(&fields, served.choices_max)?;
    if prompts.len() * choices as usize > TOTAL_CHOICES_MAX {
        let message = format!("{} prompts of {choices} choices are over {TOTAL_CHOICES_MAX}", prompts.len());
        return Err(invalid("n".to_owned(), message));
    }
    Ok(ValidRequest {
        endpoint: Endpoint::Completions,
        prompts,
        choices,
        sampling: params,
        max_tokens: explicit.map_or(MaxTokens::Default(DEFAULT_MAX_TOKENS), MaxTokens::Explicit),
        cache_salt: common::cache_salt(&fields)?,
        priority: common::priority(&fields)?,
        structure: structured::structure(&fields)?,
        reply,
        model,
    })
}

/// A string, strings, token ids, or arrays of token ids.
fn prompts(value: Option<Value>, vocab_size: usize, bos: bool) -> Result<Vec<Prompt>, RouterError> {
    let value = value.unwrap_or(Value::Null);
    let list = match value {
        Value::Null => return Err(prompt_error("`prompt` is missing")),
        Value::String(text) => return Ok(vec![text_prompt(text, bos, "prompt".to_owned())?]),
        Value::Array(list) if list.is_empty() => return Err(prompt_error("`prompt` is empty")),
        Value::Array(list) => list,
        other => {
            return Err(prompt_error(format!("`prompt` must be a string or an array, not {}", kind(&other))));
        }
    };
    if list[0].is_number() {
        return Ok(vec![Prompt::Ids(token_ids(&list, vocab_size, "prompt")?)]);
    }
    if list.len() > PROMPTS_MAX {
        return Err(prompt_error(format!(
            "`prompt` takes at most {PROMPTS_MAX} prompts, not {}",
            list.len()
        )));
    }
    list.into_iter().enumerate().map(|(at, item)| one_of_many(item, vocab_size, bos, at)).collect()
}

fn one_of_many(item: Value, vocab_size: usize, bos: bool, at: usize) -> Result<Prompt, RouterError> {
    let path = format!("prompt[{at}]");
    match item {
        Value::String(text) => text_prompt(text, bos, path),
        Value::Array(ids) if ids.is_empty() => {
            let message = format!("`{path}` is empty");
            Err(invalid(path, message))
        }
        Value::Array(ids) => Ok(Prompt::Ids(token_ids(&ids, vocab_size, &path)?)),
        other => {
            let message = format!("`{path}` must be a string or an array of token ids, not {}", kind(&other));
            Err(invalid(path, message))
        }
    }
}

fn text_prompt(text: String, bos: bool, path: String) -> Result<Prompt, RouterError> {
    if text.is_empty() {
        let message = format!("`{path}` is empty; send at least one character");
        return Err(invalid(path, message));
    }
    Ok(Prompt::Text { text, bos })
}

fn prompt_error(message: impl Into<String>) -> RouterError {
    invalid("prompt".to_owned(), message)
}
