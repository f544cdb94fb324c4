//! Chats by templates in the manner of the hub's: the same text as Python's jinja2 makes, and no control token out of
//! what users wrote.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "../support/mod.rs"]
mod support;

mod continued;
mod injection;
mod limits;
mod missing;
mod reference;

use std::sync::OnceLock;

use serde_json::Value;
use thalweg_model::chat_template::{ChatInput, ChatTemplate, RenderedChat, TemplateError};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::tokenizer::Tokenizer;

pub(crate) const IM_START: u32 = 1;
pub(crate) const IM_END: u32 = 2;

/// ChatML's tokenizer: `<|im_start|>`, `<|im_end|>` and `<|endoftext|>` are control tokens.
pub(crate) fn tokenizer() -> &'static Tokenizer {
    static MODEL: OnceLock<Tokenizer> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = support::real_model("SmolLM2-135M-Instruct.Q4_1.gguf");
        Tokenizer::new(&Checkpoint::open(&path).unwrap().tokenizer_bundle().unwrap()).unwrap()
    })
}

pub(crate) fn compile(source: &str) -> ChatTemplate {
    let mut bundle = tokenizer().bundle().clone();
    bundle.template_tokens.insert("bos_token".into(), "<|endoftext|>".into());
    ChatTemplate::new(source, &bundle).unwrap()
}

pub(crate) fn template(name: &str) -> ChatTemplate {
    compile(match name {
        "chatml" => include_str!("templates/chatml.jinja"),
        "gemma" => include_str!("templates/gemma.jinja"),
        "llama3" => include_str!("templates/llama3.jinja"),
        "mistral" => include_str!("templates/mistral.jinja"),
        "qwen3" => include_str!("templates/qwen3.jinja"),
        "roles" => include_str!("templates/roles.jinja"),
        _ => panic!("no template {name}"),
    })
}

pub(crate) fn render(template: &ChatTemplate, messages: &Value) -> Result<RenderedChat, TemplateError> {
    render_with(template, messages, &Value::Null, &Value::Null)
}

pub(crate) fn render_with(
    template: &ChatTemplate,
    messages: &Value,
    tools: &Value,
    kwargs: &Value,
) -> Result<RenderedChat, TemplateError> {
    let input =
        ChatInput { messages, tools, add_generation_prompt: true, continue_final_message: false, kwargs };
    template.render(&input, tokenizer())
}
