//! `POST /v1/embeddings`.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1::Pooling;
use tokio::io::AsyncWriteExt;

use crate::speaking_worker::{SpeakingWorker, WIDTH, embed, embedding, prompt_message};
use crate::tokenizer::{self, BOS, END};
use crate::{COMPLETIONS, EMBEDDINGS, Stage, completion, router, stage, stage_of, stage_with};

fn body(fields: Value) -> Value {
    crate::merged(json!({"model": "tiny", "input": "hi"}), fields)
}

/// Of this reply's vectors, as numbers.
fn vectors(reply: &Value) -> Vec<Vec<f32>> {
    let data = reply["data"].as_array().expect("data");
    let numbers = |item: &Value| -> Vec<f32> {
        let numbers = item["embedding"].as_array().expect("numbers");
        numbers.iter().map(|x| x.as_f64().expect("a number") as f32).collect()
    };
    data.iter().map(numbers).collect()
}

async fn embedded(stage: &Stage, fields: Value) -> Value {
    let reply = stage.http.post(EMBEDDINGS, &body(fields)).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    reply.json()
}

#[tokio::test]
async fn inputs_in_every_form_are_answered_in_order() {
    let stage = stage().await;
    let check = async |input: Value, prompts: &[&[u32]]| {
        let reply = embedded(&stage, json!({"input": input})).await;
        let expected: Vec<_> = prompts.iter().map(|ids| embedding(ids, Pooling::Last)).collect();
        assert_eq!(vectors(&reply), expected, "{reply}");
        let tokens: usize = prompts.iter().map(|ids| ids.len()).sum();
        assert_eq!(reply["usage"], json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        for (index, item) in reply["data"].as_array().unwrap().iter().enumerate() {
            assert_eq!((&item["object"], &item["index"]), (&json!("embedding"), &json!(index)));
        }
        assert_eq!((&reply["object"], &reply["model"]), (&json!("list"), &json!("tiny")));
        assert!(reply["id"].as_str().unwrap().starts_with("embd-") && reply["created"].is_u64());
    };
    check(json!("hi"), &[&[BOS, 104, 105]]).await;
    check(json!(["hi"]), &[&[BOS, 104, 105]]).await;
    check(json!(["a", "bc", "a"]), &[&[BOS, 97], &[BOS, 98, 99], &[BOS, 97]]).await;
    check(json!([1, 2, 3]), &[&[1, 2, 3]]).await;
    check(json!([[1, 2], [3], [BOS, 4]]), &[&[1, 2], &[3], &[BOS, 4]]).await;
    check(json!(["<s>x", [9]]), &[&[BOS, 120], &[9]]).await;
    let whole: Vec<u32> = (0..512).map(|i| i % 200).collect();
    check(json!(whole), &[&whole]).await;
    for request in stage.worker.requests() {
        assert_eq!((request.pooling(), request.choices.len()), (Pooling::Last, 1));
        assert!(request.booking > 0 && !request.fingerprint.is_empty() && request.grammar.is_none());
    }
}

#[tokio::test]
async fn vectors_come_as_numbers_or_base64_and_may_be_shortened() {
    use base64::Engine;
    let stage = stage().await;
    let full = vectors(&embedded(&stage, json!({"encoding_format": "float", "user": "u"})).await);
    let decoded = |reply: &Value| -> Vec<f32> {
        let text = reply["data"][0]["embedding"].as_str().expect("base64");
        let bytes = base64::engine::general_purpose::STANDARD.decode(text).expect("base64");
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    assert_eq!(decoded(&embedded(&stage, json!({"encoding_format": "base64"})).await), full[0]);
    let short = vectors(&embedded(&stage, json!({"dimensions": 2})).await);
    let length = (full[0][0].powi(2) + full[0][1].powi(2)).sqrt();
    assert_eq!(short[0].len(), 2);
    for (short, full) in short[0].iter().zip(&full[0]) {
        assert!((short - full / length).abs() < 1e-6, "{short} of {full}");
    }
    let both = embedded(&stage, json!({"dimensions": 2, "encoding_format": "base64"})).await;
    assert_eq!(decoded(&both), short[0]);
    assert_eq!(vectors(&embedded(&stage, json!({"dimensions": WIDTH})).await)[0].len(), WIDTH as usize);
}

#[tokio::test]
async fn texts_are_framed_and_cut_as_asked() {
    let mut bundle = tokenizer::bundle(true, 512);
    bundle.text_end_id = Some(END);
    let stage = stage_of(|_| {}, &bundle).await;
    let check = async |fields: Value, expected: &[u32]| {
        let reply = embedded(&stage, fields.clone()).await;
        assert_eq!(vectors(&reply)[0], embedding(expected, Pooling::Last), "{fields}");
        assert_eq!(stage.worker.requests().last().unwrap().prompt_ids, expected, "{fields}");
    };
    check(json!({}), &[BOS, 104, 105, END]).await;
    check(json!({"add_special_tokens": false}), &[104, 105]).await;
    check(json!({"input": [104, 105]}), &[104, 105]).await;
    check(json!({"truncate_prompt_tokens": 3}), &[BOS, 104, END]).await;
    check(json!({"truncate_prompt_tokens": 9}), &[BOS, 104, 105, END]).await;
    check(json!({"truncate_prompt_tokens": 1, "input": [7, 8, 9]}), &[7]).await;
    let long = "x".repeat(5000);
    let mut cut = vec![u32::from(b'x'); 512];
    (cut[0], cut[511]) = (BOS, END);
    check(json!({"truncate_prompt_tokens": -1, "input": long}), &cut).await;
}

#[tokio::test]
async fn wrong_requests_are_refused_by_field_before_any_work() {
    let stage = stage().await;
    let check = async |fields: Value, code: &str, param: &str| {
        let reply = stage.http.post(EMBEDDINGS, &body(fields.clone())).await;
        let error = reply.error();
        let status = if code == "model_not_found" { 404 } else { 400 };
        assert_eq!(reply.status.as_u16(), status, "{fields}: {error}");
        assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some(code), Some(param)), "{error}");
        assert!(error["message"].as_str().is_some_and(|m| m.len() > 10), "{error}");
    };
    let invalid = async |fields: Value, param: &str| check(fields, "invalid_request", param).await;
    invalid(json!({"input": null}), "input").await;
    invalid(json!({"input": ""}), "input").await;
    invalid(json!({"input": []}), "input").await;
    invalid(json!({"input": 5}), "input").await;
    invalid(json!({"input": {"text": "a"}}), "input").await;
    invalid(json!({"input": ["a", ""]}), "input[1]").await;
    invalid(json!({"input": ["a", null]}), "input[1]").await;
    invalid(json!({"input": [[1], []]}), "input[1]").await;
    invalid(json!({"input": [1, -1]}), "input[1]").await;
    invalid(json!({"input": [1, 99999]}), "input[1]").await;
    invalid(json!({"input": [[1], [2, 1.5]]}), "input[1][1]").await;
    invalid(json!({"input": vec!["a"; 2049]}), "input").await;
    invalid(json!({"encoding_format": "int8"}), "encoding_format").await;
    invalid(json!({"encoding_format": 1}), "encoding_format").await;
    invalid(json!({"dimensions": 0}), "dimensions").await;
    invalid(json!({"dimensions": WIDTH + 1}), "dimensions").await;
    invalid(json!({"dimensions": "2"}), "dimensions").await;
    invalid(json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens").await;
    invalid(json!({"truncate_prompt_tokens": -2}), "truncate_prompt_tokens").await;
    invalid(json!({"truncate_prompt_tokens": 513}), "truncate_prompt_tokens").await;
    invalid(json!({"add_special_tokens": "no"}), "add_special_tokens").await;
    invalid(json!({"user": 5}), "user").await;
    invalid(json!({"stream": true}), "stream").await;
    invalid(json!({"model": null}), "model").await;
    invalid(json!({"cache_salt": ""}), "cache_salt").await;
    let huge = "x ".repeat((1 << 19) + 1);
    invalid(json!({"input": huge, "truncate_prompt_tokens": 4}), "input").await;
    check(json!({"model": "nope"}), "model_not_found", "model").await;
    let over = async |fields: Value, param: &str| check(fields, "context_length_exceeded", param).await;
    over(json!({"input": vec![7; 513]}), "input").await;
    over(json!({"input": ["a", "x".repeat(513)]}), "input[1]").await;
    over(json!({"input": "x".repeat(100_000)}), "input").await;
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    let reply = stage.http.post(EMBEDDINGS, &chat).await;
    assert_eq!((reply.status.as_u16(), reply.error()["param"].as_str()), (400, Some("messages")));
    assert!(stage.worker.requests().is_empty(), "no worker was asked");
    embedded(&stage, json!({})).await;
}

#[tokio::test]
async fn who_runs_out_of_time_is_told_how_far_it_came() {
    let stage = stage_with(|config| config.timeouts.request_timeout = Duration::from_millis(500), true).await;
    stage.worker.script(|request| match request.prompt_ids.len() {
        2 => embed(request),
        _ => futures::stream::pending().boxed(),
    });
    let late = stage.http.post(EMBEDDINGS, &body(json!({"input": ["a", "bc", "d"]}))).await;
    let error = late.error();
    assert_eq!((late.status.as_u16(), &error["code"]), (504, &json!("deadline_exceeded")));
    assert_eq!(error["message"], "the request took longer than allowed; 2 of 3 inputs were done by then");
}

/// Nobody's queue is filled by one request, and its own tenant's limit is no reason to refuse a part of it.
#[tokio::test]
async fn many_inputs_go_a_few_at_a_time() {
    let stage = stage_with(|config| config.limits.tenant_requests_max = 3, true).await;
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counters = (Arc::clone(&running), Arc::clone(&most));
    stage.worker.script(move |request| {
        let (running, most) = counters.clone();
        let begin = move || most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        let (answer, running) = (embed(request), Arc::clone(&counters.0));
        let end = move || running.fetch_sub(1, Ordering::SeqCst);
        let begun = futures::stream::once(async move {
            begin();
            tokio::task::yield_now().await;
        });
        let ended = answer.inspect(move |_| {
            end();
        });
        begun.map(|()| None).chain(ended.map(Some)).filter_map(std::future::ready).boxed()
    });
    let inputs: Vec<Vec<u32>> = (0..200).map(|i| vec![i % 250, i / 250, 7]).collect();
    let reply = embedded(&stage, json!({"input": inputs})).await;
    let expected: Vec<_> = inputs.iter().map(|ids| embedding(ids, Pooling::Last)).collect();
    assert_eq!(vectors(&reply), expected);
    assert_eq!(stage.worker.requests().len(), 200, "none was asked twice");
    let most = most.load(Ordering::SeqCst);
    assert!((1..=3).contains(&most), "{most} at once");
}

#[tokio::test]
async fn one_input_that_fails_ends_the_others() {
    let stage = stage().await;
    stage.worker.script(|request| match request.prompt_ids[0] {
        13 => futures::stream::iter([Err(ErrorCode::InvalidRequest.status("unlucky"))]).boxed(),
        _ => {
            futures::stream::iter([Ok(prompt_message(request, 0))]).chain(futures::stream::pending()).boxed()
        }
    });
    let reply = stage.http.post(EMBEDDINGS, &body(json!({"input": [[1], [2], [13], [3]]}))).await;
    assert_eq!((reply.status.as_u16(), reply.error()["message"].as_str()), (400, Some("unlucky")));
    stage.worker.ended(stage.worker.requests().len()).await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_work() {
    let stage = stage().await;
    stage.worker.script(|request| {
        futures::stream::iter([Ok(prompt_message(request, 0))]).chain(futures::stream::pending()).boxed()
    });
    let text = body(json!({"input": ["a", "b", "c"]})).to_string();
    let mut socket = tokio::net::TcpStream::connect(stage.router.http_address()).await.unwrap();
    let head = format!("POST {EMBEDDINGS} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", text.len());
    socket.write_all(format!("{head}{text}").as_bytes()).await.unwrap();
    stage.worker.begun(3).await;
    drop(socket);
    stage.worker.ended(3).await;
    stage.worker.says("ok");
    assert_eq!(stage.http.post(COMPLETIONS, &completion(json!({}))).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_fleet_without_embeddings_says_what_to_do() {
    let bundle = tokenizer::bundle(true, 512);
    let plain = SpeakingWorker::start_with("w0", &["tiny"], &bundle, &["grammar"]).await;
    let router = router(|_| {}, [plain.address.as_str()]).await;
    router.ready(1).await;
    let http = thalweg_harness::HttpClient::new(router.http_address());
    let reply = http.post(EMBEDDINGS, &body(json!({}))).await;
    assert_eq!((reply.status.as_u16(), reply.error()["code"].as_str()), (503, Some("unavailable")));
    assert!(reply.error()["message"].as_str().unwrap().contains("give it --pooling-type"), "{}", reply.text);
    assert!(plain.requests().is_empty());
    assert_eq!(http.post(COMPLETIONS, &completion(json!({}))).await.status, StatusCode::OK);
}

/// SHA-256 of `hello`, by sha256sum.
const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

#[tokio::test]
async fn keys_bound_it_and_records_tell_of_it() {
    let mut keys = tempfile::NamedTempFile::new().unwrap();
    let text =
        format!("keys: [{{name: ci, sha256: {HELLO}, tenant: team, priority-min: 2, requests-max: 2}}]");
    keys.write_all(text.as_bytes()).unwrap();
    let log = tempfile::NamedTempFile::new().unwrap();
    let (path, log_path) = (keys.path().to_owned(), log.path().to_owned());
    let change = |config: &mut thalweg_router::config::RouterConfig| {
        config.surface.api_keys_file = Some(path);
        config.surface.usage_log = Some(log_path);
    };
    let stage = stage_with(change, true).await;
    let send = async |fields: Value| {
        let headers = [("authorization", "Bearer hello"), ("x-request-id", "req-7")];
        let bytes = Bytes::from(body(fields).to_string());
        stage.http.send(Method::POST, EMBEDDINGS, &headers, bytes).await.read().await
    };
    let reply = send(json!({"input": ["ab", "c", "d"], "cache_salt": "s"})).await;
    assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
    assert_eq!((reply.header("x-request-id"), reply.header("x-thalweg-worker")), (Some("req-7"), Some("w0")));
    let request = stage.worker.requests().pop().unwrap();
    let scope = request.cache_scope.unwrap();
    assert_eq!((scope.scope.as_str(), scope.salt.as_str(), request.priority), ("team", "s", 2));
    let refused = send(json!({"priority": 1})).await;
    assert_eq!((refused.status.as_u16(), refused.error()["param"].as_str()), (400, Some("priority")));
    let headers = [("authorization", "Bearer hello")];
    let metrics = stage.http.send(Method::GET, "/metrics", &headers, Bytes::new()).await.read().await.text;
    let ok = "thalweg_router_http_requests_total{model=\"tiny\",endpoint=\"embeddings\",outcome=\"ok\"} 1";
    assert!(metrics.lines().any(|line| line == ok), "{metrics}");
    assert!(
        metrics.lines().any(|line| line == "thalweg_router_prompt_tokens_total{model=\"tiny\"} 7"),
        "{metrics}"
    );
    stage.router.shutdown().await;

    let text = std::fs::read_to_string(log.path()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told = |line: &Value| (line["outcome"].clone(), line["prompt_tokens"].clone());
    assert_eq!(
        lines.iter().map(told).collect::<Vec<_>>(),
        [(json!("ok"), json!(7)), (json!("invalid_request"), json!(0))]
    );
    let first = &lines[0];
    assert_eq!(
        (&first["endpoint"], &first["key"], &first["worker"]),
        (&json!("embeddings"), &json!("ci"), &json!("w0"))
    );
    assert_eq!((&first["request_id"], &first["completion_tokens"]), (&json!("req-7"), &json!(0)));
    assert!(first["reply_id"].as_str().unwrap().starts_with("embd-"));
}
