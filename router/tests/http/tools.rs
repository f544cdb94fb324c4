//! Tool calls as clients get them, streamed and whole.

use serde_json::{Value, json};

use crate::{CHAT, Stage, chat, stage_of, tokenizer};

const TWO_CALLS: &str = "Let me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \
    \"note\": \"a\\n\\nb }}\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>";
const WEATHER: &str = "{\"city\": \"Oslo\", \"note\": \"a\\n\\nb }}\"}";

async fn roomy_stage() -> Stage {
    stage_of(|_| {}, &tokenizer::bundle(true, 2048)).await
}

fn tools() -> Value {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    json!([tool("weather"), tool("add")])
}

fn with_tools(fields: Value) -> Value {
    let mut body = chat(json!({"tools": tools(), "max_tokens": 400}));
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

/// What the openai SDK makes of a stream: fields of deltas added up by string addition.
#[derive(Debug, Default, PartialEq)]
struct Added {
    content: String,
    /// Id, name, arguments.
    calls: Vec<(String, String, String)>,
    finish: String,
}

async fn streamed(stage: &Stage, body: &Value) -> Added {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let chunks = stage.http.post(CHAT, &body).await.chunks();
    let mut added = Added::default();
    for (at, chunk) in chunks.iter().enumerate() {
        assert!(chunk["id"] == chunks[0]["id"] && chunk["object"] == "chat.completion.chunk", "{chunk}");
        assert!(chunk["created"].is_u64() && chunk["model"] == "tiny", "{chunk}");
        let choice = &chunk["choices"][0];
        let delta = choice["delta"].as_object().unwrap();
        assert_eq!(delta.contains_key("role"), at == 0, "the role stands in the first delta alone: {chunk}");
        assert_eq!(choice["index"], 0);
        added.content += delta.get("content").and_then(Value::as_str).unwrap_or_default();
        for call in delta.get("tool_calls").into_iter().flat_map(|calls| calls.as_array().unwrap()) {
            let index = call["index"].as_u64().unwrap() as usize;
            let is_first = index == added.calls.len();
            let keys: Vec<_> = call.as_object().unwrap().keys().map(String::as_str).collect();
            if is_first {
                assert_eq!(
                    (keys.as_slice(), &call["type"]),
                    (&["index", "id", "type", "function"][..], &json!("function"))
                );
                added.calls.push(Default::default());
            } else {
                assert_eq!(keys, ["index", "function"]);
                assert!(call["function"].get("name").is_none(), "{call}");
            }
            let known = &mut added.calls[index];
            known.0 += call["id"].as_str().unwrap_or_default();
            known.1 += call["function"]["name"].as_str().unwrap_or_default();
            known.2 += call["function"]["arguments"].as_str().unwrap();
        }
        added.finish += choice["finish_reason"].as_str().unwrap_or_default();
    }
    added
}

async fn whole(stage: &Stage, body: &Value) -> Added {
    let reply = stage.http.post(CHAT, body).await.json();
    let choice = &reply["choices"][0];
    let mut added =
        Added { finish: choice["finish_reason"].as_str().unwrap().to_owned(), ..Added::default() };
    let message = &choice["message"];
    added.content = message["content"].as_str().unwrap_or_default().to_owned();
    for call in message.get("tool_calls").into_iter().flat_map(|calls| calls.as_array().unwrap()) {
        assert!(call.get("index").is_none() && call["type"] == "function", "{call}");
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let function = &call["function"];
        added.calls.push((text(&call["id"]), text(&function["name"]), text(&function["arguments"])));
    }
    added
}

/// Ids are drawn anew for each reply.
fn without_ids(mut added: Added) -> Added {
    added.calls.iter_mut().for_each(|call| call.0.clear());
    added
}

async fn both(stage: &Stage, body: &Value) -> Added {
    let (streamed, whole) = (streamed(stage, body).await, whole(stage, body).await);
    let ids: Vec<_> = streamed.calls.iter().chain(&whole.calls).map(|call| call.0.clone()).collect();
    assert!(
        ids.iter().enumerate().all(|(at, id)| id.starts_with("call_") && !ids[..at].contains(id)),
        "{ids:?}"
    );
    let (streamed, whole) = (without_ids(streamed), without_ids(whole));
    assert_eq!(streamed, whole);
    whole
}

fn call(name: &str, arguments: &str) -> (String, String, String) {
    (String::new(), name.to_owned(), arguments.to_owned())
}

#[tokio::test]
async fn parallel_calls_add_up_to_what_the_whole_reply_says() {
    // tools-01, tools-02, client-01.
    let stage = roomy_stage().await;
    stage.worker.says(TWO_CALLS);
    let added = both(&stage, &with_tools(json!({}))).await;
    assert_eq!(added.content, "Let me see.\n");
    assert_eq!(added.calls, [call("weather", WEATHER), call("add", "{\"a\": 1}")]);
    assert_eq!(added.finish, "tool_calls");

    let one = both(&stage, &with_tools(json!({"parallel_tool_calls": false}))).await;
    assert_eq!((one.calls.as_slice(), one.finish.as_str()), (&[call("weather", WEATHER)][..], "tool_calls"));
}

#[tokio::test]
async fn a_message_that_only_calls_has_no_content() {
    let stage = roomy_stage().await;
    stage.worker.says("<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>");
    let reply = stage.http.post(CHAT, &with_tools(json!({}))).await.json();
    let message = &reply["choices"][0]["message"];
    assert!(message["content"].is_null() && message.get("content").is_some(), "{message}");
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "add", "arguments": "{}"}));
}

#[tokio::test]
async fn a_call_that_max_tokens_cuts_is_told_as_cut() {
    // tools-03.
    let stage = roomy_stage().await;
    stage.worker.says(WEATHER);
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for max_tokens in 1..WEATHER.len() + 3 {
        let body = with_tools(json!({"tool_choice": named, "max_tokens": max_tokens}));
        let added = both(&stage, &body).await;
        let arguments = &added.calls[0].2;
        let parses = serde_json::from_str::<Value>(arguments).is_ok();
        assert_eq!(parses, max_tokens >= WEATHER.len(), "{arguments}");
        assert_eq!(added.finish, if parses { "tool_calls" } else { "length" }, "{max_tokens}: {arguments}");
        assert_eq!((added.calls.len(), added.content.as_str()), (1, ""));
    }
    // What was said of a call that had not begun is not lost.
    stage.worker.says(TWO_CALLS);
    let cut = both(&stage, &with_tools(json!({"max_tokens": 30}))).await;
    assert_eq!((cut.content.as_str(), cut.finish.as_str()), (&TWO_CALLS[..30], "length"));
}

#[tokio::test]
async fn forced_calls_are_held_to_the_tools_schemas() {
    let stage = roomy_stage().await;
    stage.worker.says("[{\"name\": \"weather\", \"parameters\": {\"city\": \"Oslo\"}}, {\"name\": \"add\", \"parameters\": {}}]");
    let added = both(&stage, &with_tools(json!({"tool_choice": "required"}))).await;
    assert_eq!(added.calls, [call("weather", "{\"city\": \"Oslo\"}"), call("add", "{}")]);
    assert_eq!((added.content.as_str(), added.finish.as_str()), ("", "tool_calls"));
    let request = stage.worker.requests().pop().unwrap();
    let grammar = format!("{:?}", request.grammar.expect("a grammar"));
    assert!(grammar.contains("weather") && grammar.contains("minItems"), "{grammar}");

    let parameters = json!({"type": "object", "properties": {"x": {"type": "wobble"}}});
    let strange = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let body = with_tools(json!({"tools": strange, "tool_choice": "required"}));
    let refused = stage.http.post(CHAT, &body).await;
    assert_eq!(
        (refused.status.as_u16(), refused.error()["param"].as_str()),
        (400, Some("tools")),
        "{}",
        refused.text
    );
}

#[tokio::test]
async fn allowed_tools_alone_are_told_of_and_called() {
    let stage = roomy_stage().await;
    let allowed = |mode: &str| {
        let tools = json!([{"type": "function", "function": {"name": "add"}}]);
        json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}})
    };
    stage.worker.says("<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>");
    let added = both(&stage, &with_tools(allowed("auto"))).await;
    assert_eq!((added.calls, added.finish.as_str()), (vec![call("add", "{\"a\": 1}")], "tool_calls"));
    let request = stage.worker.requests().pop().unwrap();
    let text: String = request.prompt_ids.iter().filter_map(|id| char::from_u32(*id)).collect();
    assert!(text.contains("add") && !text.contains("weather") && request.grammar.is_none(), "{text}");

    // No tool that is not allowed is called, whatever the model says.
    let other = "<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>";
    stage.worker.says(other);
    let added = both(&stage, &with_tools(allowed("auto"))).await;
    assert_eq!((added.content.as_str(), added.calls.len(), added.finish.as_str()), (other, 0, "stop"));

    stage.worker.says("[{\"name\": \"add\", \"parameters\": {\"a\": 2}}]");
    let added = both(&stage, &with_tools(allowed("required"))).await;
    assert_eq!((added.calls, added.finish.as_str()), (vec![call("add", "{\"a\": 2}")], "tool_calls"));
    let grammar = format!("{:?}", stage.worker.requests().pop().unwrap().grammar.expect("a grammar"));
    assert!(grammar.contains("add") && !grammar.contains("weather"), "{grammar}");

    let unknown = json!([{"type": "function", "function": {"name": "sum"}}]);
    let choice = json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": unknown}});
    let refused = stage.http.post(CHAT, &with_tools(json!({"tool_choice": choice}))).await;
    let param = "tool_choice.allowed_tools.tools[0].function.name";
    assert_eq!((refused.status.as_u16(), refused.error()["param"].as_str()), (400, Some(param)));
}

#[tokio::test]
async fn tool_choice_none_is_taken_with_tools_and_without() {
    // tools-07.
    let stage = roomy_stage().await;
    stage.worker.says(TWO_CALLS);
    for fields in [
        json!({"tool_choice": "none"}),
        json!({"tool_choice": "none", "tools": null}),
        json!({"tool_choice": "auto", "tools": null}),
        json!({"tool_choice": "auto", "tools": []}),
    ] {
        let added = both(&stage, &with_tools(fields.clone())).await;
        assert_eq!((added.content.as_str(), added.finish.as_str()), (TWO_CALLS, "stop"), "{fields}");
        assert_eq!(added.calls, []);
        let prompt = stage.worker.requests().pop().unwrap().prompt_ids;
        let text: String = prompt.iter().filter_map(|id| char::from_u32(*id)).collect();
        assert!(!text.contains("weather"), "the model is told of no tools: {text}");
    }
    let null = both(&stage, &with_tools(json!({"tool_choice": null}))).await;
    assert_eq!(null.finish, "tool_calls");
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let body = with_tools(json!({"tool_choice": choice, "tools": null}));
        let refused = stage.http.post(CHAT, &body).await;
        assert_eq!((refused.status.as_u16(), refused.error()["param"].as_str()), (400, Some("tool_choice")));
    }
}

#[tokio::test]
async fn stop_strings_are_looked_for_in_content_and_not_in_calls() {
    // tools-08.
    let stage = roomy_stage().await;
    stage.worker.says(TWO_CALLS);
    let stop = json!(["\n\n", "}}", "zzz", "</tool_call>"]);
    let added = both(&stage, &with_tools(json!({"stop": stop}))).await;
    assert_eq!(added.calls, [call("weather", WEATHER), call("add", "{\"a\": 1}")]);
    assert_eq!((added.content.as_str(), added.finish.as_str()), ("Let me see.\n", "tool_calls"));

    let cut = both(&stage, &with_tools(json!({"stop": "see"}))).await;
    assert_eq!((cut.content.as_str(), cut.finish.as_str(), cut.calls.len()), ("Let me ", "stop", 0));
    // What might have become a stop string is not lost when a call comes instead.
    let held = both(&stage, &with_tools(json!({"stop": "see.\n\n"}))).await;
    assert_eq!((held.content.as_str(), held.calls.len()), ("Let me see.\n", 2));
}

#[tokio::test]
async fn each_of_several_choices_has_calls_of_its_own() {
    let stage = roomy_stage().await;
    stage.worker.says("<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": #}}</tool_call>");
    let reply = stage.http.post(CHAT, &with_tools(json!({"n": 2}))).await.json();
    let arguments =
        |at: usize| reply["choices"][at]["message"]["tool_calls"][0]["function"]["arguments"].clone();
    assert_eq!([arguments(0), arguments(1)], [json!("{\"a\": 0}"), json!("{\"a\": 1}")]);
}

#[tokio::test]
async fn usual_histories_of_calls_are_taken() {
    // chat-template-03.
    let stage = roomy_stage().await;
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}});
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let messages = json!([
        {"role": "user", "content": parts},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": []},
        {"role": "user", "content": ""},
    ]);
    let reply = stage.http.post(CHAT, &chat(json!({"messages": messages}))).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    let prompt = stage.worker.requests().pop().unwrap().prompt_ids;
    let text: String = prompt.iter().filter_map(|id| char::from_u32(*id).filter(char::is_ascii)).collect();
    assert!(text.contains("user\na\nb") && text.contains("tool\na\nb") && text.contains("tool\n2"), "{text}");
}
