//! Fields of a request but for its conversation: as a chat knows them, and as the reply repeats them.

use serde_json::{Map, Value, json};

use crate::error::RouterError;
use crate::request::ValidRequest;
use crate::request::common;
use crate::request::fields::{Fields, invalid};
use crate::request::limits::{METADATA_ENTRIES_MAX, METADATA_KEY_CHARS_MAX, METADATA_VALUE_CHARS_MAX};
use crate::request::unsupported::refuse_constraints;

use super::tools;

/// What `include` asks log probabilities with.
const LOGPROBS: &str = "message.output_text.logprobs";

/// Fields that a chat takes as they are, vLLM's extensions among them.
const SAME: [&str; 24] = [
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logit_bias",
    "cache_salt",
    "priority",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
    "chat_template_kwargs",
    "documents",
    "truncate_prompt_tokens",
];

/// How those begin that hold an answer to something: a chat knows them, and refuses what it does not know.
const GUIDED: &str = "guided_";

/// Refuses what would make another answer of the request, by name.
pub(super) fn refuse_unsupported(fields: &Fields<'_>) -> Result<(), RouterError> {
    if fields.boolean("background")? == Some(true) {
        return Err(
            fields.error("background", "is not supported; wait for the answer, or use \"stream\": true")
        );
    }
    match fields.string("truncation")? {
        None | Some("disabled") => {}
        Some("auto") => {
            let advice = "\"auto\" is not supported; leave out earlier items of `input` yourself";
            return Err(fields.error("truncation", advice));
        }
        Some(_) => return Err(fields.error("truncation", "must be \"disabled\"")),
    }
    for (name, advice) in [
        ("conversation", "is not supported; use `previous_response_id`"),
        ("prompt", "is not supported; send `instructions` and `input`"),
        ("context_management", "is not supported; leave it out"),
    ] {
        if fields.get(name).is_some() {
            return Err(fields.error(name, advice));
        }
    }
    if fields.get("response_format").is_some() {
        // Told of the field to send: by its own name it would be told in the words of this API.
        return Err(invalid(
            Some("text".to_owned()),
            "`response_format` is a field of chats; send `text.format`",
        ));
    }
    refuse_constraints(fields)?;
    match fields.integer("n", i64::MIN..=i64::MAX)? {
        None | Some(1) => Ok(()),
        Some(_) => Err(fields.error("n", "is not supported; send several requests")),
    }
}

/// Puts `instructions` before the conversation; into its own first words of that kind, as many templates take only one
/// system message.
pub(super) fn instruct(fields: &Fields<'_>, messages: &mut Vec<Value>) -> Result<(), RouterError> {
    let Some(instructions) = fields.string("instructions")? else { return Ok(()) };
    match messages.first_mut() {
        Some(first) if first["role"] == "system" || first["role"] == "developer" => {
            let own = first["content"].as_str().unwrap_or_default();
            first["content"] = json!(format!("{instructions}\n\n{own}"));
        }
        _ => messages.insert(0, json!({"role": "system", "content": instructions})),
    }
    Ok(())
}

/// The body of a chat request that means the same.
pub(super) fn chat(fields: &Fields<'_>, messages: Vec<Value>) -> Result<Map<String, Value>, RouterError> {
    let mut chat = Map::new();
    let mut put = |name: &str, value: Value| {
        chat.insert(name.to_owned(), value);
    };
    for name in SAME.into_iter().chain(fields.names().filter(|name| name.starts_with(GUIDED))) {
        if let Some(value) = fields.get(name) {
            put(name, value.clone());
        }
    }
    put("messages", Value::Array(messages));
    if let Some(max) = fields.get("max_output_tokens") {
        put("max_completion_tokens", max.clone());
    }
    let top = common::alternatives(fields, "top_logprobs")?;
    if wants_logprobs(fields)? {
        put("logprobs", json!(true));
        put("top_logprobs", json!(top.unwrap_or(0)));
    }
    if let Some(list) = tools::definitions(fields)? {
        put("tools", list);
    }
    if let Some(choice) = tools::choice(fields)? {
        put("tool_choice", choice);
    }
    if let Some(format) = format(fields)? {
        put("response_format", format);
    }
    if let Some(effort) = effort(fields)? {
        put("reasoning_effort", json!(effort));
    }
    Ok(chat)
}

/// What the response object repeats.
pub(super) fn echo(fields: &Fields<'_>, request: &ValidRequest) -> Result<Map<String, Value>, RouterError> {
    let same = |name: &str| fields.get(name).cloned();
    let text = |name| fields.string(name).map(|text| text.map_or(Value::Null, |text| json!(text)));
    let sampling = request.sampling();
    let effort = fields.get("reasoning").and_then(|r| r.get("effort")).cloned().unwrap_or(Value::Null);
    let echo = json!({
        "instructions": text("instructions")?,
        "max_output_tokens": same("max_output_tokens"),
        "max_tool_calls": same("max_tool_calls"),
        "metadata": metadata(fields)?,
        "parallel_tool_calls": same("parallel_tool_calls").unwrap_or(json!(true)),
        "previous_response_id": text("previous_response_id")?,
        "prompt_cache_key": text("prompt_cache_key")?,
        "reasoning": {"effort": effort, "summary": null},
        "safety_identifier": text("safety_identifier")?,
        "service_tier": "default",
        "temperature": same("temperature").unwrap_or(json!(sampling.temperature)),
        "text": {"format": format_echo(fields)},
        "tool_choice": same("tool_choice").unwrap_or(json!("auto")),
        "tools": tools::echo(fields)?,
        "top_logprobs": same("top_logprobs").unwrap_or(json!(0)),
        "top_p": same("top_p").unwrap_or(json!(sampling.top_p)),
        "truncation": "disabled",
        "user": text("user")?,
    });
    match echo {
        Value::Object(fields) => Ok(fields),
        _ => Ok(Map::new()),
    }
}

fn wants_logprobs(fields: &Fields<'_>) -> Result<bool, RouterError> {
    let include = fields.array("include")?.unwrap_or_default();
    if include.iter().any(|name| !name.is_string()) {
        return Err(fields.error("include", "must be an array of strings"));
    }
    Ok(include.iter().any(|name| name == LOGPROBS))
}

/// `text.format` as `response_format`.
fn format(fields: &Fields<'_>) -> Result<Option<Value>, RouterError> {
    let Some(text) = fields.object("text")? else { return Ok(None) };
    let Some(format) = Fields::within(text, "text.").object("format")? else { return Ok(None) };
    if format.get("type").is_none_or(|kind| kind != "json_schema") {
        return Ok(Some(Value::Object(format.clone())));
    }
    let mut schema = format.clone();
    schema.remove("type");
    Ok(Some(json!({"type": "json_schema", "json_schema": schema})))
}

/// SDKs read `name`, `schema` and `strict` of a schema.
fn format_echo(fields: &Fields<'_>) -> Value {
    let format = fields.get("text").and_then(|text| text.get("format")).filter(|format| !format.is_null());
    format.cloned().unwrap_or_else(|| json!({"type": "text"}))
}

/// `reasoning.effort`, for a chat to check.
fn effort<'a>(fields: &Fields<'a>) -> Result<Option<&'a str>, RouterError> {
    let Some(reasoning) = fields.object("reasoning")? else { return Ok(None) };
    Fields::within(reasoning, "reasoning.").string("effort")
}

fn metadata(fields: &Fields<'_>) -> Result<Value, RouterError> {
    let Some(object) = fields.object("metadata")? else { return Ok(json!({})) };
    if object.len() > METADATA_ENTRIES_MAX {
        return Err(fields.error("metadata", format!("takes at most {METADATA_ENTRIES_MAX} entries")));
    }
    let entries = Fields::within(object, "metadata.");
    for name in object.keys() {
        if name.chars().count() > METADATA_KEY_CHARS_MAX {
            let rule = format!("has a key of over {METADATA_KEY_CHARS_MAX} characters");
            return Err(fields.error("metadata", rule));
        }
        let value = entries.string(name)?.unwrap_or_default();
        if value.chars().count() > METADATA_VALUE_CHARS_MAX {
            let rule = format!("takes at most {METADATA_VALUE_CHARS_MAX} characters");
            return Err(entries.error(name, rule));
        }
    }
    Ok(Value::Object(object.clone()))
}
