//! The Responses API, whole and streamed, and what is kept of it.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use thalweg_harness::Scrape;
use thalweg_proto::code::ErrorCode;
use thalweg_router::config::responses::ResponseStore;

use crate::speaking_worker::{responses, say};
use crate::{RESPONSES, Stage, stage, stage_of, stage_with, tokenizer};

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "tiny", "input": "hi", "max_output_tokens": 100});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// The events of a stream, checked to be numbered and named as OpenAI's are.
async fn streamed(stage: &Stage, fields: Value) -> Vec<Value> {
    let mut body = body(fields);
    body["stream"] = json!(true);
    let reply = stage.http.post(RESPONSES, &body).await;
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"), "{}", reply.text);
    events(&reply.text)
}

fn events(text: &str) -> Vec<Value> {
    let event = |(at, text): (usize, &str)| {
        let (name, data) =
            text.strip_prefix("event: ").and_then(|t| t.split_once("\ndata: ")).expect("an event");
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(at)));
        data
    };
    text.split_terminator("\n\n").filter(|text| !text.starts_with(':')).enumerate().map(event).collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    let mut kinds: Vec<_> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    kinds.dedup();
    kinds
}

/// Everything that is new each time taken out: ids and times.
fn timeless(mut value: Value) -> Value {
    match &mut value {
        Value::Object(fields) => {
            for name in ["id", "call_id", "created_at", "completed_at"] {
                fields.remove(name);
            }
            fields.values_mut().for_each(|field| *field = timeless(field.take()));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| *item = timeless(item.take())),
        _ => {}
    }
    value
}

/// The response of a stream, which must be that of a whole reply and what its events add up to.
async fn response(stage: &Stage, fields: Value) -> Value {
    let whole = stage.http.post(RESPONSES, &body(fields.clone())).await;
    assert_eq!(whole.status, StatusCode::OK, "{}", whole.text);
    let events = streamed(stage, fields).await;
    let last = events.last().unwrap();
    let response = last["response"].clone();
    assert_eq!(last["type"], json!(format!("response.{}", response["status"].as_str().unwrap())));
    assert_eq!(timeless(whole.json()), timeless(response.clone()));
    for (at, item) in response["output"].as_array().unwrap().iter().enumerate() {
        let of_item = |kind: &str| {
            let is_it = |e: &&Value| e["type"] == *kind && e["output_index"] == at;
            events.iter().filter(is_it).cloned().collect::<Vec<_>>()
        };
        assert_eq!(&of_item("response.output_item.done")[0]["item"], item);
        assert_eq!(of_item("response.output_item.added")[0]["item"]["id"], item["id"]);
        let (delta, text) = match item["type"].as_str().unwrap() {
            "message" => ("response.output_text.delta", &item["content"][0]["text"]),
            "reasoning" => ("response.reasoning_text.delta", &item["content"][0]["text"]),
            _ => ("response.function_call_arguments.delta", &item["arguments"]),
        };
        let added: String = of_item(delta).iter().map(|e| e["delta"].as_str().unwrap().to_owned()).collect();
        assert_eq!(added, text.as_str().unwrap());
    }
    response
}

#[tokio::test]
async fn a_message_is_told_event_by_event() {
    let stage = stage().await;
    stage.worker.says("hello");
    let events = streamed(&stage, json!({"metadata": {"a": "b"}})).await;
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(kinds(&events), expected);
    let response = response(&stage, json!({"metadata": {"a": "b"}})).await;
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(response["output"][0]["content"][0]["text"], "hello");
    assert_eq!(response["metadata"], json!({"a": "b"}));
    assert_eq!(response["usage"]["output_tokens"], 6);
    let total = response["usage"]["input_tokens"].as_u64().unwrap() + 6;
    assert_eq!(response["usage"]["total_tokens"], total);
    assert!(response["id"].as_str().unwrap().starts_with("resp_") && response["store"] == true);
}

#[tokio::test]
async fn an_answer_that_was_cut_off_is_incomplete() {
    let stage = stage().await;
    stage.worker.says("hello");
    let response = response(&stage, json!({"max_output_tokens": 3})).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        (&response["output"][0]["status"], &response["completed_at"]),
        (&json!("incomplete"), &Value::Null)
    );
}

#[tokio::test]
async fn calls_and_thoughts_are_items_of_their_own() {
    let mut bundle = tokenizer::bundle(true, 2048);
    bundle.chat_template =
        Some("{% for m in messages %}{{ m.content }}{% endfor %}{# <think> <tool_call> tools #}".to_owned());
    let stage = stage_of(|_| {}, &bundle).await;
    stage.worker.says(
        "<think>\nhm\n</think>\n\nSo:<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
         <tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>",
    );
    let tools = json!([{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]);
    let response = response(&stage, json!({"tools": tools, "max_output_tokens": 400})).await;
    let output = response["output"].as_array().unwrap();
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    assert_eq!(output[1]["content"][0]["text"], "So:");
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("f"), &json!("{\"a\": 1}")));
    assert!(output[3]["call_id"].as_str().is_some_and(|id| !id.is_empty()));
    assert!(response["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().is_some_and(|n| n > 0));
}

#[tokio::test]
async fn logprobs_come_with_the_text() {
    let stage = stage().await;
    stage.worker.says("ok");
    let wish = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1});
    let response = response(&stage, wish).await;
    let logprobs = response["output"][0]["content"][0]["logprobs"].as_array().unwrap();
    let tokens: String = logprobs.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert!(tokens.starts_with("ok"), "{tokens}");
    assert!(logprobs[0]["top_logprobs"].as_array().is_some_and(|top| top.len() == 1));
}

#[tokio::test]
async fn a_response_is_continued_read_listed_and_deleted() {
    let stage = stage().await;
    stage.worker.says("one");
    let first = stage.http.post(RESPONSES, &body(json!({"instructions": "be brief"}))).await.json();
    let id = first["id"].as_str().unwrap();
    stage.worker.says("two");
    let second = body(json!({"input": "and?", "previous_response_id": id}));
    let second = stage.http.post(RESPONSES, &second).await.json();
    assert_eq!(second["previous_response_id"], id);
    let prompt: Vec<u8> =
        stage.worker.requests()[1].prompt_ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    let prompt = String::from_utf8(prompt).unwrap();
    let said: Vec<_> = ["hi", "one", "and?"].iter().map(|text| prompt.find(text)).collect();
    assert!(said.iter().all(Option::is_some) && said.is_sorted(), "{prompt}");
    assert!(!prompt.contains("be brief"), "instructions are of one request");

    let path = format!("{RESPONSES}/{id}");
    assert_eq!(stage.http.get(&path).await.json(), first);
    let second_id = second["id"].as_str().unwrap();
    let items = stage.http.get(&format!("{RESPONSES}/{second_id}/input_items")).await.json();
    assert_eq!(items["data"][0]["content"], json!([{"type": "input_text", "text": "and?"}]));
    assert_eq!((items["data"].as_array().unwrap().len(), &items["has_more"]), (1, &json!(false)));

    let refused = stage.http.get(&format!("{path}?stream=true")).await;
    assert_eq!((refused.status, &refused.error()["param"]), (StatusCode::BAD_REQUEST, &json!("stream")));
    let delete = async || stage.http.send(Method::DELETE, &path, &[], Bytes::new()).await.read().await;
    assert_eq!(delete().await.json(), json!({"id": id, "object": "response", "deleted": true}));
    for gone in
        [delete().await, stage.http.get(&path).await, stage.http.get(&format!("{path}/input_items")).await]
    {
        assert_eq!(
            (gone.status, &gone.error()["code"]),
            (StatusCode::NOT_FOUND, &json!("response_not_found"))
        );
    }
    let third = stage.http.post(RESPONSES, &body(json!({"previous_response_id": id}))).await;
    assert_eq!(
        (third.status, &third.error()["param"]),
        (StatusCode::NOT_FOUND, &json!("previous_response_id"))
    );
    // What was continued before lives on its own.
    let fourth = stage.http.post(RESPONSES, &body(json!({"previous_response_id": second_id}))).await;
    assert_eq!(fourth.status, StatusCode::OK, "{}", fourth.text);
}

#[tokio::test]
async fn what_is_not_to_be_kept_is_not() {
    let stage = stage().await;
    let reply = stage.http.post(RESPONSES, &body(json!({"store": false}))).await.json();
    assert_eq!(reply["store"], false);
    let path = format!("{RESPONSES}/{}", reply["id"].as_str().unwrap());
    assert_eq!(stage.http.get(&path).await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn what_is_too_large_is_answered_and_not_kept() {
    let stage = stage_with(|config| config.responses.response_bytes_max = 1000, true).await;
    for is_stream in [false, true] {
        let reply = stage.http.post(RESPONSES, &body(json!({"stream": is_stream}))).await;
        assert_eq!(reply.status, StatusCode::OK);
        let response =
            if is_stream { events(&reply.text).pop().unwrap()["response"].clone() } else { reply.json() };
        assert_eq!((&response["status"], &response["store"]), (&json!("completed"), &json!(false)));
        let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
        assert_eq!(stage.http.get(&path).await.status, StatusCode::NOT_FOUND);
    }
    let metrics = Scrape::parse(&stage.http.get("/metrics").await.text);
    assert_eq!(metrics.sum("thalweg_router_responses_not_kept_total", "reason=\"too_large\""), Some(2.0));
}

#[tokio::test]
async fn a_router_that_keeps_nothing_says_so() {
    let stage = stage_with(|config| config.responses.response_store = ResponseStore::None, true).await;
    let reply = stage.http.post(RESPONSES, &body(json!({}))).await.json();
    assert_eq!((&reply["status"], &reply["store"]), (&json!("completed"), &json!(false)));
    for (field, value) in [("store", json!(true)), ("previous_response_id", json!("resp_1"))] {
        let refused = stage.http.post(RESPONSES, &body(json!({field: value}))).await;
        assert_eq!((refused.status, &refused.error()["param"]), (StatusCode::BAD_REQUEST, &json!(field)));
        assert!(refused.text.contains("--response-store"), "{}", refused.text);
    }
    let gone = stage.http.get(&format!("{RESPONSES}/resp_1")).await;
    assert_eq!(gone.status, StatusCode::NOT_FOUND);
}

/// Events of a message whose answer broke off.
const BROKEN_OFF: [&str; 9] = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.failed",
];

/// What a failed stream says of its response: begun items are closed, text and tokens are told.
fn failed(events: &[Value], text: &str, tokens: u64) -> Value {
    assert_eq!(kinds(events), BROKEN_OFF);
    let response = events.last().unwrap()["response"].clone();
    let item = &response["output"][0];
    assert_eq!((&response["status"], &item["status"]), (&json!("failed"), &json!("incomplete")));
    assert_eq!(item["content"][0]["text"], text);
    assert_eq!(&events[events.len() - 2]["item"], item);
    assert_eq!(response["error"]["code"], "server_error");
    assert_eq!(response["usage"]["output_tokens"], tokens);
    assert!(response["usage"]["input_tokens"].as_u64().is_some_and(|tokens| tokens > 0));
    response
}

#[tokio::test]
async fn an_answer_that_breaks_off_has_failed() {
    let stage = stage_with(
        |config| {
            config.limits.attempts_max = 1;
            config.responses.response_bytes_max = 4000;
        },
        true,
    )
    .await;
    let broken = || ErrorCode::Internal.status("it broke");
    stage.worker.script(move |request| {
        let messages = responses(request, "hello");
        let begun = messages.into_iter().take(4).map(Ok);
        futures::stream::iter(begun.chain(std::iter::once(Err(broken())))).boxed()
    });
    let kept = failed(&streamed(&stage, json!({})).await, "hel", 3);
    assert_eq!(kept["store"], true);
    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    assert_eq!(stage.http.get(&path(&kept)).await.json(), kept);
    let large: serde_json::Map<_, _> = (0..8).map(|at| (at.to_string(), json!("x".repeat(500)))).collect();
    for not_kept in [json!({"store": false}), json!({"metadata": large})] {
        let not_kept = failed(&streamed(&stage, not_kept).await, "hel", 3);
        assert_eq!(not_kept["store"], false);
        assert_eq!(stage.http.get(&path(&not_kept)).await.status, StatusCode::NOT_FOUND);
    }
    // A whole reply is a status then, with no response to be kept.
    let whole = stage.http.post(RESPONSES, &body(json!({}))).await;
    assert_eq!((whole.status.as_u16(), &whole.error()["code"]), (500, &json!("internal_error")));

    stage.worker.says("and on");
    let next = stage.http.post(RESPONSES, &body(json!({"previous_response_id": kept["id"]}))).await;
    assert_eq!(next.status, StatusCode::OK, "{}", next.text);
    let prompt = &stage.worker.requests().pop().unwrap().prompt_ids;
    assert!(prompt.windows(3).any(|ids| ids == b"hel".map(u32::from)), "what there was of it goes before");

    // Before anything came it is a status, as for a whole reply.
    stage.worker.script(move |_| futures::stream::iter([Err(broken())]).boxed());
    for is_stream in [false, true] {
        let reply = stage.http.post(RESPONSES, &body(json!({"stream": is_stream}))).await;
        assert_eq!(reply.status, StatusCode::INTERNAL_SERVER_ERROR, "{}", reply.text);
        assert_eq!(reply.error()["code"], "internal_error");
    }
    stage.worker.script(|request| say(request, "ok"));
}

/// The begin of an answer, and then nothing.
fn stays_away(stage: &Stage) {
    stage.worker.script(|request| {
        let begun: Vec<_> = responses(request, "hello").into_iter().take(4).map(Ok).collect();
        futures::stream::iter(begun).chain(futures::stream::pending()).boxed()
    });
}

#[tokio::test]
async fn an_answer_whose_time_is_over_has_failed_and_is_kept() {
    let stage = stage_with(|c| c.timeouts.request_timeout = Duration::from_millis(500), true).await;
    stays_away(&stage);
    let late = failed(&streamed(&stage, json!({})).await, "hel", 3);
    assert!(late["error"]["message"].as_str().unwrap().contains("longer than allowed"), "{late}");
    assert_eq!(stage.http.get(&format!("{RESPONSES}/{}", late["id"].as_str().unwrap())).await.json(), late);
}

#[tokio::test]
async fn an_answer_that_a_drain_cuts_off_has_failed() {
    let stage = stage_with(|c| c.timeouts.drain_timeout = Duration::from_millis(50), true).await;
    stays_away(&stage);
    let mut stream = stage.http.open(RESPONSES, &body(json!({"stream": true}))).await;
    let mut told = String::new();
    let said = |told: &str| -> String {
        let events = events(told);
        let deltas = events.iter().filter(|e| e["type"] == "response.output_text.delta");
        deltas.map(|e| e["delta"].as_str().unwrap()).collect()
    };
    while said(&told) != "hel" {
        told += &format!("{}\n\n", stream.next().await.unwrap());
    }
    let Stage { router, worker: _worker, .. } = stage;
    let ended = tokio::spawn(router.shutdown());
    while let Some(event) = stream.next().await {
        told += &format!("{event}\n\n");
    }
    ended.await.unwrap();
    let drained = failed(&events(&told), "hel", 3);
    assert!(drained["error"]["message"].as_str().unwrap().contains("shuts down"), "{drained}");
}

#[tokio::test]
async fn refusals_are_told_in_the_words_of_this_api() {
    let stage = stage().await;
    let check = async |fields: Value, param: &str| {
        let reply = stage.http.post(RESPONSES, &body(fields)).await;
        assert_eq!(reply.status, StatusCode::BAD_REQUEST, "{}", reply.text);
        assert_eq!(reply.error()["param"], json!(param), "{}", reply.text);
    };
    check(json!({"max_output_tokens": 0}), "max_output_tokens").await;
    check(json!({"background": true}), "background").await;
    check(json!({"tools": [{"type": "web_search_preview"}]}), "tools[0].type").await;
    let schema = json!({"format": {"type": "json_schema", "name": "s", "schema": {"type": "strange"}}});
    check(json!({"text": schema}), "text.format.schema").await;
    let long = stage.http.post(RESPONSES, &body(json!({"input": "x".repeat(600)}))).await;
    assert_eq!(long.error()["code"], "context_length_exceeded");
}
