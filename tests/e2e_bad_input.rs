//! Every kind of bad request against a real cluster: a clear error, and the server goes on serving.

use serde_json::{Value, json};
use thalweg_harness::{Cluster, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

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
    invalid(CHAT, chat(json!({"messages": []})), "messages").await;
    invalid(CHAT, chat(json!({"messages": [{"role": "user", "content": 5}]})), "messages[0].content").await;
    invalid(CHAT, chat(json!({"n": 0})), "n").await;
    invalid(CHAT, chat(json!({"max_tokens": -1})), "max_tokens").await;
    invalid(CHAT, chat(json!({"temperature": "warm"})), "temperature").await;
    invalid(CHAT, chat(json!({"response_format": {"type": "melody"}})), "response_format.type").await;
    invalid(COMPLETIONS, completion(json!({"prompt": ""})), "prompt").await;
    invalid(COMPLETIONS, completion(json!({"prompt": []})), "prompt").await;
    invalid(COMPLETIONS, completion(json!({"prompt": [1, 49_152]})), "prompt[1]").await;
    invalid(COMPLETIONS, completion(json!({"logit_bias": {"49152": 1}})), "logit_bias.49152").await;
    let over = [
        completion(json!({"prompt": vec![5; 600]})),
        completion(json!({"prompt": vec![5; 400], "max_tokens": 200})),
        completion(json!({"prompt": "word ".repeat(5000), "stream": true})),
    ];
    for body in over {
        check(COMPLETIONS, body.to_string(), 400, "context_length_exceeded", None).await;
    }
    check(CHAT, chat(json!({"model": "nope"})).to_string(), 404, "model_not_found", Some("model")).await;
    check(CHAT, chat(json!({"user": "x".repeat(100_000)})).to_string(), 413, "request_too_large", None).await;
    cluster.stop();
}

fn with(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}
