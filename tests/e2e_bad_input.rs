//! Every kind of bad request against a real cluster: a clear error, and the server goes on serving.

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_harness::{Cluster, HttpClient, Running, models};
use tokio::time::Instant;

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Of an answer of /health, and of what the longest time between two tokens of a stream grows by.
const HEALTH_MAX: Duration = Duration::from_millis(500);
const GAP_GROWTH_MAX: Duration = Duration::from_millis(250);

#[tokio::test]
async fn bad_requests_are_told_and_the_server_goes_on() {
    let args = ["--kv-cache-memory-bytes", "32MiB", "--max-model-len", "512", "--body-bytes-max", "100000"];
    let cluster = Cluster::up(BINARY, &models::smollm2(), 1, &args);
    let model = cluster.model.clone();
    let chat = |fields: Value| {
        with(json!({"model": model, "messages": [{"role": "user", "content": "hi"}]}), fields)
    };
    let completion = |fields: Value| with(json!({"model": model, "prompt": "hi"}), fields);
    let check = async |path: &str, body: String, status: u16, code: &str, param: Option<&str>| {
        let reply = cluster.http.post_bytes(path, body).await;
        let error = reply.error();
        assert_eq!(reply.status.as_u16(), status, "{error}");
        assert_eq!((error["code"].as_str(), error["param"].as_str()), (Some(code), param), "{error}");
        let next = cluster.http.post(COMPLETIONS, &completion(json!({"max_tokens": 1}))).await;
        assert_eq!(next.status.as_u16(), 200, "after {error}: {}", next.text);
        assert_eq!(cluster.http.get("/health").await.status.as_u16(), 200);
    };
    let invalid = async |path: &str, body: Value, param: &str| {
        check(path, body.to_string(), 400, "invalid_request", Some(param)).await;
    };

    check(CHAT, "{\"model\": ".to_owned(), 400, "invalid_request", Some("model")).await;
    check(
        CHAT,
        format!("{{\"model\": \"{model}\", \"temperature\": NaN}}"),
        400,
        "invalid_request",
        Some("temperature"),
    )
    .await;
    check(COMPLETIONS, "[]".to_owned(), 400, "invalid_request", None).await;
    // api-01: the model's tokenizer adds no beginning of sequence, so that these are no token at all.
    invalid(CHAT, chat(json!({"messages": []})), "messages").await;
    invalid(CHAT, chat(json!({"messages": [{"role": "user", "content": 5}]})), "messages[0].content").await;
    invalid(CHAT, chat(json!({"n": 0})), "n").await;
    invalid(CHAT, chat(json!({"max_tokens": -1})), "max_tokens").await;
    invalid(CHAT, chat(json!({"temperature": "warm"})), "temperature").await;
    invalid(CHAT, chat(json!({"response_format": {"type": "melody"}})), "response_format.type").await;
    invalid(COMPLETIONS, completion(json!({"prompt": ""})), "prompt").await;
    invalid(COMPLETIONS, completion(json!({"prompt": []})), "prompt").await;
    invalid(COMPLETIONS, completion(json!({"prompt": [""]})), "prompt[0]").await;
    invalid(COMPLETIONS, completion(json!({"prompt": [[]]})), "prompt[0]").await;
    invalid(COMPLETIONS, completion(json!({"prompt": [1, 49_152]})), "prompt[1]").await;
    invalid(COMPLETIONS, completion(json!({"logit_bias": {"49152": 1}})), "logit_bias.49152").await;
    // api-03.
    let over = [
        completion(json!({"prompt": vec![5; 600]})),
        completion(json!({"prompt": vec![5; 400], "max_tokens": 200})),
        completion(json!({"prompt": "word ".repeat(5000), "stream": true})),
    ];
    for body in over {
        check(COMPLETIONS, body.to_string(), 400, "context_length_exceeded", None).await;
    }
    let long = json!([{"role": "user", "content": "word ".repeat(600)}]);
    check(CHAT, chat(json!({"messages": long})).to_string(), 400, "context_length_exceeded", None).await;
    check(CHAT, chat(json!({"model": "nope"})).to_string(), 404, "model_not_found", Some("model")).await;
    check(CHAT, chat(json!({"user": "x".repeat(100_000)})).to_string(), 413, "request_too_large", None).await;
    cluster.stop();
}

/// tokenizer-05: neither the processes nor a stream stand still while bodies of 20 MB are read, tokenised and refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_prompts_hold_nobody_up() {
    let cluster = Cluster::simulated(BINARY, &models::smollm2(), 1, "step: {base_seconds: 0.02}");
    let messages = |content: &str| json!([{"role": "user", "content": content}]);
    let steady = json!({"model": cluster.model, "messages": messages("hi"), "stream": true, "ignore_eos": true,
                        "max_tokens": 300, "temperature": 0});
    let steady = Running::start(&cluster.http, CHAT, steady);
    cluster.eventually("a rate to compare with", async || steady.tokens() > 60).await;
    let attacked = Instant::now();
    // Of the last two a token takes many characters.
    let huge = ["a few words ", " ", "-"].map(|words| {
        let content = words.repeat(20_000_000 / words.len());
        json!({"model": cluster.model, "messages": messages(&content)}).to_string()
    });
    let attack = async {
        for huge in huge {
            let reply = cluster.http.post_bytes(CHAT, huge).await;
            assert_eq!(reply.status.as_u16(), 400, "{}", reply.text);
            assert_eq!(reply.error()["code"], "context_length_exceeded");
        }
    };
    let (router, worker) = (&cluster.http, &cluster.worker_metrics[0]);
    let (mut of_router, mut of_worker) = (Vec::new(), Vec::new());
    tokio::select! {
        () = attack => {}
        () = watch(router, &mut of_router) => {}
        () = watch(worker, &mut of_worker) => {}
    }
    let repelled = Instant::now();
    let outcome = steady.outcome().await;
    assert_eq!(outcome.failure(), None);
    let longest = of_router.iter().chain(&of_worker).max().expect("both were asked");
    let before = outcome.gaps(..attacked).max().unwrap_or_default();
    let meanwhile: Vec<_> = outcome.gaps(attacked..repelled).collect();
    let gap = meanwhile.iter().max().copied().unwrap_or_default();
    eprintln!(
        "/health took {longest:?} at most over {}; between tokens {before:?} before, {gap:?} over {} meanwhile",
        of_router.len() + of_worker.len(),
        meanwhile.len()
    );
    assert!(meanwhile.len() > 10, "the stream was over before the attack");
    assert!(*longest < HEALTH_MAX, "/health took {longest:?}");
    assert!(gap < before + GAP_GROWTH_MAX, "between tokens: {before:?} before, {gap:?} meanwhile");
    cluster.stop();
}

/// Asks for /health every 50 ms, and notes how long each answer took.
async fn watch(http: &HttpClient, took: &mut Vec<Duration>) {
    loop {
        let asked = Instant::now();
        assert_eq!(http.get("/health").await.status.as_u16(), 200);
        took.push(asked.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn with(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}
