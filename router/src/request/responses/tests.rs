//! Bodies that are refused, and the chats that the others mean.

use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use super::*;
use crate::config::Surface;
use crate::request::{Prompt, parse_object};
use crate::test_support::models;

fn parse(body: &Value, history: Vec<Value>) -> Result<(ValidRequest, Echo), RouterError> {
    let models = models();
    let served = Served { models: &models, choices_max: 128, surface: &Surface::default(), draw_seed: &|| 7 };
    let draft = Draft::read(parse_object(body.to_string().as_bytes())?)?;
    parse_responses(draft, history, true, &served)
}

fn with(changes: Value) -> Value {
    let mut body = json!({"model": "tiny", "input": "hi"});
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn accepted(changes: Value, history: Vec<Value>) -> (ValidRequest, Echo) {
    parse(&with(changes), history).unwrap_or_else(|error| panic!("{}", error.message))
}

fn messages(changes: Value, history: Vec<Value>) -> Value {
    let (mut request, _) = accepted(changes, history);
    match request.take_prompts().pop() {
        Some(Prompt::Chat(chat)) => chat.messages,
        other => panic!("no chat: {other:?}"),
    }
}

fn check_refused(changes: Value, param: &str, part: &str) {
    let body = with(changes);
    let error = parse(&body, Vec::new()).err().unwrap_or_else(|| panic!("{body} was let through"));
    assert_eq!(error.code, ErrorCode::InvalidRequest, "{}", error.message);
    assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
    assert!(error.message.contains(part), "{part:?} is not in {:?}", error.message);
}

fn call(id: &str) -> Value {
    json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{\"x\": 1}"})
}

fn called(id: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}})
}

#[test]
fn input_becomes_messages() {
    let check = |changes: Value, expected: Value| assert_eq!(messages(changes, Vec::new()), expected);
    check(json!({}), json!([{"role": "user", "content": "hi"}]));
    check(
        json!({"instructions": "be brief"}),
        json!([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]),
    );
    let parts = json!([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]);
    check(
        json!({"instructions": "be brief", "input": [
            {"role": "developer", "content": "be kind"},
            {"type": "message", "role": "user", "content": parts},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        ]}),
        json!([{"role": "system", "content": "be brief\n\nbe kind"}, {"role": "user", "content": "a\nb"},
               {"role": "assistant", "content": "c"}]),
    );
}

#[test]
fn items_of_one_turn_become_one_message() {
    let check =
        |input: Value, expected: Value| assert_eq!(messages(json!({"input": input}), Vec::new()), expected);
    let user = json!({"role": "user", "content": "q"});
    let thoughts =
        json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "r"});
    check(
        json!([user, thoughts, call("1"), call("2"), output("1"), output("2"), {"role": "assistant", "content": "a"}]),
        json!([
            user,
            {"role": "assistant", "content": null, "reasoning_content": "t", "tool_calls": [called("1"), called("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "tool", "tool_call_id": "2", "content": "r"},
            {"role": "assistant", "content": "a"},
        ]),
    );
    check(
        json!([user, {"role": "assistant", "content": "let me see"}, call("1"), {"role": "assistant", "content": "b"}]),
        json!([
            user,
            {"role": "assistant", "content": "let me see", "tool_calls": [called("1")]},
            {"role": "assistant", "content": "b"},
        ]),
    );
    for nothing in [json!({"role": "assistant", "content": null}), json!({"role": "assistant"})] {
        check(json!([user, nothing]), json!([user, {"role": "assistant", "content": ""}]));
    }
    // Thoughts that were cut off.
    check(
        json!([user, thoughts]),
        json!([user, {"role": "assistant", "content": "", "reasoning_content": "t"}]),
    );
}

#[test]
fn a_kept_conversation_stands_before_the_input() {
    let kept = Kept {
        history: vec![json!({"type": "message", "role": "user", "content": "1"})],
        input: vec![json!({"type": "message", "role": "user", "content": "2"}), call("c")],
        response: json!({"output": [{"type": "message", "role": "assistant",
                                     "content": [{"type": "output_text", "text": "3", "annotations": []}]}]}),
    };
    let input = json!([{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "4"}]}]);
    let changes = json!({"input": input, "instructions": "new", "previous_response_id": "resp_1"});
    let contents: Vec<_> = messages(changes, kept.into_items())
        .as_array()
        .expect("messages")
        .iter()
        .map(|m| m["content"].clone())
        .collect();
    assert_eq!(contents, [json!("new"), json!("1"), json!("2"), Value::Null, json!("3"), json!("4")]);
}

#[test]
fn fields_become_those_of_a_chat() {
    let schema = json!({"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]});
    let (request, echo) = accepted(
        json!({
            "max_output_tokens": 5, "temperature": 0.5, "stream": true, "top_logprobs": 2, "top_k": 3,
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "text": {"format": {"type": "json_schema", "name": "s", "strict": true, "schema": schema}},
            "metadata": {"k": "v"}, "user": "u", "service_tier": "flex", "truncation": "disabled",
        }),
        Vec::new(),
    );
    assert_eq!(request.endpoint(), Endpoint::Responses);
    assert_eq!(request.max_tokens(), crate::request::MaxTokens::Explicit(5));
    assert_eq!((request.sampling().temperature, request.sampling().top_k), (0.5, 3));
    assert_eq!((request.reply().stream, request.reply().logprobs), (true, Some(2)));
    assert!(request.structure().is_some());
    for (field, expected) in [
        ("max_output_tokens", json!(5)),
        ("metadata", json!({"k": "v"})),
        ("user", json!("u")),
        ("store", json!(true)),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", json!(1.0)),
        ("previous_response_id", Value::Null),
        ("parallel_tool_calls", json!(true)),
    ] {
        assert_eq!(echo.fields[field], expected, "{field}");
    }
    assert_eq!(echo.fields["text"]["format"]["name"], "s");
    assert_eq!(echo.input[0]["content"], json!([{"type": "input_text", "text": "hi"}]));
    assert!(echo.input[0]["id"].as_str().is_some_and(|id| id.starts_with("msg_")));

    // Without the wish for them there are none.
    assert_eq!(accepted(json!({"top_logprobs": 2}), Vec::new()).0.reply().logprobs, None);
}

#[test]
fn tools_lose_and_get_their_wrapping() {
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": true});
    let choice = json!({"type": "function", "name": "f"});
    let (mut request, echo) = accepted(json!({"tools": [tool], "tool_choice": choice}), Vec::new());
    let Some(Prompt::Chat(chat)) = request.take_prompts().pop() else { panic!("a chat") };
    assert_eq!(chat.tools[0]["function"]["name"], "f");
    assert_eq!(
        (&echo.fields["tools"][0]["name"], &echo.fields["tools"][0]["strict"]),
        (&json!("f"), &json!(true))
    );
    assert_eq!(echo.fields["tool_choice"], choice);
    assert!(request.structure().is_some(), "a forced call keeps to its schema");
}

#[test]
fn some_of_the_tools_may_be_allowed() {
    let tool = |name: &str| json!({"type": "function", "name": name});
    let allowed = |mode: &str, tools: Value| {
        json!({"tools": [tool("f"), tool("g")],
               "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": tools}})
    };
    let (mut request, echo) = accepted(allowed("required", json!([tool("g")])), Vec::new());
    assert!(request.structure().is_some(), "a forced call keeps to its schema");
    assert_eq!(echo.fields["tool_choice"]["tools"], json!([tool("g")]));
    let Some(Prompt::Chat(chat)) = request.take_prompts().pop() else { panic!("a chat") };
    assert_eq!(chat.tools, json!([{"type": "function", "function": {"name": "g"}}]));
    let check = |mode: &str, tools: Value, param: &str| {
        check_refused(allowed(mode, tools), param, &format!("`{param}`"));
    };
    check("none", json!([tool("f")]), "tool_choice.mode");
    check("auto", json!([]), "tool_choice.tools");
    check("auto", json!("f"), "tool_choice.tools");
    check("auto", json!(["f"]), "tool_choice.tools[0]");
    check("auto", json!([{"type": "web_search"}]), "tool_choice.tools[0].type");
    check("auto", json!([tool("f"), {"type": "function"}]), "tool_choice.tools[1].name");
    check("auto", json!([tool("h")]), "tool_choice.tools[0].name");
}

#[test]
fn effort_is_told_to_the_template() {
    let kwargs = |changes: Value| {
        let (mut request, _) = accepted(changes, Vec::new());
        match request.take_prompts().pop() {
            Some(Prompt::Chat(chat)) => chat.kwargs,
            other => panic!("no chat: {other:?}"),
        }
    };
    assert_eq!(kwargs(json!({})), Value::Null);
    assert_eq!(kwargs(json!({"reasoning": {"effort": "low"}})), json!({"reasoning_effort": "low"}));
    assert_eq!(kwargs(json!({"reasoning": {"effort": "none"}})), json!({"enable_thinking": false}));
    let both = json!({"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(kwargs(both), json!({"enable_thinking": true}));
}

#[test]
fn refusals_name_the_field() {
    let check = check_refused;
    check(json!({"input": null}), "input", "missing");
    check(json!({"input": []}), "input", "empty");
    check(json!({"input": 5}), "input", "a string or an array of items, not a number");
    check(json!({"input": ["x"]}), "input[0]", "object");
    check(json!({"input": [{"content": "x"}]}), "input[0].type", "missing");
    check(json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type", "send the item itself");
    check(json!({"input": [{"type": "computer_call"}]}), "input[0].type", "computer_call");
    check(json!({"input": [{"role": "tool", "content": "x"}]}), "input[0].role", "tool");
    check(json!({"input": [{"role": "user"}]}), "input[0].content", "missing");
    check(json!({"input": [{"role": "user", "content": null}]}), "input[0].content", "missing");
    let image = json!([{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]);
    check(json!({"input": [{"role": "user", "content": image}]}), "input[0].content[1].type", "text only");
    let orphan = json!({"type": "function_call_output", "call_id": "9", "output": "x"});
    check(json!({"input": [orphan]}), "input[0].call_id", "previous_response_id");
    check(json!({"input": [{"type": "function_call", "name": "f"}]}), "input[0].call_id", "missing");
    check(json!({"instructions": 5}), "instructions", "string");
    check(json!({"max_output_tokens": 0}), "max_output_tokens", "`max_output_tokens` must be at least 1");
    check(json!({"temperature": -1}), "temperature", "at least 0");
    check(json!({"n": 2}), "n", "several requests");
    check(json!({"background": true}), "background", "stream");
    check(json!({"truncation": "auto"}), "truncation", "leave out earlier items");
    check(json!({"truncation": "some"}), "truncation", "disabled");
    check(
        json!({"response_format": {"type": "json_object"}}),
        "text",
        "`response_format` is a field of chats",
    );
    check(json!({"guided_jsn": {}}), "guided_jsn", "not supported");
    check(json!({"regex": "a+"}), "regex", "`guided_regex`");
    check(json!({"json_schema": {}}), "json_schema", "`guided_json`");
    check(json!({"guided_json_object": 1}), "guided_json_object", "boolean");
    check(json!({"conversation": "c"}), "conversation", "previous_response_id");
    check(json!({"prompt": {"id": "p"}}), "prompt", "instructions");
    check(json!({"previous_response_id": 1}), "previous_response_id", "string");
    check(json!({"store": "yes"}), "store", "boolean");
    check(json!({"include": "x"}), "include", "array");
    check(json!({"include": [1]}), "include", "strings");
    check(json!({"top_logprobs": 21}), "top_logprobs", "0 to 20");
    check(json!({"reasoning": {"effort": "huge"}}), "reasoning.effort", "minimal");
    check(json!({"metadata": {"a": 1}}), "metadata.a", "string");
    check(json!({"metadata": {"a": "x".repeat(513)}}), "metadata.a", "512");
    check(json!({"text": {"format": {"type": "xml"}}}), "text.format.type", "json_schema");
    check(json!({"text": {"format": {"type": "json_schema", "name": "s"}}}), "text.format.schema", "missing");
    check(json!({"text": {"format": {"type": "json_schema", "schema": {}}}}), "text.format.name", "missing");
    check(json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "web_search");
    check(json!({"tools": [{"type": "function"}]}), "tools[0].name", "missing");
    check(json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name", "letters");
    check(json!({"tools": [5]}), "tools[0]", "object");
    let tools = json!([{"type": "function", "name": "f"}]);
    check(json!({"tools": tools, "tool_choice": {"type": "web_search"}}), "tool_choice.type", "function");
    check(
        json!({"tools": tools, "tool_choice": {"type": "function", "name": "g"}}),
        "tool_choice.name",
        "none of",
    );
    check(json!({"tool_choice": "required"}), "tool_choice", "tools");
}
