//! API keys in front of everything.

use std::io::Write;

use bytes::Bytes;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use thalweg_harness::HttpClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::{CHAT, COMPLETIONS, Stage, chat, completion, stage, stage_with};

/// SHA-256 of `hello` and of `world`, by sha256sum.
const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
const WORLD: &str = "486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7";

fn key_file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

async fn guarded(keys: &tempfile::NamedTempFile) -> Stage {
    let path = keys.path().to_owned();
    stage_with(|config| config.surface.api_keys_file = Some(path), true).await
}

async fn send(
    http: &HttpClient,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> thalweg_harness::Reply {
    http.send(method, path, headers, Bytes::from(body.to_string())).await.read().await
}

async fn with_key(stage: &Stage, key: &str, path: &str, body: &Value) -> thalweg_harness::Reply {
    let value = format!("Bearer {key}");
    send(&stage.http, Method::POST, path, &[("authorization", value.as_str())], body).await
}

#[tokio::test]
async fn nothing_but_the_public_paths_answers_without_a_key() {
    // auth-01.
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}}}]"));
    let stage = guarded(&keys).await;
    let paths = [
        "/",
        CHAT,
        COMPLETIONS,
        "/v1/models",
        "/v1/models/tiny",
        "/tokenize",
        "/detokenize",
        "/metrics",
        "//v1/chat/completions",
        "/V1/chat/completions",
        "/v1/../v1/chat/completions",
        "/v1%2Fchat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions?x=1",
        "/invocations",
        "/generate",
        "/workers",
        "/drain",
        "/flush_cache",
        "/debug",
        "/openapi.json",
        "/health/",
        "//health",
        "/HEALTH",
        "/health%20",
        "/ready/x",
        "/v1/embeddings",
        "/v1/responses",
    ];
    let methods = [
        Method::GET,
        Method::POST,
        Method::HEAD,
        Method::OPTIONS,
        Method::PUT,
        Method::DELETE,
        Method::PATCH,
    ];
    let wrong: [&[(&str, &str)]; 7] = [
        &[],
        &[("authorization", "Bearer wrong")],
        &[("authorization", "bearer")],
        &[("authorization", "hello")],
        &[("authorization", "Basic hello")],
        &[("x-api-key", "hello")],
        &[("authorization", "Bearer hello"), ("authorization", "Bearer hello")],
    ];
    for path in paths {
        for method in &methods {
            let headers = wrong[(path.len() + method.as_str().len()) % wrong.len()];
            let reply = send(&stage.http, method.clone(), path, headers, &chat(json!({}))).await;
            assert_eq!(reply.status, StatusCode::UNAUTHORIZED, "{method} {path} {headers:?}");
            assert!(reply.header("www-authenticate").is_some_and(|v| v.starts_with("Bearer")));
            assert!(reply.header("x-request-id").is_some());
            if *method != Method::HEAD {
                let error = reply.error();
                assert_eq!(
                    (&error["type"], &error["code"]),
                    (&json!("authentication_error"), &json!("invalid_api_key"))
                );
                assert!(!reply.text.contains("wrong") && !reply.text.contains("hello"), "{}", reply.text);
            }
        }
    }
    for headers in wrong {
        let reply = send(&stage.http, Method::POST, CHAT, headers, &chat(json!({}))).await;
        assert_eq!(reply.status, StatusCode::UNAUTHORIZED, "{headers:?}");
    }
    assert!(stage.worker.requests().is_empty());
    for path in ["/health", "/ready"] {
        assert_eq!(stage.http.get(path).await.status, StatusCode::OK);
        let post = send(&stage.http, Method::POST, path, &[], &json!({})).await;
        assert_eq!(post.status, StatusCode::UNAUTHORIZED, "only reading is public");
    }
}

#[tokio::test]
async fn a_key_lets_in_in_every_form_that_http_has_for_it() {
    // auth-01.
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}}}]"));
    let stage = guarded(&keys).await;
    for value in ["Bearer hello", "bearer hello", "BEARER   hello"] {
        let reply =
            send(&stage.http, Method::POST, CHAT, &[("authorization", value)], &chat(json!({}))).await;
        assert_eq!(reply.status, StatusCode::OK, "{value}: {}", reply.text);
    }
    let metrics =
        send(&stage.http, Method::GET, "/metrics", &[("authorization", "Bearer hello")], &json!({})).await;
    assert!(metrics.status == StatusCode::OK && !metrics.text.contains("hello"));
    assert!(metrics.text.contains("thalweg_router_unauthorized_requests_total 0"), "{}", metrics.text);
    // api-05: whoever has a key is told what is wrong with the model, and never that the key is.
    for (model, status) in [
        (json!("nope"), 404),
        (json!("TINY"), 404),
        (json!(" tiny "), 404),
        (json!(""), 400),
        (Value::Null, 400),
    ] {
        let reply = with_key(&stage, "hello", CHAT, &chat(json!({"model": model}))).await;
        assert_eq!(
            (reply.status.as_u16(), reply.error()["param"].as_str()),
            (status, Some("model")),
            "{model}"
        );
    }
    assert_eq!(stage.worker.requests().len(), 3);
    let lost = with_key(&stage, "hello", "/nowhere", &json!({})).await;
    assert_eq!(lost.status, StatusCode::NOT_FOUND);
    let scope = stage.worker.requests()[0].cache_scope.clone().unwrap();
    assert_eq!(scope.scope, "ci", "a tenant is called after its key unless the file says otherwise");
}

#[tokio::test]
async fn an_upgrade_to_http2_is_no_way_around() {
    // auth-01.
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}}}]"));
    let stage = guarded(&keys).await;
    let mut socket = TcpStream::connect(stage.router.http_address()).await.unwrap();
    let head = "GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings, close\r\nupgrade: h2c\r\n\
                http2-settings: AAMAAABkAAQAAP__\r\n\r\n";
    socket.write_all(head.as_bytes()).await.unwrap();
    let mut bytes = [0; 12];
    socket.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"HTTP/1.1 401");
}

#[tokio::test]
async fn metrics_are_public_where_a_flag_says_so() {
    let keys = key_file("keys: []");
    let path = keys.path().to_owned();
    let change = |config: &mut thalweg_router::config::RouterConfig| {
        config.surface.api_keys_file = Some(path);
        config.surface.metrics_public = true;
    };
    let stage = stage_with(change, true).await;
    assert_eq!(stage.http.get("/metrics").await.status, StatusCode::OK);
    assert_eq!(stage.http.get("/v1/models").await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn without_keys_everybody_is_let_in() {
    let stage = stage().await;
    let reply = with_key(&stage, "unused", CHAT, &chat(json!({}))).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert_eq!(stage.worker.requests()[0].cache_scope.clone().unwrap().scope, "default");
}

#[tokio::test]
async fn a_changed_file_is_taken_up_and_a_broken_one_is_not() {
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}}}]"));
    let stage = guarded(&keys).await;
    let models = async |key: &str| {
        let value = format!("Bearer {key}");
        send(&stage.http, Method::GET, "/v1/models", &[("authorization", value.as_str())], &json!({}))
            .await
            .status
    };
    assert_eq!((models("hello").await, models("world").await), (StatusCode::OK, StatusCode::UNAUTHORIZED));
    std::fs::write(keys.path(), "keys: [").unwrap();
    let until = async |key: &str, status: StatusCode| {
        let start = tokio::time::Instant::now();
        while models(key).await != status {
            assert!(start.elapsed().as_secs() < 20, "{key} is not {status}");
        }
    };
    std::fs::write(
        keys.path(),
        format!("keys: [{{name: b, sha256: {HELLO}}}, {{name: c, sha256: {WORLD}}}]"),
    )
    .unwrap();
    until("world", StatusCode::OK).await;
    assert_eq!(models("hello").await, StatusCode::OK);
    std::fs::write(keys.path(), format!("keys: [{{name: c, sha256: {WORLD}}}]")).unwrap();
    until("hello", StatusCode::UNAUTHORIZED).await;
    assert_eq!(models("world").await, StatusCode::OK);
}

#[tokio::test]
async fn a_key_is_held_to_its_limits() {
    let keys = key_file(&format!(
        "keys:\n- {{name: small, sha256: {HELLO}, tenant: t, requests-max: 1, output-tokens-max: 5, priority-min: 3, \
         cache-scope: shared}}\n- {{name: other, sha256: {WORLD}}}\n"
    ));
    let stage = guarded(&keys).await;
    let param = |reply: thalweg_harness::Reply| (reply.status.as_u16(), reply.error()["param"].clone());
    let long = with_key(&stage, "hello", COMPLETIONS, &completion(json!({"max_tokens": 6}))).await;
    assert_eq!(param(long), (400, json!("max_tokens")));
    let early =
        with_key(&stage, "hello", COMPLETIONS, &completion(json!({"max_tokens": 5, "priority": 2}))).await;
    assert_eq!(param(early), (400, json!("priority")));
    let default = with_key(&stage, "hello", COMPLETIONS, &json!({"model": "tiny", "prompt": "hi"})).await;
    assert_eq!(default.status, StatusCode::OK, "{}", default.text);
    let request = stage.worker.requests().pop().unwrap();
    let scope = request.cache_scope.clone().unwrap();
    let got = (request.sampling.unwrap().max_tokens, request.priority, scope.scope.as_str());
    assert_eq!(got, (5, 3, "shared"));

    // One request of its tenant runs, so that the next is refused, and another tenant's is not.
    stage.worker.script(|_| Box::pin(futures::stream::pending()));
    let body = completion(json!({"max_tokens": 5, "stream": true}));
    let running = tokio::spawn({
        let (http, body) = (stage.http.clone(), Bytes::from(body.to_string()));
        async move { http.send(Method::POST, COMPLETIONS, &[("authorization", "Bearer hello")], body).await }
    });
    stage.worker.begun(2).await;
    let refused = with_key(&stage, "hello", COMPLETIONS, &completion(json!({"max_tokens": 5}))).await;
    assert_eq!((refused.status.as_u16(), refused.error()["code"].as_str()), (429, Some("overloaded")));
    running.abort();
    stage.worker.says("ok");
    let other = with_key(&stage, "world", COMPLETIONS, &completion(json!({}))).await;
    assert_eq!(other.status, StatusCode::OK);
}

#[tokio::test]
async fn a_key_may_bound_how_long_a_request_takes() {
    let keys = key_file(&format!("keys: [{{name: short, sha256: {HELLO}, duration-max: 0.2}}]"));
    let stage = guarded(&keys).await;
    stage.worker.script(|_| Box::pin(futures::stream::pending()));
    let late = with_key(&stage, "hello", COMPLETIONS, &completion(json!({}))).await;
    assert_eq!((late.status.as_u16(), late.error()["code"].as_str()), (504, Some("deadline_exceeded")));
}

#[tokio::test]
async fn every_request_leaves_one_record() {
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}, tenant: team}}]"));
    let log = tempfile::NamedTempFile::new().unwrap();
    let (path, log_path) = (keys.path().to_owned(), log.path().to_owned());
    let change = |config: &mut thalweg_router::config::RouterConfig| {
        config.surface.api_keys_file = Some(path);
        config.surface.usage_log = Some(log_path);
    };
    let stage = stage_with(change, true).await;
    stage.worker.says("abc");
    let id = [("authorization", "Bearer hello"), ("x-request-id", "req-1")];
    send(&stage.http, Method::POST, CHAT, &id, &chat(json!({}))).await;
    with_key(&stage, "hello", CHAT, &chat(json!({"n": 0}))).await;
    with_key(&stage, "wrong", CHAT, &chat(json!({}))).await;
    // A client that goes away.
    stage.worker.script(|request| {
        use futures::StreamExt;
        let messages = crate::speaking_worker::responses(request, "abc").into_iter().take(2).map(Ok);
        futures::stream::iter(messages).chain(futures::stream::pending()).boxed()
    });
    let body = Bytes::from(completion(json!({"stream": true})).to_string());
    let mut stream =
        stage.http.send(Method::POST, COMPLETIONS, &[("authorization", "Bearer hello")], body).await;
    stream.next().await.unwrap();
    drop(stream);
    stage.worker.ended(2).await;
    stage.router.shutdown().await;

    let text = std::fs::read_to_string(log.path()).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let told: Vec<_> = lines
        .iter()
        .map(|l| {
            assert!(l["key"] == "ci" && l["tenant"] == "team" && l["seconds"].is_f64(), "{l}");
            (
                l["endpoint"].as_str().unwrap(),
                l["outcome"].as_str().unwrap(),
                l["completion_tokens"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(told, [("chat", "ok", 4), ("chat", "invalid_request", 0), ("completions", "cancelled", 1)]);
    assert_eq!((&lines[0]["request_id"], &lines[0]["prompt_tokens"]), (&json!("req-1"), &json!(22)));
    assert!(lines[0]["first_token_seconds"].is_f64() && lines[0]["worker"] == "w0");
    assert!(!text.contains("hello"));
}

#[tokio::test]
async fn pages_of_allowed_origins_may_ask() {
    let keys = key_file(&format!("keys: [{{name: ci, sha256: {HELLO}}}]"));
    let path = keys.path().to_owned();
    let change = |config: &mut thalweg_router::config::RouterConfig| {
        config.surface.api_keys_file = Some(path);
        config.surface.cors_allow_origin = vec!["https://chat.example.org".to_owned()];
    };
    let stage = stage_with(change, true).await;
    let allowed = async |origin: &str| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        let asked = send(&stage.http, Method::OPTIONS, CHAT, &headers, &json!({})).await;
        let refused = send(&stage.http, Method::POST, CHAT, &[("origin", origin)], &chat(json!({}))).await;
        assert_eq!((asked.status.as_u16(), refused.status.as_u16()), (200, 401));
        let header =
            |reply: &thalweg_harness::Reply| reply.header("access-control-allow-origin").map(str::to_owned);
        assert_eq!(header(&asked), header(&refused));
        header(&asked)
    };
    assert_eq!(allowed("https://chat.example.org").await.as_deref(), Some("https://chat.example.org"));
    assert_eq!(allowed("https://evil.example.org").await, None);
    let off = crate::stage().await;
    let reply = send(&off.http, Method::POST, CHAT, &[("origin", "https://a.b")], &chat(json!({}))).await;
    assert_eq!(reply.header("access-control-allow-origin"), None);
}
