//! Streamed replies.

use std::time::Duration;

use futures::StreamExt;
use http::StatusCode;
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use crate::speaking_worker::responses;
use crate::{CHAT, COMPLETIONS, chat, completion, stage, stage_with, streamed_text};

#[tokio::test]
async fn a_chat_opens_with_the_role_and_closes_with_the_reason() {
    // streaming-12, as far as a proxy's behaviour follows from the headers; that chunks go out one by one is shown below.
    let stage = stage().await;
    stage.worker.says("hi");
    let compressed = [("content-type", "application/json"), ("accept-encoding", "gzip, br, zstd")];
    let reply = stage.http.post_with(CHAT, &compressed, chat(json!({"stream": true})).to_string()).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(reply.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(
        (reply.header("cache-control"), reply.header("x-accel-buffering")),
        (Some("no-cache"), Some("no"))
    );
    assert_eq!((reply.header("content-length"), reply.header("content-encoding")), (None, None));
    let chunks = reply.chunks();
    let id = &chunks[0]["id"];
    let deltas: Vec<_> = chunks
        .iter()
        .map(|c| {
            assert_eq!(
                (&c["id"], &c["object"], &c["model"]),
                (id, &json!("chat.completion.chunk"), &json!("tiny"))
            );
            assert!(c["created"].is_u64() && c.get("usage").is_none());
            (c["choices"][0]["delta"].clone(), c["choices"][0]["finish_reason"].clone())
        })
        .collect();
    let expected = [
        (json!({"role": "assistant", "content": ""}), Value::Null),
        (json!({"content": "h"}), Value::Null),
        (json!({"content": "i"}), Value::Null),
        (json!({}), json!("stop")),
    ];
    assert_eq!(deltas, expected);
}

#[tokio::test]
async fn usage_comes_once_and_only_when_asked_for() {
    // streaming-01, streaming-02.
    let stage = stage().await;
    let run = async |options: Value| {
        let body = chat(json!({"stream": true, "stream_options": options}));
        stage.http.post(CHAT, &body).await.chunks()
    };
    let chunks = run(json!({"include_usage": true})).await;
    let (last, others) = chunks.split_last().unwrap();
    assert!(others.iter().all(|c| c["usage"].is_null() && c["choices"].as_array().unwrap().len() == 1));
    assert_eq!(last["choices"], json!([]));
    let whole = stage.http.post(CHAT, &chat(json!({}))).await.json();
    assert_eq!(last["usage"], whole["usage"]);
    for options in [json!(null), json!({}), json!({"include_usage": false})] {
        assert!(run(options).await.iter().all(|c| c.get("usage").is_none()));
    }
    assert!(run(json!({"continuous_usage_stats": true})).await.iter().all(|c| c.get("usage").is_none()));

    let chunks = run(json!({"include_usage": true, "continuous_usage_stats": true})).await;
    let counts: Vec<_> =
        chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts[0] < counts[counts.len() - 1], "{counts:?}");
    assert_eq!(chunks.last().unwrap()["usage"], whole["usage"]);
}

#[tokio::test]
async fn a_stream_says_what_the_whole_reply_says() {
    let stage = stage().await;
    let text = "žluť 大阪 🍋👨‍👩‍👦 # สวัสดี \"\\\n\u{1}";
    stage.worker.says(text);
    for fields in [
        json!({}),
        json!({"stop": "大阪 🍋👨"}),
        json!({"n": 3, "stop": ["sunflower", " 1"]}),
        json!({"max_tokens": 7}),
    ] {
        let whole = stage.http.post(COMPLETIONS, &completion(fields.clone())).await.json();
        let mut body = completion(fields);
        body["stream"] = json!(true);
        let reply = stage.http.post(COMPLETIONS, &body).await;
        assert!(!reply.text.contains(char::REPLACEMENT_CHARACTER) && !reply.text.contains("\\ufffd"));
        let chunks = reply.chunks();
        for choice in whole["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap();
            assert_eq!(streamed_text(&chunks, index), choice["text"].as_str().unwrap(), "{body}");
            let of_index = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == index);
            let reasons: Vec<_> = of_index.map(|c| &c["finish_reason"]).filter(|r| !r.is_null()).collect();
            assert_eq!(reasons, [&choice["finish_reason"]]);
        }
    }
}

#[tokio::test]
async fn token_ids_are_streamed_on_request() {
    let stage = stage().await;
    stage.worker.says("ab");
    let body = completion(json!({"stream": true, "return_token_ids": true, "max_tokens": 2}));
    let chunks = stage.http.post(COMPLETIONS, &body).await.chunks();
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!([256, 104, 105]));
    let ids = |c: &Value| c["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
    assert_eq!(chunks.iter().flat_map(ids).collect::<Vec<_>>(), [97, 98]);
    let chunks =
        stage.http.post(CHAT, &chat(json!({"stream": true, "return_token_ids": true}))).await.chunks();
    assert_eq!(chunks[0]["prompt_token_ids"].as_array().map(Vec::len), Some(22));
}

#[tokio::test]
async fn a_failure_in_the_middle_is_an_error_event_and_no_success() {
    // streaming-08.
    let stage = stage().await;
    stage.worker.script(|request| {
        let begin: Vec<_> = responses(request, "abc").into_iter().take(4).map(Ok).collect();
        let end = Err(ErrorCode::Internal.status("the worker broke"));
        futures::stream::iter(begin.into_iter().chain([end])).boxed()
    });
    let reply = stage.http.post(CHAT, &chat(json!({"stream": true}))).await;
    assert_eq!(reply.status, StatusCode::OK);
    let events: Vec<Value> = reply.events().iter().map(|e| serde_json::from_str(e).unwrap()).collect();
    let (last, chunks) = events.split_last().unwrap();
    assert_eq!(streamed_text(chunks, 0), "abc");
    assert!(chunks.iter().all(|c| c["choices"][0]["finish_reason"].is_null()));
    assert_eq!(
        (&last["error"]["code"], &last["error"]["type"]),
        (&json!("internal_error"), &json!("server_error"))
    );
    assert!(last["error"]["message"].as_str().unwrap().contains("the worker broke"));

    let whole = stage.http.post(CHAT, &chat(json!({}))).await;
    assert_eq!(
        (whole.status, whole.error()["code"].as_str()),
        (StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error"))
    );
    let metrics = stage.http.get("/metrics").await.text;
    assert!(metrics.contains("outcome=\"internal_error\"} 2"), "{metrics}");
}

#[tokio::test]
async fn silence_is_filled_with_comments_and_headers_do_not_wait_for_the_first_token() {
    // streaming-10.
    let stage = stage_with(|c| c.timeouts.sse_keep_alive = Duration::from_millis(100), true).await;
    let (go, wait) = tokio::sync::watch::channel(false);
    stage.worker.script(move |request| {
        let (messages, mut wait) = (responses(request, "ok"), wait.clone());
        let silence = futures::stream::once(async move {
            let _ = wait.wait_for(|go| *go).await;
        });
        silence.flat_map(move |()| futures::stream::iter(messages.clone()).map(Ok)).boxed()
    });
    let mut events = stage.http.open(CHAT, &chat(json!({"stream": true}))).await;
    assert_eq!(events.status, StatusCode::OK);
    for _ in 0..3 {
        assert_eq!(events.next().await.as_deref(), Some(": keep-alive"));
    }
    // Meanwhile a whole reply waits in silence for as long.
    let whole = tokio::spawn({
        let http = stage.http.clone();
        async move { http.post(CHAT, &chat(json!({}))).await }
    });
    stage.worker.begun(2).await;
    for _ in 0..3 {
        assert_eq!(events.next().await.as_deref(), Some(": keep-alive"));
    }
    go.send(true).unwrap();
    let reply = events.read().await;
    assert!(reply.text.ends_with("data: [DONE]\n\n"), "{}", reply.text);
    assert!(whole.await.unwrap().text.starts_with('{'), "not a byte before the reply");
}

#[tokio::test]
async fn silence_stays_silence_where_comments_are_off() {
    // streaming-10.
    let stage = stage_with(|c| c.timeouts.sse_keep_alive = Duration::ZERO, true).await;
    stage.worker.script(move |request| {
        let messages = responses(request, "ok");
        let late = futures::stream::once(tokio::time::sleep(Duration::from_secs(1)));
        late.flat_map(move |()| futures::stream::iter(messages.clone()).map(Ok)).boxed()
    });
    let reply = stage.http.post(CHAT, &chat(json!({"stream": true}))).await;
    assert!(!reply.text.contains(": keep-alive") && reply.chunks().len() > 2, "{}", reply.text);
}

#[tokio::test]
async fn tokens_go_out_one_by_one() {
    // streaming-12.
    let stage = stage().await;
    let (step, steps) = tokio::sync::mpsc::unbounded_channel::<()>();
    let steps = std::sync::Mutex::new(Some(steps));
    stage.worker.script(move |request| {
        let steps = steps.lock().unwrap().take().expect("one request");
        let messages = futures::stream::iter(responses(request, "abc"));
        let paced = tokio_stream::wrappers::UnboundedReceiverStream::new(steps);
        messages.zip(paced).map(|(message, ())| Ok(message)).boxed()
    });
    // The prompt's message and the first token.
    step.send(()).unwrap();
    step.send(()).unwrap();
    let mut events = stage.http.open(COMPLETIONS, &completion(json!({"stream": true}))).await;
    for expected in ["\"a\"", "\"b\"", "\"c\""] {
        let event = events.next().await.unwrap();
        assert!(event.contains(&format!("\"text\":{expected}")), "{event}");
        step.send(()).unwrap();
    }
    assert!(events.read().await.text.ends_with("data: [DONE]\n\n"));
}
