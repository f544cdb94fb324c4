//! Every chat by every template, against Python's jinja2 (reference.py).

use serde_json::Value;
use thalweg_model::tokenizer::Specials;

use crate::{compile, render_with, template, tokenizer};

#[derive(serde::Deserialize)]
struct Case {
    template: String,
    chat: String,
    messages: Value,
    tools: Value,
    kwargs: Value,
    text: Option<String>,
    error: Option<String>,
}

#[test]
fn chats_read_as_jinja2_renders_them() {
    // tokenizer-01, chat-template-01, chat-template-03.
    let cases: Vec<Case> = serde_json::from_str(include_str!("renders.json")).unwrap();
    assert!(cases.len() >= 90);
    for case in cases {
        let name = format!("{} by {}", case.chat, case.template);
        let rendered = render_with(&template(&case.template), &case.messages, &case.tools, &case.kwargs);
        match (case.text, rendered) {
            (Some(expected), Ok(chat)) => {
                assert_eq!(chat.plain_text(), expected, "{name}");
                let ids = tokenizer().encode(&expected, Specials::Parse, false);
                assert_eq!(tokenizer().encode_chat(&chat), ids, "{name}");
            }
            (None, Err(error)) => {
                let expected = case.error.unwrap_or_default();
                assert_eq!(error.to_string(), format!("chat template: {expected}"), "{name}");
            }
            (expected, rendered) => panic!("{name}: expected {expected:?}, got {rendered:?}"),
        }
    }
}

/// The template in the model's own file, on the golden chat.
#[test]
fn the_golden_chat_has_its_ids() {
    let golden: Value =
        serde_json::from_str(include_str!("../../../tests/golden/smollm2-135m-instruct-q4_1.json")).unwrap();
    let case = golden["cases"].as_array().unwrap().iter().find(|case| case["name"] == "chat_fmt").unwrap();
    let expected: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
    let template = compile(tokenizer().bundle().chat_template.as_ref().unwrap());
    let messages = serde_json::json!([
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Write one sentence about the moon."},
    ]);
    let chat = render_with(&template, &messages, &Value::Null, &Value::Null).unwrap();
    assert_eq!(tokenizer().encode_chat(&chat), expected);
}
