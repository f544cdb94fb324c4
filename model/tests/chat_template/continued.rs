//! Chats that end within an answer, for the model to go on with it.

use serde_json::{Value, json};
use thalweg_model::chat_template::{ChatInput, ChatTemplate, RenderedChat, TemplateError};

use crate::{compile, template, tokenizer};

fn continued(template: &ChatTemplate, answer: &str) -> Result<RenderedChat, TemplateError> {
    let messages = json!([{"role": "user", "content": "Two?"}, {"role": "assistant", "content": answer}]);
    let input = ChatInput {
        messages: &messages,
        tools: &Value::Null,
        add_generation_prompt: false,
        continue_final_message: true,
        kwargs: &Value::Null,
    };
    template.render(&input, tokenizer())
}

/// As transformers' `apply_chat_template` cuts them, which takes the end of the header along where a trimmed answer is empty.
#[test]
fn the_answer_is_left_open_as_its_template_writes_it() {
    let check = |name: &str, answer: &str, expected: &str| {
        let text = continued(&template(name), answer).unwrap().plain_text();
        assert!(text.ends_with(expected), "{name}: {text:?} does not end with {expected:?}");
    };
    check("chatml", "It is ", "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nIt is ");
    check("chatml", "", "<|im_start|>assistant\n");
    check("gemma", "", "<|im_start|>model\n");
    check("gemma", " It is ", "<|im_start|>model\nIt is");
    check("llama3", "It is\n", "<|im_start|>assistant\n\nIt is");
    check("qwen3", "It is", "It is");
    check("chatml", "It is It is", "<|im_start|>assistant\nIt is It is");
}

#[test]
fn control_tokens_of_the_answer_stay_text() {
    for answer in ["a<|im_end|>b", "<|im_start|>", "a<|im_", " <|im_end|> "] {
        for name in ["chatml", "gemma", "llama3"] {
            let chat = continued(&template(name), answer).unwrap();
            assert!(chat.plain_text().trim_end().ends_with(answer.trim()), "{name}: {answer:?}");
            let ends = tokenizer().encode_chat(&chat).iter().filter(|id| **id == 2).count();
            let whole = continued(&template(name), "a").unwrap();
            let without = tokenizer().encode_chat(&whole).iter().filter(|id| **id == 2).count();
            assert_eq!(ends, without, "{name}: {answer:?}");
        }
    }
}

#[test]
fn a_template_that_drops_the_last_message_says_so() {
    let error = continued(&compile("{{ messages[0].content }}"), "It is").unwrap_err();
    assert!(error.to_string().contains("cannot be continued"), "{error}");
}

#[test]
fn documents_reach_the_template() {
    let template =
        compile("{% for it in documents or [] %}{{ it.title }};{% endfor %}{{ messages[0].content }}");
    let messages = json!([{"role": "user", "content": "hi"}]);
    let check = |kwargs: Value, expected: &str| {
        let chat = crate::render_with(&template, &messages, &Value::Null, &kwargs).unwrap();
        assert_eq!(chat.plain_text(), expected);
    };
    check(json!({"documents": [{"title": "one"}, {"title": "two"}]}), "one;two;hi");
    check(Value::Null, "hi");
}
