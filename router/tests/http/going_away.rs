//! Clients that go away or stop reading.

use std::time::Duration;

use futures::StreamExt;
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1::ChoiceDelta;
use thalweg_router::config::RouterConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::speaking_worker::{prompt_message, responses};
use crate::tokenizer::{self, END};
use crate::{CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, Stage, chat, completion, stage, stage_of, stage_with};

/// One token, and then nothing for as long as anyone listens.
fn hangs(stage: &Stage) {
    stage.worker.script(|request| {
        let begin: Vec<_> = responses(request, "abc").into_iter().take(2).map(Ok).collect();
        futures::stream::iter(begin).chain(futures::stream::pending()).boxed()
    });
}

async fn wait_for_metric(stage: &Stage, line: &str) {
    let appears = async {
        while !stage.http.get("/metrics").await.text.lines().any(|l| l == line) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), appears).await.unwrap_or_else(|_| panic!("no {line}"));
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_ends_the_work() {
    // scheduler-01.
    let stage = stage().await;
    hangs(&stage);
    let mut events = stage.http.open(CHAT, &chat(json!({"stream": true}))).await;
    assert!(events.next().await.unwrap().contains("assistant"));
    stage.worker.begun(1).await;
    drop(events);
    stage.worker.ended(1).await;
    wait_for_metric(
        &stage,
        "thalweg_router_http_requests_total{model=\"tiny\",endpoint=\"chat\",outcome=\"cancelled\"} 1",
    )
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_before_the_reply_ends_the_work() {
    // scheduler-02: nothing has come yet, streamed or not.
    let stage = stage().await;
    hangs(&stage);
    for stream in [false, true] {
        stage.worker.script(|request| {
            let first = prompt_message(request, 0);
            futures::stream::iter([Ok(first)]).chain(futures::stream::pending()).boxed()
        });
        let before = stage.worker.requests().len();
        let body = completion(json!({"stream": stream})).to_string();
        let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
        let head =
            format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stage.worker.begun(before + 1).await;
        drop(socket);
        stage.worker.ended(before + 1).await;
    }
    // The same by a reset of one stream of a connection that stays.
    let address = stage.router.http_address();
    let socket = TokioIo::new(tokio::net::TcpStream::connect(address).await.unwrap());
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), socket).await.unwrap();
    let connection = tokio::spawn(connection);
    for stream in [false, true] {
        let before = stage.worker.requests().len();
        let body = completion(json!({"stream": stream})).to_string();
        let request = http::Request::post(format!("http://{address}{COMPLETIONS}"));
        let reply = client.send_request(request.body(Full::new(bytes::Bytes::from(body))).unwrap());
        let reply = tokio::spawn(reply);
        stage.worker.begun(before + 1).await;
        reply.abort();
        stage.worker.ended(before + 1).await;
    }
    assert!(!connection.is_finished());
}

/// What a worker has taken is recorded and counted, though nothing came of it; what none has taken is not.
#[tokio::test]
async fn who_leaves_in_the_prefill_leaves_its_worker_and_tokens_in_the_record() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let path = log.path().to_owned();
    let stage = stage_with(|config| config.surface.usage_log = Some(path), true).await;
    stage.worker.script(|request| {
        let first = prompt_message(request, 0);
        futures::stream::iter([Ok(first)]).chain(futures::stream::pending()).boxed()
    });
    let embedding = json!({"model": "tiny", "input": ["ab", "cde"]});
    let response = json!({"model": "tiny", "input": "hi", "stream": true});
    let cases = [
        (CHAT, chat(json!({})), 1),
        (COMPLETIONS, completion(json!({"prompt": ["ab", "cde"], "stream": true})), 2),
        (RESPONSES, response, 1),
        (EMBEDDINGS, embedding, 2),
    ];
    let (mut taken, mut expected) = (0, Vec::new());
    for (path, body, prompts) in &cases {
        let (http, path, body) = (stage.http.clone(), path.to_owned(), body.clone());
        let reply = tokio::spawn(async move { http.post(path, &body).await });
        taken += prompts;
        wait_for_metric(&stage, &format!("thalweg_router_picks_total{{worker=\"w0\"}} {taken}")).await;
        reply.abort();
        stage.worker.ended(taken).await;
        let tokens =
            stage.worker.requests()[taken - prompts..].iter().map(|r| r.prompt_ids.len() as u64).sum();
        expected.push((json!("cancelled"), json!("w0"), Some(tokens)));
    }
    stage.worker.script(|_| futures::stream::iter([Err(ErrorCode::InvalidRequest.status("no"))]).boxed());
    assert_eq!(stage.http.post(CHAT, &chat(json!({}))).await.status, 400);
    let sent = expected.iter().filter_map(|(_, _, tokens)| *tokens).sum::<u64>();
    wait_for_metric(&stage, &format!("thalweg_router_prompt_tokens_total{{model=\"tiny\"}} {sent}")).await;
    stage.router.shutdown().await;

    let text = std::fs::read_to_string(log.path()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told =
        |line: &Value| (line["outcome"].clone(), line["worker"].clone(), line["prompt_tokens"].as_u64());
    let told: Vec<_> = lines.iter().map(told).collect();
    expected.push((json!("invalid_request"), Value::Null, Some(0)));
    assert_eq!(told, expected);
}

/// A client that closes its writing side looks like one that has gone, whose answer would be computed for nobody: it is taken for
/// gone, as by nginx and by vLLM's server.
#[tokio::test]
async fn a_client_that_closes_its_half_has_gone() {
    // scheduler-02.
    let stage = stage().await;
    hangs(&stage);
    for (number, stream) in [false, true].into_iter().enumerate() {
        let body = completion(json!({"stream": stream})).to_string();
        let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
        let head =
            format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        stage.worker.begun(number + 1).await;
        socket.shutdown().await.unwrap();
        stage.worker.ended(number + 1).await;
        let mut rest = Vec::new();
        let end = tokio::time::timeout(Duration::from_secs(20), socket.read_to_end(&mut rest)).await;
        end.expect("the connection is closed").unwrap();
        assert_eq!(rest.is_empty(), !stream, "what was said by then: {}", String::from_utf8_lossy(&rest));
    }
    let counted = "model=\"tiny\",endpoint=\"completions\",outcome=\"cancelled\"";
    wait_for_metric(&stage, &format!("thalweg_router_http_requests_total{{{counted}}} 2")).await;
}

/// What needs no worker is answered before the end of the request's half is seen, as probes made of shell pipes expect.
#[tokio::test]
async fn a_probe_that_closes_its_half_is_answered() {
    let stage = stage().await;
    for path in ["/health", "/ready", "/metrics", "/v1/models"] {
        let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
        socket.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes()).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut reply = String::new();
        let end = tokio::time::timeout(Duration::from_secs(20), socket.read_to_string(&mut reply)).await;
        end.expect("the connection is closed").unwrap();
        let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{path}: {reply:?}"));
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.and_then(|length| length.parse().ok()).unwrap_or_else(|| panic!("{head}"));
        assert!(head.starts_with("HTTP/1.1 200") && body.len() == length, "{path}: {reply:?}");
    }
}

#[tokio::test]
async fn a_client_that_stops_reading_is_cut_off_and_others_are_served() {
    // Ten bytes of text a token: far more than the sockets' buffers hold.
    const MESSAGES: usize = 1200;
    const TOKENS: usize = 1000;
    let short = |config: &mut RouterConfig| config.timeouts.client_stall_timeout = Duration::from_millis(300);
    let stage = stage_of(short, &tokenizer::bundle(true, 2 * MESSAGES * TOKENS)).await;
    stage.worker.script(|request| {
        let mut message = prompt_message(request, 0);
        message.deltas = vec![ChoiceDelta { token_ids: vec![END; TOKENS], ..ChoiceDelta::default() }];
        let messages = futures::stream::repeat_with(move || Ok(message.clone())).take(MESSAGES);
        messages.chain(futures::stream::pending()).boxed()
    });
    let wide = json!({"stream": true, "max_tokens": MESSAGES * TOKENS + 1, "skip_special_tokens": false});
    let body = completion(wide).to_string();
    let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
    let head = format!("POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    socket.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    socket.read_exact(&mut [0; 12]).await.unwrap();
    stage.worker.ended(1).await;
    wait_for_metric(
        &stage,
        "thalweg_router_http_requests_total{model=\"tiny\",endpoint=\"completions\",outcome=\"cancelled\"} 1",
    )
    .await;
    stage.worker.says("ok");
    let reply = stage.http.post(COMPLETIONS, &completion(json!({}))).await.json();
    assert_eq!(reply["choices"][0]["text"], "ok");
}

#[tokio::test]
async fn a_stop_string_cancels_one_prompt_and_the_others_go_on() {
    let stage = stage().await;
    stage.worker.script(|request| {
        let text = if request.prompt_ids.ends_with(&[97]) { "x stop" } else { "y" };
        let messages: Vec<_> = responses(request, text).into_iter().map(Ok).collect();
        let take = if text == "y" { messages.len() } else { messages.len() - 1 };
        let rest = futures::stream::pending();
        futures::stream::iter(messages.into_iter().take(take)).chain(rest).boxed()
    });
    let body = completion(json!({"prompt": ["a", "b"], "stop": "stop"}));
    let reply = stage.http.post(COMPLETIONS, &body).await.json();
    assert_eq!(
        (reply["choices"][0]["text"].as_str(), reply["choices"][1]["text"].as_str()),
        (Some("x "), Some("y"))
    );
    stage.worker.ended(2).await;
}
