//! Fields that chat and completions share.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use crate::error::{RouterError, echo};
use crate::models::{ModelEntry, Models};

use super::fields::Fields;
use super::limits::{CACHE_SALT_BYTES_MAX, LOGPROBS_MAX};
use super::{ReplyOptions, Served, sampling};

/// Tokens of a completion that names no number: OpenAI's own default, vLLM's too. Prompts that are cut to fit leave as many to a chat.
pub(super) const DEFAULT_MAX_TOKENS: u32 = 16;
/// Names that a 404 tells.
const NAMES_TOLD_MAX: usize = 12;

/// The model that a request names.
pub(super) fn model(fields: &Fields<'_>, models: &Models) -> Result<Arc<ModelEntry>, RouterError> {
    match fields.string("model")? {
        Some(name) if !name.is_empty() => find_model(name, models),
        _ => Err(fields.error("model", "is missing; GET /v1/models lists what is served")),
    }
}

/// The model or adapter of that very name, or a 404; a 503 while no worker is known that serves anything.
pub(crate) fn find_model(name: &str, models: &Models) -> Result<Arc<ModelEntry>, RouterError> {
    if let Some(entry) = models.get(name) {
        return Ok(entry);
    }
    let served = models.list();
    if served.is_empty() {
        let message = "no worker is known, and with it no model; start one or try again later";
        return Err(RouterError::new(ErrorCode::Unavailable, message).retry_after(Duration::from_secs(1)));
    }
    let message = format!("the model `{}` does not exist; served are: {}", echo(name), names(&served));
    Err(RouterError { code: ErrorCode::ModelNotFound, ..RouterError::field("model", message) })
}

/// The first of these names, and how many more there are.
fn names(served: &[Arc<ModelEntry>]) -> String {
    let some: Vec<_> = served.iter().take(NAMES_TOLD_MAX).map(|entry| echo(&entry.name)).collect();
    match served.len() - some.len() {
        0 => some.join(", "),
        more => format!("{} and {more} more, which GET /v1/models lists", some.join(", ")),
    }
}

/// Sampling of the worker and options of the reply, but for the log probabilities.
pub(super) fn sampling_and_reply(
    fields: &Fields<'_>,
    vocab_size: usize,
    served: &Served<'_>,
) -> Result<(v1::SamplingParams, ReplyOptions), RouterError> {
    let params = sampling::sampling(fields, vocab_size, served.draw_seed)?;
    let flag = |name, default| fields.boolean(name).map(|v| v.unwrap_or(default));
    let stream = flag("stream", false)?;
    let [include_usage, continuous_usage] = usage_of_stream(fields, stream)?;
    let reply = ReplyOptions {
        stream,
        include_usage,
        continuous_usage,
        return_token_ids: flag("return_token_ids", false)?,
        names_are_ids: flag("return_tokens_as_token_ids", false)?,
        stop: sampling::stop_strings(fields)?,
        include_stop: flag("include_stop_str_in_output", false)?,
        skip_special: flag("skip_special_tokens", true)?,
        prompt_logprobs: prompt_logprobs(fields, stream)?,
        ..ReplyOptions::default()
    };
    Ok((params, reply))
}

/// Bounds `min_tokens` by `max_tokens`, where that was given.
pub(super) fn check_min_tokens(fields: &Fields<'_>, min: u32, max: Option<u32>) -> Result<(), RouterError> {
    match max {
        Some(max) if min > max => {
            Err(fields.error("min_tokens", format!("is {min}, which is more than max_tokens ({max})")))
        }
        _ => Ok(()),
    }
}

/// `cache_salt`, empty if none.
pub(super) fn cache_salt(fields: &Fields<'_>) -> Result<String, RouterError> {
    let Some(salt) = fields.string("cache_salt")? else { return Ok(String::new()) };
    if salt.is_empty() || salt.len() > CACHE_SALT_BYTES_MAX {
        return Err(fields.error("cache_salt", format!("must have 1 to {CACHE_SALT_BYTES_MAX} bytes")));
    }
    Ok(salt.to_owned())
}

/// `priority`, if it is given.
pub(super) fn priority(fields: &Fields<'_>) -> Result<Option<i32>, RouterError> {
    let priority = fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?;
    Ok(priority.and_then(|p| i32::try_from(p).ok()))
}

/// A number of alternatives per token.
pub(super) fn alternatives(fields: &Fields<'_>, name: &str) -> Result<Option<u32>, RouterError> {
    let count = fields.integer(name, 0..=i64::from(LOGPROBS_MAX))?;
    Ok(count.and_then(|c| u32::try_from(c).ok()))
}

/// Takes a field out of the body, to own it.
pub(super) fn take(body: &mut Map<String, Value>, name: &str) -> Option<Value> {
    body.get_mut(name).map(Value::take)
}

/// Whether usage ends the stream, and whether vLLM's clients then want it in every chunk as well.
fn usage_of_stream(fields: &Fields<'_>, stream: bool) -> Result<[bool; 2], RouterError> {
    let Some(options) = fields.object("stream_options")? else { return Ok([false; 2]) };
    if !stream {
        return Err(fields.error("stream_options", "is allowed only with \"stream\": true"));
    }
    let options = Fields::within(options, "stream_options.");
    let flag = |name| options.boolean(name).map(|v| v.unwrap_or(false));
    Ok([flag("include_usage")?, flag("continuous_usage_stats")?])
}

/// Tokens that a prompt may have before so many of output.
pub(super) fn room_for_prompt(model: &ModelEntry, output: Option<u32>) -> u32 {
    model.max_model_len.saturating_sub(output.unwrap_or(DEFAULT_MAX_TOKENS)).max(1)
}

/// vLLM's `truncate_prompt_tokens`: so many tokens of a prompt that are kept, -1 standing for the context's `room`.
pub(super) fn truncate_to(fields: &Fields<'_>, room: u32) -> Result<Option<usize>, RouterError> {
    let name = "truncate_prompt_tokens";
    match fields.integer(name, -1..=i64::from(u32::MAX))? {
        None => Ok(None),
        Some(-1) => Ok(Some(room as usize)),
        Some(0) => {
            Err(fields.error(name, "is 0; at least one token must be left, or -1 for the model's context"))
        }
        Some(most) if most > i64::from(room) => {
            Err(fields
                .error(name, format!("is {most}, but the model's context has room for {room}; lower it")))
        }
        Some(most) => Ok(usize::try_from(most).ok()),
    }
}

fn prompt_logprobs(fields: &Fields<'_>, stream: bool) -> Result<Option<u32>, RouterError> {
    let count = alternatives(fields, "prompt_logprobs")?;
    if count.is_some() && stream {
        return Err(fields.error("prompt_logprobs", "is not available with \"stream\": true"));
    }
    Ok(count)
}
