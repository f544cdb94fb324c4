//! Chat messages in OpenAI's shapes, brought to the form that chat templates expect.

use serde_json::{Map, Value};

use crate::error::{RouterError, echo};

use super::fields::{Fields, invalid};
use super::json::kind;
use super::limits::MESSAGES_MAX;

/// Checks `messages` and joins text parts. What comes out is an array of objects with `role`, a `content` that is a
/// string (null only beside tool calls), and whatever else the client put there.
pub(super) fn messages(value: Option<Value>) -> Result<Value, RouterError> {
    let Some(value) = value.filter(|v| !v.is_null()) else {
        return Err(invalid("messages".to_owned(), "`messages` is missing; send at least one message"));
    };
    let Value::Array(mut list) = value else {
        return Err(invalid(
            "messages".to_owned(),
            format!("`messages` must be an array, not {}", kind(&value)),
        ));
    };
    if list.is_empty() {
        return Err(invalid("messages".to_owned(), "`messages` is empty; send at least one message"));
    }
    if list.len() > MESSAGES_MAX {
        return Err(invalid(
            "messages".to_owned(),
            format!("`messages` takes at most {MESSAGES_MAX} messages"),
        ));
    }
    for (at, item) in list.iter_mut().enumerate() {
        let path = format!("messages[{at}]");
        let Value::Object(message) = item else {
            let message = format!("`{path}` must be an object, not {}", kind(item));
            return Err(invalid(path, message));
        };
        normalise(message, &path)?;
    }
    Ok(Value::Array(list))
}

fn normalise(message: &mut Map<String, Value>, path: &str) -> Result<(), RouterError> {
    let role = role(message, path)?;
    let prefix = format!("{path}.");
    for name in ["name", "tool_call_id"] {
        Fields::within(message, &prefix).string(name)?;
    }
    let tool_calls = tool_calls(message, path)?;
    let content = match message.remove("content") {
        Some(Value::String(text)) => Value::String(text),
        Some(Value::Array(parts)) => Value::String(joined_text(&parts, &format!("{path}.content"))?),
        None | Some(Value::Null) if tool_calls => Value::Null,
        // A refusal, thoughts that were cut off, or nothing.
        None | Some(Value::Null) if role == "assistant" => Value::String(String::new()),
        None | Some(Value::Null) => {
            let param = format!("{path}.content");
            let message = format!("`{param}` is missing; only an assistant's message may have none");
            return Err(invalid(param, message));
        }
        Some(other) => {
            let param = format!("{path}.content");
            let message =
                format!("`{param}` must be a string or an array of text parts, not {}", kind(&other));
            return Err(invalid(param, message));
        }
    };
    message.insert("role".to_owned(), Value::String(role.to_owned()));
    message.insert("content".to_owned(), content);
    Ok(())
}

/// OpenAI renamed `system` to `developer`; templates know the old name only.
fn role(message: &Map<String, Value>, path: &str) -> Result<&'static str, RouterError> {
    const ROLES: [(&str, &str); 5] = [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
    ];
    let prefix = format!("{path}.");
    let fields = Fields::within(message, &prefix);
    let Some(role) = fields.string("role")? else {
        return Err(fields.error("role", "is missing"));
    };
    match ROLES.iter().find(|(name, _)| *name == role) {
        Some((_, known)) => Ok(known),
        None => Err(fields.error(
            "role",
            format!("must be system, developer, user, assistant or tool, not {:?}", echo(role)),
        )),
    }
}

/// True if the message calls tools. Arguments come as JSON text and templates want the object that it stands for.
fn tool_calls(message: &mut Map<String, Value>, path: &str) -> Result<bool, RouterError> {
    // Templates take the key alone for a call.
    if message.get("tool_calls").is_some_and(|calls| calls.is_null() || calls == &Value::Array(Vec::new())) {
        message.remove("tool_calls");
    }
    let Some(calls) = message.get_mut("tool_calls") else { return Ok(false) };
    let path = format!("{path}.tool_calls");
    let Value::Array(calls) = calls else {
        let message = format!("`{path}` must be an array, not {}", kind(calls));
        return Err(invalid(path, message));
    };
    for (at, call) in calls.iter_mut().enumerate() {
        let function = function_of(call, &format!("{path}[{at}]"))?;
        if let Some(Value::String(text)) = function.get("arguments")
            && let Ok(object @ Value::Object(_)) =
                serde_json::from_str(if text.trim().is_empty() { "{}" } else { text })
        {
            function.insert("arguments".to_owned(), object);
        }
    }
    Ok(true)
}

/// What a past call called, for which templates want a name.
fn function_of<'a>(call: &'a mut Value, path: &str) -> Result<&'a mut Map<String, Value>, RouterError> {
    let prefix = format!("{path}.");
    if let Some(call) = call.as_object() {
        let fields = Fields::within(call, &prefix);
        fields.string("id")?;
        if fields.string("type")?.is_some_and(|kind| kind != "function") {
            return Err(fields.error("type", "must be \"function\""));
        }
    }
    let path = format!("{path}.function");
    let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) else {
        let message = format!("`{path}` must be an object with `name` and `arguments`");
        return Err(invalid(path, message));
    };
    let prefix = format!("{path}.");
    let fields = Fields::within(function, &prefix);
    if fields.string("name")?.is_none_or(str::is_empty) {
        return Err(fields.error("name", "is missing"));
    }
    if fields.get("arguments").is_some_and(|value| !value.is_string() && !value.is_object()) {
        return Err(fields.error("arguments", "must be a JSON object, or its text"));
    }
    Ok(function)
}

/// Text parts, a line feed between them, as vLLM joins them.
pub(super) fn joined_text(parts: &[Value], path: &str) -> Result<String, RouterError> {
    let mut texts = Vec::with_capacity(parts.len());
    for (at, part) in parts.iter().enumerate() {
        match part {
            Value::String(text) => texts.push(text.as_str()),
            Value::Object(object) => texts.push(part_text(object, &format!("{path}[{at}]."))?),
            other => {
                let path = format!("{path}[{at}]");
                let message = format!("`{path}` must be an object, not {}", kind(other));
                return Err(invalid(path, message));
            }
        }
    }
    Ok(texts.join("\n"))
}

fn part_text<'a>(part: &'a Map<String, Value>, prefix: &str) -> Result<&'a str, RouterError> {
    let fields = Fields::within(part, prefix);
    let name = match fields.string("type")? {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some(other) => {
            let message =
                format!("is {:?}, but this model reads text only; send parts of type \"text\"", echo(other));
            return Err(fields.error("type", message));
        }
        None => return Err(fields.error("type", "is missing")),
    };
    // The part outlives the view of it.
    match part.get(name) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(fields.error(name, format!("must be a string, not {}", kind(other)))),
        None => Err(fields.error(name, "is missing")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(input: Value, expected: Value) {
        assert_eq!(messages(Some(input)).expect("valid"), expected);
    }

    fn check_refused(input: Value, param: &str, part: &str) {
        let error = messages(Some(input)).expect_err("must be refused");
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
    }

    #[test]
    fn contents_become_strings() {
        check(
            json!([{"role": "user", "content": "hi", "name": "ann"}]),
            json!([{"role": "user", "name": "ann", "content": "hi"}]),
        );
        check(
            json!([{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            json!([{"role": "system", "content": "a\nb"}]),
        );
        let call = |arguments: Value| json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
        check(
            json!([{"role": "assistant", "content": null, "tool_calls": call(json!("{\"x\": 1}"))}]),
            json!([{"role": "assistant", "tool_calls": call(json!({"x": 1})), "content": null}]),
        );
        check(
            json!([{"role": "assistant", "tool_calls": call(json!("not json"))}]),
            json!([{"role": "assistant", "tool_calls": call(json!("not json")), "content": null}]),
        );
        check(
            json!([{"role": "assistant", "tool_calls": call(json!(""))}, {"role": "tool", "tool_call_id": "1",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            json!([{"role": "assistant", "tool_calls": call(json!({})), "content": null},
                   {"role": "tool", "tool_call_id": "1", "content": "a\nb"}]),
        );
        for nothing in [json!({"content": null}), json!({}), json!({"content": null, "tool_calls": []})] {
            let mut message = nothing;
            message["role"] = json!("assistant");
            message["refusal"] = json!("No.");
            check(json!([message]), json!([{"role": "assistant", "refusal": "No.", "content": ""}]));
        }
        for none in [json!([]), json!(null)] {
            check(
                json!([{"role": "assistant", "content": "", "tool_calls": none}]),
                json!([{"role": "assistant", "content": ""}]),
            );
        }
    }

    #[test]
    fn refusals_name_the_field() {
        check_refused(json!(null), "messages", "missing");
        check_refused(json!([]), "messages", "empty");
        check_refused(json!("hi"), "messages", "array, not a string");
        check_refused(json!(["hi"]), "messages[0]", "object");
        check_refused(json!([{"content": "x"}]), "messages[0].role", "missing");
        check_refused(json!([{"role": "robot", "content": "x"}]), "messages[0].role", "robot");
        check_refused(json!([{"role": 1, "content": "x"}]), "messages[0].role", "string, not 1");
        check_refused(json!([{"role": "user"}]), "messages[0].content", "missing");
        check_refused(json!([{"role": "system", "content": null}]), "messages[0].content", "assistant");
        check_refused(json!([{"role": "user", "content": 3}]), "messages[0].content", "number");
        let calls = |call: Value| json!([{"role": "assistant", "tool_calls": [call]}]);
        let function = "messages[0].tool_calls[0].function";
        check_refused(calls(json!("f")), function, "object");
        check_refused(calls(json!({"function": {}})), &format!("{function}.name"), "missing");
        check_refused(calls(json!({"function": {"name": 1}})), &format!("{function}.name"), "a string");
        let wrong = calls(json!({"function": {"name": "f", "arguments": [1]}}));
        check_refused(wrong, &format!("{function}.arguments"), "object");
        check_refused(
            calls(json!({"type": "x", "function": {}})),
            "messages[0].tool_calls[0].type",
            "function",
        );
        check_refused(calls(json!({"id": 1, "function": {}})), "messages[0].tool_calls[0].id", "a string");
        check_refused(
            json!([{"role": "tool", "content": "x", "tool_call_id": 1}]),
            "messages[0].tool_call_id",
            "a string",
        );
        let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]);
        check_refused(
            json!([{"role": "user", "content": image}]),
            "messages[0].content[1].type",
            "text only",
        );
    }
}
