//! Histories as OpenAI's clients send them (case chat-template-03).

use serde_json::{Value, json};

use crate::{compile, render, render_with, template, tokenizer};

fn call(arguments: Value) -> Value {
    json!([{"id": "c00000001", "type": "function", "function": {"name": "f", "arguments": arguments}}])
}

#[test]
fn an_assistant_that_only_calls_tools_needs_no_content() {
    let with = |content: Value| {
        json!([{"role": "user", "content": "go"},
        {"role": "assistant", "content": content, "tool_calls": call(json!({}))}])
    };
    let without =
        json!([{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": call(json!({}))}]);
    for name in ["chatml", "gemma", "llama3", "mistral", "qwen3", "roles"] {
        let text = |messages: &Value| render(&template(name), messages).unwrap().plain_text();
        let empty = text(&with(json!("")));
        assert_eq!(text(&with(Value::Null)), empty, "{name}");
        if name != "roles" {
            assert_eq!(text(&without), empty, "{name}");
        }
    }
}

#[test]
fn arguments_may_be_json_text() {
    let history =
        |arguments: Value| json!([{"role": "assistant", "content": "", "tool_calls": call(arguments)}]);
    let text = |arguments: Value| render(&template("llama3"), &history(arguments)).unwrap().plain_text();
    assert_eq!(text(json!("{\"a\": [1, \"é\"]}")), text(json!({"a": [1, "é"]})));
    assert!(text(json!("{\"a\":1}")).contains("\"parameters\": {\"a\": 1}}"));
    assert!(text(json!("not json")).contains("\"parameters\": \"not json\"}"));
}

#[test]
fn no_tools_and_an_empty_list_are_the_same() {
    let messages = json!([{"role": "user", "content": "go"}]);
    let text = |tools: Value| {
        render_with(&template("llama3"), &messages, &tools, &Value::Null).unwrap().plain_text()
    };
    assert_eq!(text(json!([])), text(Value::Null));
}

#[test]
fn kwargs_cannot_replace_the_messages() {
    let kwargs = json!({"messages": [], "mood": "calm"});
    let template = compile("{{ mood }} {{ messages[0].content }}{{ messages[0].nothing }}");
    let chat = render_with(&template, &json!([{"content": "x"}]), &Value::Null, &kwargs).unwrap();
    assert_eq!(chat.plain_text(), "calm x");
    assert_eq!(tokenizer().encode_chat(&chat).len(), 3);
}
