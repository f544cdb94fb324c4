//! Everything that is not a generation.

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::json;

use crate::speaking_worker::SpeakingWorker;
use crate::{CHAT, chat, router, stage, stage_with, tokenizer};

#[tokio::test]
async fn models_are_listed_and_found_by_name() {
    let stage = stage().await;
    let list = stage.http.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], "tiny");
    assert_eq!(list["data"][0]["object"], "model");
    assert_eq!(list["data"][0]["max_model_len"], 512);
    assert!(list["data"][0]["created"].is_u64());
    assert_eq!(stage.http.get("/v1/models/tiny").await.json(), list["data"][0]);

    let unknown = stage.http.get("/v1/models/owner/unknown").await;
    assert_eq!(
        (unknown.status, unknown.error()["code"].as_str()),
        (StatusCode::NOT_FOUND, Some("model_not_found"))
    );
}

#[tokio::test]
async fn texts_chats_and_ids_are_converted() {
    let stage = stage().await;
    let reply = stage
        .http
        .post("/tokenize", &json!({"model": "tiny", "prompt": "hž", "return_token_strs": true}))
        .await;
    let expected = json!({"count": 4, "max_model_len": 512, "tokens": [256, 104, 197, 190],
                          "token_strs": ["<s>", "h", "\u{fffd}", "\u{fffd}"]});
    assert_eq!(reply.json(), expected);
    let chat = stage
        .http
        .post("/tokenize", &json!({"messages": [{"role": "user", "content": "a<s>"}]}))
        .await
        .json();
    let text = "<s><|im_start|>user\na<s><|im_end|>\n<|im_start|>assistant\n";
    let back = stage.http.post("/detokenize", &json!({"tokens": chat["tokens"]})).await.json();
    let info = stage.http.get("/tokenizer_info").await.json();
    assert_eq!((&info["model"], &info["model_max_length"]), (&json!("tiny"), &json!(512)));
    assert!(info["chat_template"].as_str().is_some_and(|template| template.contains("messages")), "{info}");
    let eos = info["eos_token"].as_str().expect("the bundle has an end");
    let ids = json!({"prompt": eos, "add_special_tokens": false});
    assert_eq!(stage.http.post("/tokenize", &ids).await.json()["count"], 1, "{eos} is one token");
    assert_eq!(back, json!({"prompt": text}));
    assert!(stage.worker.requests().is_empty());
}

#[tokio::test]
async fn health_is_not_readiness() {
    let worker = SpeakingWorker::start("w0", &["tiny"], &tokenizer::bundle(true, 512)).await;
    let alone = router(|_| {}, []).await;
    let http = thalweg_harness::HttpClient::new(alone.http_address());
    assert_eq!(http.get("/health").await.status, StatusCode::OK);
    let ready = http.get("/ready").await;
    assert_eq!(ready.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(ready.json()["reason"].as_str().unwrap().contains("no worker"));
    let refused = http.post(CHAT, &chat(json!({}))).await;
    assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE, "{}", refused.text);
    assert_eq!(refused.header("retry-after"), Some("1"));

    let served = router(|_| {}, [worker.address.as_str()]).await;
    served.ready(1).await;
    let http = thalweg_harness::HttpClient::new(served.http_address());
    assert_eq!(http.get("/ready").await.status, StatusCode::OK);
}

#[tokio::test]
async fn metrics_count_requests_by_how_they_ended() {
    let stage = stage().await;
    stage.worker.says("hello");
    // autoscale-04: a rate does not see a series begin.
    let text = stage.http.get("/metrics").await.text;
    for zero in [
        "http_requests_total{model=\"tiny\",endpoint=\"embeddings\",outcome=\"unavailable\"} 0",
        "streams_broken_total{code=\"unavailable\"} 0",
        "retries_total{reason=\"gone\"} 0",
        "resumes_total{reason=\"gone\"} 0",
    ] {
        assert!(text.contains(&format!("thalweg_router_{zero}\n")), "{zero} is not in {text}");
    }
    stage.http.post(CHAT, &chat(json!({}))).await;
    stage.http.post(CHAT, &chat(json!({"n": 0}))).await;
    let text = stage.http.get("/metrics").await.text;
    let line = |start: &str| {
        let found = text.lines().find(|l| l.starts_with(start));
        found.unwrap_or_else(|| panic!("{start} is not in {text}")).to_owned()
    };
    let ok = line("thalweg_router_http_requests_total{model=\"tiny\",endpoint=\"chat\",outcome=\"ok\"}");
    assert!(ok.ends_with(" 1"), "{ok}");
    let refused =
        line("thalweg_router_http_requests_total{model=\"\",endpoint=\"chat\",outcome=\"invalid_request\"}");
    assert!(refused.ends_with(" 1"), "{refused}");
    assert!(line("thalweg_router_completion_tokens_total{model=\"tiny\"}").ends_with(" 6"));
    let families = text.lines().filter(|l| l.starts_with("# TYPE "));
    let mut names: Vec<_> = families.map(|l| l.split(' ').nth(2).unwrap()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "no family is shown twice");
}

#[tokio::test]
async fn request_ids_come_back_and_workers_are_named() {
    let stage = stage().await;
    let send = async |id: &str, body: serde_json::Value| {
        let body = Bytes::from(body.to_string());
        stage.http.send(Method::POST, CHAT, &[("x-request-id", id)], body).await.read().await
    };
    let reply = send("abc-1", chat(json!({}))).await;
    assert_eq!((reply.header("x-request-id"), reply.header("x-thalweg-worker")), (Some("abc-1"), Some("w0")));
    let refused = send("abc-2", json!({})).await;
    assert_eq!((refused.header("x-request-id"), refused.status), (Some("abc-2"), StatusCode::BAD_REQUEST));
    let odd = send("with space", chat(json!({}))).await;
    assert!(odd.header("x-request-id").is_some_and(|id| id.len() == 32 && id != "with space"));
    let streamed = send("abc-3", chat(json!({"stream": true}))).await;
    assert_eq!(streamed.header("x-thalweg-worker"), Some("w0"));

    let silent = stage_with(|config| config.worker_header = false, true).await;
    let reply = silent.http.post(CHAT, &chat(json!({}))).await;
    assert_eq!((reply.status, reply.header("x-thalweg-worker")), (StatusCode::OK, None));
}

#[tokio::test]
async fn a_seed_is_drawn_for_each_request_that_gives_none() {
    // sampling-03: neither two requests nor two routers, nor one and its successor, draw the same.
    let worker = SpeakingWorker::start("w0", &["tiny"], &tokenizer::bundle(true, 512)).await;
    for _ in 0..2 {
        let router = router(|_| {}, [worker.address.as_str()]).await;
        router.ready(1).await;
        let http = thalweg_harness::HttpClient::new(router.http_address());
        for _ in 0..10 {
            http.post(CHAT, &chat(json!({}))).await;
        }
    }
    let requests = worker.requests();
    let seeds = requests.iter().map(|request| request.sampling.as_ref().unwrap().seed);
    assert_eq!(seeds.collect::<std::collections::BTreeSet<_>>().len(), 20);
}

#[tokio::test]
async fn trace_context_reaches_the_worker() {
    let stage = stage().await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let send = async |parent: &str, state: &str| {
        let headers = [("traceparent", parent), ("tracestate", state)];
        let body = Bytes::from(chat(json!({})).to_string());
        let reply = stage.http.send(Method::POST, CHAT, &headers, body).await.read().await;
        assert_eq!(reply.status, StatusCode::OK, "{}", reply.text);
        let seen = stage.worker.requests().pop().unwrap();
        (seen.traceparent, seen.tracestate)
    };
    let check = async |sent: (&str, &str), expected: (&str, &str)| {
        let (parent, state) = send(sent.0, sent.1).await;
        assert_eq!((parent.as_str(), state.as_str()), expected);
    };
    check((parent, "rojo=1,congo=2"), (parent, "rojo=1,congo=2")).await;
    // What is malformed is dropped, and the request is served.
    check((parent, "rojo"), (parent, "")).await;
    check(("00-zz", "rojo=1"), ("", "")).await;
}
