//! Tools in the words of models whose chat templates do not know of them, and past calls in a form that templates take.

use serde_json::{Value, json};

use crate::dialect::Dialect;
use crate::output::tools::ToolFormat;

/// Puts `tools` and what came of them into the messages of a template that would leave them out; of past calls also where there are none now.
pub(super) fn tell(messages: &mut Value, tools: &Value, dialect: Dialect) {
    let Some(list) = messages.as_array_mut() else { return };
    let is_of_tools = |message: &Value| message["role"] == "tool" || message["tool_calls"].is_array();
    if dialect.renders_tools || tools.is_null() && !list.iter().any(is_of_tools) {
        return;
    }
    let mut told: Vec<Value> = Vec::with_capacity(list.len() + 1);
    for message in list.drain(..) {
        match message["role"].as_str() {
            Some("tool") => tell_result(&mut told, &message),
            Some("assistant") if message["tool_calls"].is_array() => told.push(with_calls(&message, dialect)),
            _ => told.push(message),
        }
    }
    *list = told;
    if !tools.is_null() {
        tell_tools(list, &words(tools, dialect));
    }
}

fn tell_tools(messages: &mut Vec<Value>, words: &str) {
    match messages.first_mut() {
        Some(first) if first["role"] == "system" => {
            let before = first["content"].as_str().unwrap_or_default();
            first["content"] = json!(format!("{before}\n\n{words}"));
        }
        _ => messages.insert(0, json!({"role": "system", "content": words})),
    }
}

/// What the model's makers tell it of tools, in short.
fn words(tools: &Value, dialect: Dialect) -> String {
    let functions: Vec<_> = tools.as_array().into_iter().flatten().map(|tool| &tool["function"]).collect();
    let functions = json!(functions);
    if dialect.tools == ToolFormat::Gemma3 {
        return format!(
            "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the \
             format of {{\"name\": function name, \"parameters\": dictionary of argument name and its value}}. You \
             SHOULD NOT include any other text in the response if you call a function.\n\n{functions}"
        );
    }
    format!(
        "You can call functions. To call them, answer with nothing but a list of calls in this form:\n\
         <tool_call>[{{\"name\": \"function name\", \"arguments\": {{\"argument name\": \"value\"}}}}]</tool_call>\n\
         If no function helps, answer in plain words.\n\nThe functions are:\n<tools>{functions}</tools>"
    )
}

fn with_calls(message: &Value, dialect: Dialect) -> Value {
    let key = if dialect.tools == ToolFormat::Gemma3 { "parameters" } else { "arguments" };
    let function = |call: &Value| {
        let function = &call["function"];
        json!({"name": function["name"], key: function["arguments"]})
    };
    let calls: Vec<_> = message["tool_calls"].as_array().into_iter().flatten().map(function).collect();
    let calls = match (dialect.tools, calls.as_slice()) {
        (ToolFormat::Gemma3, [one]) => one.to_string(),
        (ToolFormat::Gemma3, _) => json!(calls).to_string(),
        _ => format!("<tool_call>{}</tool_call>", json!(calls)),
    };
    let content = match message["content"].as_str().unwrap_or_default() {
        "" => calls,
        words => format!("{words}\n{calls}"),
    };
    json!({"role": "assistant", "content": content})
}

/// Results become a user's words, those of several calls in one message: templates want the roles to alternate.
fn tell_result(told: &mut Vec<Value>, message: &Value) {
    let result =
        format!("<tool_response>\n{}\n</tool_response>", message["content"].as_str().unwrap_or_default());
    match told.last_mut() {
        Some(last) if last["role"] == "user" => {
            let before = last["content"].as_str().unwrap_or_default();
            last["content"] = json!(format!("{before}\n{result}"));
        }
        _ => told.push(json!({"role": "user", "content": result})),
    }
}

/// Brings past calls to what a family's templates accept.
pub(super) fn adapt(messages: &mut Value, dialect: Dialect) {
    match dialect.tools {
        ToolFormat::Mistral => shorten_ids(messages),
        ToolFormat::Llama3Json => split_calls(messages),
        _ => {}
    }
}

/// Mistral's templates take ids of nine letters and digits alone; others keep apart as hashes.
fn shorten_ids(messages: &mut Value) {
    let shorten = |id: &mut Value| {
        if let Some(text) = id.as_str()
            && !(text.len() == 9 && text.bytes().all(|b| b.is_ascii_alphanumeric()))
        {
            *id = json!(blake3::hash(text.as_bytes()).to_hex()[..9]);
        }
    };
    for message in messages.as_array_mut().into_iter().flatten() {
        if let Some(id) = message.get_mut("tool_call_id") {
            shorten(id);
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        calls.into_iter().flatten().filter_map(|call| call.get_mut("id")).for_each(shorten);
    }
}

/// Llama 3's templates take one call a message: several become messages of their own.
fn split_calls(messages: &mut Value) {
    let Some(list) = messages.as_array_mut() else { return };
    let is_several = |message: &Value| message["tool_calls"].as_array().is_some_and(|calls| calls.len() > 1);
    if !list.iter().any(is_several) {
        return;
    }
    let mut split = Vec::with_capacity(list.len() + 1);
    for message in list.drain(..) {
        if !is_several(&message) {
            split.push(message);
            continue;
        }
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let mut one = message.clone();
            one["tool_calls"] = json!([call]);
            split.push(one);
        }
    }
    *list = split;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dialect(tools: ToolFormat) -> Dialect {
        Dialect { tools, renders_tools: false, thinks: false }
    }

    fn call(id: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}})
    }

    #[test]
    fn tools_are_told_where_the_template_does_not() {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let history = json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [call("1"), call("2")]},
            {"role": "tool", "content": "a", "tool_call_id": "1"},
            {"role": "tool", "content": "b", "tool_call_id": "2"},
        ]);
        let mut messages = history.clone();
        tell(&mut messages, &tools, dialect(ToolFormat::Hermes));
        let roles: Vec<_> =
            messages.as_array().expect("messages").iter().map(|m| m["role"].clone()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(
            messages[0]["content"].as_str().is_some_and(|c| c.contains("<tools>[{\"name\":\"f\"}]</tools>"))
        );
        let calls =
            r#"<tool_call>[{"name":"f","arguments":{"x":1}},{"name":"f","arguments":{"x":1}}]</tool_call>"#;
        assert_eq!(messages[2]["content"], calls);
        let results = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>";
        assert_eq!(messages[3]["content"], results);

        let mut with_system =
            json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]);
        tell(&mut with_system, &tools, dialect(ToolFormat::Gemma3));
        let words = with_system[0]["content"].as_str().expect("text");
        assert!(words.starts_with("be brief\n\nYou have access to functions"), "{words}");

        let mut of_old = history.clone();
        tell(&mut of_old, &Value::Null, dialect(ToolFormat::Hermes));
        assert_eq!(of_old.as_array().map(|of_old| &of_old[..]), messages.as_array().map(|told| &told[1..]));

        let mut untouched = history.clone();
        tell(&mut untouched, &tools, Dialect { renders_tools: true, ..dialect(ToolFormat::Hermes) });
        assert_eq!(untouched, history);
        let plain = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "tool_calls": null}]);
        let mut untouched = plain.clone();
        tell(&mut untouched, &Value::Null, dialect(ToolFormat::Hermes));
        assert_eq!(untouched, plain);
    }

    #[test]
    fn past_calls_are_brought_to_what_templates_accept() {
        let history = json!([
            {"role": "assistant", "content": null, "tool_calls": [call("call_abc"), call("abcdefgh1")]},
            {"role": "tool", "content": "a", "tool_call_id": "call_abc"},
        ]);
        let mut messages = history.clone();
        adapt(&mut messages, dialect(ToolFormat::Mistral));
        let id = messages[0]["tool_calls"][0]["id"].as_str().expect("an id");
        assert_eq!((id.len(), &messages[1]["tool_call_id"]), (9, &json!(id)));
        assert_eq!(messages[0]["tool_calls"][1]["id"], "abcdefgh1");

        let mut messages = history.clone();
        adapt(&mut messages, dialect(ToolFormat::Llama3Json));
        let calls: Vec<_> =
            messages.as_array().expect("messages").iter().map(|m| m["tool_calls"].clone()).collect();
        assert_eq!(calls, [json!([call("call_abc")]), json!([call("abcdefgh1")]), Value::Null]);
    }
}
