//! A checkpoint's template, and behind a NUL the messages of a request.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use thalweg_model::chat_template::{ChatInput, ChatTemplate};
use thalweg_model::tokenizer::Tokenizer;

#[path = "../../router/tests/support/tokenizer.rs"]
mod tokenizer;

static TOKENIZER: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::new(&tokenizer::bundle(true, 512)).expect("a sound tokenizer"));

fuzz_target!(|text: &str| {
    let (source, messages) =
        text.split_once('\0').unwrap_or((text, r#"[{"role":"user","content":"<s>hi"}]"#));
    let Ok(template) = ChatTemplate::new(source, &tokenizer::bundle(true, 512)) else { return };
    let Ok(messages) = serde_json::from_str::<Value>(messages) else { return };
    if !messages.as_array().is_some_and(|all| all.iter().all(Value::is_object)) {
        return;
    }
    let input = ChatInput {
        messages: &messages,
        tools: &Value::Null,
        add_generation_prompt: source.len() % 3 == 0,
        continue_final_message: source.len() % 3 == 1,
        kwargs: &Value::Null,
    };
    if let Ok(rendered) = template.render(&input, &TOKENIZER) {
        let ids = TOKENIZER.encode_chat(&rendered);
        assert!(ids.iter().all(|id| (*id as usize) < TOKENIZER.vocab_size()));
    }
});
