//! Each bad request gets an error object that names the field, and the next good one is served.

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;

use crate::speaking_worker::responses;
use crate::{CHAT, COMPLETIONS, Stage, chat, completion, stage, stage_of, stage_with, tokenizer};
use thalweg_harness::Reply;
use thalweg_model::tokenizer::TokenizerBundle;

async fn check(
    stage: &Stage,
    path: &str,
    body: impl Into<Bytes>,
    status: u16,
    code: &str,
    param: Option<&str>,
) {
    let reply = stage.http.post_bytes(path, body).await;
    check_error(&reply, status, code, param);
    let next = stage.http.post(COMPLETIONS, &completion(json!({}))).await;
    assert_eq!(next.status, StatusCode::OK, "the server does not go on serving: {}", next.text);
}

#[tokio::test]
async fn a_prompt_over_the_context_is_known_by_the_words_that_clients_look_for() {
    let stage = stage().await;
    for body in
        [completion(json!({"prompt": vec![97; 600]})), completion(json!({"prompt": "x ".repeat(9000)}))]
    {
        let error = stage.http.post(COMPLETIONS, &body).await.error();
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with("this model's maximum context length is 512 tokens"), "{message}");
    }
}

fn check_error(reply: &Reply, status: u16, code: &str, param: Option<&str>) {
    let error = reply.error();
    assert_eq!(reply.status.as_u16(), status, "{error}");
    assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some(code), param), "{error}");
    assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()) && error["type"].is_string(), "{error}");
    assert!(reply.header("content-type").is_some_and(|t| t.starts_with("application/json")));
}

#[tokio::test]
async fn bad_bodies_are_refused_before_any_byte_of_a_stream() {
    // api-01, api-03.
    let stage = stage().await;
    for stream in [false, true] {
        let invalid = async |path, mut body: Value, param| {
            body["stream"] = json!(stream);
            check(&stage, path, body.to_string(), 400, "invalid_request", Some(param)).await;
        };
        invalid(CHAT, chat(json!({"messages": []})), "messages").await;
        invalid(CHAT, chat(json!({"messages": "hi"})), "messages").await;
        invalid(CHAT, chat(json!({"n": 0})), "n").await;
        invalid(CHAT, chat(json!({"max_tokens": -1})), "max_tokens").await;
        invalid(CHAT, chat(json!({"temperature": -1})), "temperature").await;
        invalid(COMPLETIONS, completion(json!({"prompt": ""})), "prompt").await;
        invalid(COMPLETIONS, completion(json!({"prompt": []})), "prompt").await;
        invalid(COMPLETIONS, completion(json!({"prompt": [[]]})), "prompt[0]").await;
        invalid(COMPLETIONS, completion(json!({"prompt": [""]})), "prompt[0]").await;
        invalid(COMPLETIONS, completion(json!({"prompt": [1, 99999]})), "prompt[1]").await;
        let over = async |path, mut body: Value| {
            body["stream"] = json!(stream);
            check(&stage, path, body.to_string(), 400, "context_length_exceeded", None).await;
        };
        over(COMPLETIONS, completion(json!({"prompt": vec![97; 600], "max_tokens": 10}))).await;
        over(COMPLETIONS, completion(json!({"prompt": vec![97; 400], "max_tokens": 200}))).await;
        over(CHAT, chat(json!({"messages": [{"role": "user", "content": "x".repeat(600)}]}))).await;
    }
    let bad = async |path, body: &'static str, param| {
        check(&stage, path, body, 400, "invalid_request", param).await;
    };
    bad(CHAT, "", None).await;
    bad(CHAT, "{\"model\": \"tiny\", \"messages\": [", Some("messages")).await;
    bad(COMPLETIONS, "{\"temperature\": NaN}", Some("temperature")).await;
    bad("/tokenize", "[]", None).await;
    let long = format!("{{\"prompt\": \"{}\"}}", "a ".repeat((1 << 19) + 1));
    bad("/tokenize", long.leak(), Some("prompt")).await;
    bad("/tokenize", "{\"prompt\": \"x\", \"tools\": [{\"function\": 3}]}", Some("tools[0]")).await;
    bad("/tokenize", "{\"prompt\": \"x\", \"chat_template_kwargs\": 3}", Some("chat_template_kwargs")).await;
    bad("/detokenize", "{\"tokens\": [-1]}", Some("tokens[0]")).await;
}

#[tokio::test]
async fn unknown_models_paths_and_methods_are_told_apart() {
    // api-05, api-06.
    let stage = stage().await;
    for name in ["nope", "TINY", " tiny "] {
        let reply = stage.http.post(CHAT, &chat(json!({"model": name}))).await;
        check_error(&reply, 404, "model_not_found", Some("model"));
        assert!(reply.error()["message"].as_str().unwrap().contains(name));
    }
    check_error(&stage.http.get("/v1/models/unknown").await, 404, "model_not_found", Some("model"));
    check_error(&stage.http.get("/v1/nonexistent-route").await, 404, "not_found", None);
    let wrong = stage.http.get(CHAT).await;
    check_error(&wrong, 405, "method_not_allowed", None);
    assert_eq!(wrong.header("allow"), Some("POST"));
    assert!(stage.worker.requests().is_empty());
}

#[tokio::test]
async fn the_configured_body_limit_is_the_one_that_holds() {
    // limits-01.
    let stage = stage_with(|config| config.limits.body_bytes_max = 16_000_000, true).await;
    let body = |bytes: usize| {
        let empty = chat(json!({"user": ""})).to_string().len();
        chat(json!({"user": "u".repeat(bytes - empty)})).to_string()
    };
    for bytes in [1_900_000, 2_100_000, 8_000_000, 15_900_000, 16_000_000] {
        let reply = stage.http.post_bytes(CHAT, body(bytes)).await;
        assert_eq!(reply.status, StatusCode::OK, "{bytes} bytes: {}", reply.text);
    }
    check(&stage, CHAT, body(16_000_001), 413, "request_too_large", None).await;
    // What is announced as too large is refused before any of it has come.
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 16100000\r\n\r\n");
    assert_eq!(status_of(&stage, &head).await, "HTTP/1.1 413");
}

/// The beginning of the answer to these bytes.
async fn status_of(stage: &Stage, bytes: &str) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
    socket.write_all(bytes.as_bytes()).await.unwrap();
    let mut reply = vec![0; 12];
    socket.read_exact(&mut reply).await.unwrap();
    String::from_utf8(reply).unwrap()
}

#[tokio::test]
async fn a_chunked_body_over_the_limit_is_refused_too() {
    // limits-01.
    let stage = stage_with(|config| config.limits.body_bytes_max = 1000, true).await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
    let chunk = format!("{:x}\r\n{}\r\n", 600, " ".repeat(600));
    assert_eq!(status_of(&stage, &format!("{head}{chunk}{chunk}")).await, "HTTP/1.1 413");
    // The same within the limit is read to its end.
    let body = completion(json!({})).to_string();
    let body = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let head = head.replace(CHAT, COMPLETIONS);
    assert_eq!(status_of(&stage, &format!("{head}{body}")).await, "HTTP/1.1 200");
}

#[tokio::test]
async fn a_model_without_a_template_refuses_chats_only() {
    let stage = stage_with(|_| {}, false).await;
    let reply = stage.http.post(CHAT, &chat(json!({}))).await;
    check_error(&reply, 400, "invalid_request", Some("messages"));
    assert!(reply.error()["message"].as_str().unwrap().contains("--chat-template"));
    assert_eq!(stage.http.post(COMPLETIONS, &completion(json!({}))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn what_a_template_refuses_is_told_in_its_words() {
    // chat-template-01.
    let gemma = include_str!("../../../model/tests/chat_template/templates/gemma.jinja").to_owned();
    let bundle = TokenizerBundle { chat_template: Some(gemma), ..tokenizer::bundle(true, 512) };
    let stage = stage_of(|_| {}, &bundle).await;
    let ask = async |roles: &[&str]| {
        let messages: Vec<_> = roles.iter().map(|role| json!({"role": role, "content": "hi"})).collect();
        stage.http.post(CHAT, &chat(json!({"messages": messages}))).await
    };
    let taken: [&[&str]; 3] = [&["system", "user"], &["system"], &["developer", "user"]];
    for roles in taken {
        let reply = ask(roles).await;
        assert_eq!(reply.status, StatusCode::OK, "{roles:?}: {}", reply.text);
    }
    let refused: [(&[&str], &str, &str); 4] = [
        (&["user", "user"], "messages", "must take turns"),
        (&["user", "assistant", "assistant"], "messages", "must take turns"),
        (&["assistant"], "messages", "must take turns"),
        (&["banana"], "messages[0].role", "banana"),
    ];
    for (roles, param, part) in refused {
        let reply = ask(roles).await;
        check_error(&reply, 400, "invalid_request", Some(param));
        assert!(reply.error()["message"].as_str().unwrap().contains(part), "{}", reply.text);
    }
}

#[tokio::test]
async fn what_a_worker_refuses_has_its_own_status() {
    let stage = stage().await;
    let check = async |code: ErrorCode, status: u16| {
        stage.worker.script(move |_| {
            use futures::StreamExt;
            futures::stream::iter([Err(code.status("the worker says no"))]).boxed()
        });
        for stream in [false, true] {
            let reply = stage.http.post(CHAT, &chat(json!({"stream": stream}))).await;
            check_error(&reply, status, code.as_str(), None);
        }
    };
    check(ErrorCode::InvalidRequest, 400).await;
    check(ErrorCode::ContextLengthExceeded, 400).await;
    check(ErrorCode::Internal, 500).await;
}

#[tokio::test]
async fn a_content_type_that_is_wrong_or_missing_does_no_harm() {
    let stage = stage().await;
    for headers in
        [&[][..], &[("content-type", "text/plain")], &[("content-type", "application/x-www-form-urlencoded")]]
    {
        let body = Bytes::from(chat(json!({})).to_string());
        let reply = stage.http.send(Method::POST, CHAT, headers, body).await.read().await;
        assert_eq!(reply.status, StatusCode::OK, "{headers:?}");
    }
}

#[tokio::test]
async fn more_prompts_than_a_tenant_may_have_are_a_bad_request() {
    let stage = stage_with(|config| config.limits.tenant_requests_max = 2, true).await;
    let reply = stage.http.post(COMPLETIONS, &completion(json!({"prompt": ["a", "b", "c"]}))).await;
    check_error(&reply, 400, "invalid_request", Some("prompt"));
    let reply = stage.http.post(COMPLETIONS, &completion(json!({"prompt": ["a", "b"]}))).await;
    assert_eq!(reply.status, StatusCode::OK);
}

#[tokio::test]
async fn a_full_router_says_when_to_come_back() {
    // limits-03.
    use futures::StreamExt;
    let stage = stage_with(|config| config.limits.tenant_requests_max = 1, true).await;
    stage.worker.script(|request| {
        let begin: Vec<_> = responses(request, "abc").into_iter().take(2).map(Ok).collect();
        futures::stream::iter(begin).chain(futures::stream::pending()).boxed()
    });
    let holds_the_place = stage.http.open(CHAT, &chat(json!({"stream": true}))).await;
    for stream in [false, true] {
        let reply = stage.http.post(CHAT, &chat(json!({"stream": stream}))).await;
        check_error(&reply, 429, "overloaded", None);
        assert!(reply.header("retry-after").is_some_and(|s| s.parse::<u32>().is_ok_and(|s| s >= 1)));
    }
    drop(holds_the_place);
    stage.worker.ended(1).await;
}
