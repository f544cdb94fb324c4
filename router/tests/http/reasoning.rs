//! Thoughts of models that think.

use serde_json::{Value, json};
use thalweg_router::dialect::ReasoningParser;

use crate::{CHAT, Stage, chat, stage_of, tokenizer};

/// A template of a model that thinks, with Qwen3's switch; `opened` begins the thoughts itself.
fn template(opened: bool) -> String {
    let open = if opened { "<think>\n" } else { "" };
    format!(
        "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}\
         {{% if enable_thinking is defined and not enable_thinking %}}<think>\n\n</think>\n\n{{% else %}}{open}{{% endif %}}"
    )
}

async fn thinking_stage(opened: bool, parser: ReasoningParser) -> Stage {
    let mut bundle = tokenizer::bundle(true, 512);
    bundle.chat_template = Some(template(opened));
    stage_of(|config| config.surface.reasoning_parser = parser, &bundle).await
}

/// Thoughts, content, tokens counted as thoughts; the same streamed and whole.
async fn read(stage: &Stage, fields: Value) -> (String, String, Option<u64>) {
    let mut body = chat(fields);
    let reply = stage.http.post(CHAT, &body).await.json();
    let message = &reply["choices"][0]["message"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let whole = (text(&message["reasoning_content"]), text(&message["content"]));
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = stage.http.post(CHAT, &body).await.chunks();
    let added = |field: &str| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!((added("reasoning_content"), added("content")), whole);
    let tokens = &reply["usage"]["completion_tokens_details"]["reasoning_tokens"];
    assert_eq!(&chunks.last().unwrap()["usage"]["completion_tokens_details"]["reasoning_tokens"], tokens);
    (whole.0, whole.1, tokens.as_u64())
}

fn expect(thoughts: &str, content: &str, tokens: Option<usize>) -> (String, String, Option<u64>) {
    (thoughts.to_owned(), content.to_owned(), tokens.map(|t| t as u64))
}

#[tokio::test]
async fn thoughts_are_told_from_the_answer() {
    let stage = thinking_stage(false, ReasoningParser::Auto).await;
    let thoughts = "<think>\nhm, 大阪\n</think>";
    stage.worker.says("<think>\nhm, 大阪\n</think>\n\nyes");
    // All but what stands before the mark is complete.
    let counted = thoughts.len() - "<think>".len() + 1;
    assert_eq!(read(&stage, json!({})).await, expect("hm, 大阪", "yes", Some(counted)));
    // Stop strings are for the answer.
    assert_eq!(read(&stage, json!({"stop": "hm"})).await, expect("hm, 大阪", "yes", Some(counted)));
    stage.worker.says("yes");
    assert_eq!(read(&stage, json!({})).await, expect("", "yes", Some(0)));
}

#[tokio::test]
async fn a_template_may_open_the_thoughts_or_close_them() {
    let stage = thinking_stage(true, ReasoningParser::Auto).await;
    stage.worker.says("hm</think>yes");
    assert_eq!(read(&stage, json!({})).await, expect("hm", "yes", Some(10)));
    let cut = read(&stage, json!({"max_tokens": 6})).await;
    assert_eq!(cut, expect("hm</th", "", Some(6)));
    let off = json!({"chat_template_kwargs": {"enable_thinking": false}});
    assert_eq!(read(&stage, off).await, expect("", "hm</think>yes", Some(0)));
}

#[tokio::test]
async fn the_parser_can_be_chosen() {
    let off = thinking_stage(false, ReasoningParser::None).await;
    off.worker.says("<think>hm</think>yes");
    assert_eq!(read(&off, json!({})).await, expect("", "<think>hm</think>yes", None));
    let assumed = thinking_stage(false, ReasoningParser::DeepseekR1).await;
    assumed.worker.says("hm</think>yes");
    assert_eq!(read(&assumed, json!({})).await, expect("hm", "yes", Some(10)));
}

#[tokio::test]
async fn constrained_answers_begin_behind_thoughts() {
    let lark = async |opened: bool, fields: Value| {
        let stage = thinking_stage(opened, ReasoningParser::Auto).await;
        stage.worker.says("hm</think>\n\n{}");
        let read = read(&stage, fields).await;
        (format!("{:?}", stage.worker.requests()[0].grammar), read)
    };
    let format = json!({"response_format": {"type": "json_object"}});
    let (grammar, answer) = lark(true, format.clone()).await;
    assert!(grammar.contains("</think>") && !grammar.contains("<think>"), "{grammar}");
    assert_eq!(answer, expect("hm", "{}", Some(10)));
    let (grammar, _) = lark(false, format.clone()).await;
    assert!(grammar.contains("<think>"), "the model may think or not: {grammar}");
    let off = json!({"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": false}});
    let (grammar, _) = lark(true, off).await;
    assert!(!grammar.contains("think"), "{grammar}");

    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let forced = json!({"tools": tools, "tool_choice": {"type": "function", "function": {"name": "f"}}});
    let (grammar, answer) = lark(true, forced).await;
    assert!(grammar.contains("</think>"), "{grammar}");
    assert_eq!((answer.0.as_str(), answer.1.as_str()), ("hm", ""));
}

#[tokio::test]
async fn calls_come_behind_thoughts() {
    let stage = thinking_stage(true, ReasoningParser::Auto).await;
    stage
        .worker
        .says("I could <tool_call></think>\n\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>");
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let reply = stage.http.post(CHAT, &chat(json!({"tools": tools}))).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["reasoning_content"], "I could <tool_call>");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "f");
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null)
    );
}
