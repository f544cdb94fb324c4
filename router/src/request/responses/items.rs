//! Items of a conversation to the messages that chat templates know.
//!
//! A model's turn is several items here and one message there: thoughts, words and calls are put together again.

use serde_json::{Map, Value, json};

use crate::error::{RouterError, echo};
use crate::request::fields::{Fields, invalid};
use crate::request::json::kind;
use crate::request::limits::MESSAGES_MAX;
use crate::request::messages::joined_text;

/// The request's own items, each with a type and an id. A string is a user's message.
pub(super) fn input(value: Option<Value>) -> Result<Vec<Value>, RouterError> {
    let list = match value {
        None | Some(Value::Null) => {
            return Err(input_error("is missing; send a string or an array of items"));
        }
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(list)) if list.is_empty() => {
            return Err(input_error("is empty; send at least one item"));
        }
        Some(Value::Array(list)) if list.len() > MESSAGES_MAX => {
            return Err(input_error(&format!("takes at most {MESSAGES_MAX} items")));
        }
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(input_error(&format!("must be a string or an array of items, not {}", kind(&other))));
        }
    };
    list.into_iter().enumerate().map(|(at, item)| normal(item, &format!("input[{at}]"))).collect()
}

/// Messages of everything said so far. Errors name the request's own items; earlier ones were accepted before.
pub(super) fn messages(history: &[Value], input: &[Value]) -> Result<Vec<Value>, RouterError> {
    let mut transcript = Transcript::default();
    for (at, item) in history.iter().enumerate() {
        transcript.add(item, &format!("previous_response_id[{at}]"))?;
    }
    for (at, item) in input.iter().enumerate() {
        transcript.add(item, &format!("input[{at}]"))?;
    }
    transcript.settle();
    if transcript.messages.len() > MESSAGES_MAX {
        return Err(input_error(&format!(
            "and what it continues have over {MESSAGES_MAX} messages; begin a new conversation"
        )));
    }
    Ok(transcript.messages)
}

/// A new id of this API.
pub(crate) fn fresh_id(prefix: &str) -> String {
    format!("{prefix}_{:032x}", rand::random::<u128>())
}

/// With a type, an id and, of messages, parts in place of a plain string.
fn normal(item: Value, path: &str) -> Result<Value, RouterError> {
    let Value::Object(mut item) = item else {
        return Err(invalid(path.to_owned(), format!("`{path}` must be an object, not {}", kind(&item))));
    };
    let prefix = format!("{path}.");
    let fields = Fields::within(&item, &prefix);
    let kind = match (fields.string("type")?, fields.get("role").is_some()) {
        (Some(kind), _) => kind.to_owned(),
        (None, true) => "message".to_owned(),
        (None, false) => return Err(fields.error("type", "is missing; a message has `role` and `content`")),
    };
    let id_prefix = match kind.as_str() {
        "message" => "msg",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "reasoning" => "rs",
        "item_reference" => {
            return Err(fields.error("type", "item_reference is not supported; send the item itself"));
        }
        other => {
            let known = "message, function_call, function_call_output and reasoning";
            return Err(fields.error("type", format!("is {:?}; known are {known}", echo(other))));
        }
    };
    let id = fields.string("id")?.map_or_else(|| fresh_id(id_prefix), str::to_owned);
    if kind == "message"
        && let Some(Value::String(text)) = item.get("content")
    {
        let (part, text) = (part_type(&item), text.clone());
        item.insert("content".to_owned(), json!([{"type": part, "text": text}]));
    }
    item.insert("type".to_owned(), json!(kind));
    item.insert("id".to_owned(), json!(id));
    item.entry("status").or_insert_with(|| json!("completed"));
    Ok(Value::Object(item))
}

fn part_type(message: &Map<String, Value>) -> &'static str {
    if message.get("role").is_some_and(|role| role == "assistant") { "output_text" } else { "input_text" }
}

#[derive(Default)]
struct Transcript {
    messages: Vec<Value>,
    /// Calls that an output may answer.
    call_ids: Vec<String>,
}

impl Transcript {
    fn add(&mut self, item: &Value, path: &str) -> Result<(), RouterError> {
        let prefix = format!("{path}.");
        // `normal` lets nothing else through.
        let Some(object) = item.as_object() else { return Ok(()) };
        let fields = Fields::within(object, &prefix);
        match fields.string("type")?.unwrap_or("message") {
            "function_call" => self.call(&fields),
            "function_call_output" => self.call_output(&fields, path),
            "reasoning" => self.thoughts(&fields),
            _ => self.message(&fields, path),
        }
    }

    fn message(&mut self, fields: &Fields<'_>, path: &str) -> Result<(), RouterError> {
        let role = match fields.string("role")? {
            Some(role @ ("user" | "assistant" | "system" | "developer")) => role,
            Some(other) => {
                let roles = "user, assistant, system or developer";
                return Err(fields.error("role", format!("must be {roles}, not {:?}", echo(other))));
            }
            None => return Err(fields.error("role", "is missing")),
        };
        let text = match text(fields, "content", path)? {
            Some(text) => text,
            None if role == "assistant" => String::new(),
            None => {
                return Err(fields.error("content", "is missing; send a string or an array of text parts"));
            }
        };
        if role == "assistant" {
            let turn = self.turn(|turn| turn["content"].is_null() && turn.get("tool_calls").is_none());
            turn["content"] = json!(text);
        } else {
            self.messages.push(json!({"role": role, "content": text}));
        }
        Ok(())
    }

    fn call(&mut self, fields: &Fields<'_>) -> Result<(), RouterError> {
        let needed = |name| fields.string(name)?.ok_or_else(|| fields.error(name, "is missing"));
        let (id, name, arguments) = (needed("call_id")?, needed("name")?, needed("arguments")?);
        self.call_ids.push(id.to_owned());
        let function = json!({"name": name, "arguments": arguments});
        let call = json!({"id": id, "type": "function", "function": function});
        let turn = self.turn(|_| true);
        match turn.get_mut("tool_calls").and_then(Value::as_array_mut) {
            Some(calls) => calls.push(call),
            None => turn["tool_calls"] = json!([call]),
        }
        Ok(())
    }

    fn call_output(&mut self, fields: &Fields<'_>, path: &str) -> Result<(), RouterError> {
        let Some(id) = fields.string("call_id")? else {
            return Err(fields.error("call_id", "is missing"));
        };
        if !self.call_ids.iter().any(|known| known == id) {
            let message = format!(
                "is {:?}, but no function_call before it has that call_id; send the call too, or \
                 previous_response_id",
                echo(id)
            );
            return Err(fields.error("call_id", message));
        }
        let output = text(fields, "output", path)?
            .ok_or_else(|| fields.error("output", "is missing; send a string or an array of text parts"))?;
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "content": output}));
        Ok(())
    }

    /// Thoughts as the model wrote them, else their summary; what is encrypted nobody here can read.
    fn thoughts(&mut self, fields: &Fields<'_>) -> Result<(), RouterError> {
        let mut texts = Vec::new();
        for name in ["content", "summary"] {
            let parts = fields.array(name)?.unwrap_or_default();
            texts.extend(parts.iter().filter_map(|part| part["text"].as_str()));
            if !texts.is_empty() {
                break;
            }
        }
        if !texts.is_empty() {
            let turn = self.turn(|turn| turn["content"].is_null() && turn.get("tool_calls").is_none());
            turn["reasoning_content"] = json!(texts.join("\n"));
        }
        Ok(())
    }

    /// Of thoughts that were cut off no words followed.
    fn settle(&mut self) {
        for message in self.messages.iter_mut().filter(|m| m["content"].is_null()) {
            if message.get("tool_calls").is_none() {
                message["content"] = json!("");
            }
        }
    }

    /// The assistant's message that is being put together, if it has room for what comes; else a new one.
    fn turn(&mut self, has_room: impl Fn(&Value) -> bool) -> &mut Value {
        let last = self.messages.last().is_some_and(|m| m["role"] == "assistant" && has_room(m));
        if !last {
            self.messages.push(json!({"role": "assistant", "content": null}));
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }
}

/// A string, or text parts; None where there is nothing.
fn text(fields: &Fields<'_>, name: &str, path: &str) -> Result<Option<String>, RouterError> {
    match fields.get(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(Value::Array(parts)) => joined_text(parts, &format!("{path}.{name}")).map(Some),
        Some(other) => {
            Err(fields
                .error(name, format!("must be a string or an array of text parts, not {}", kind(other))))
        }
    }
}

fn input_error(message: &str) -> RouterError {
    invalid("input".to_owned(), format!("`input` {message}"))
}
