//! Draws of a real model: extreme parameters, seeds, biases, and the figures that come with them.

use std::collections::BTreeSet;

use futures::future::join_all;
use serde_json::{Value, json};
use thalweg_harness::{Cluster, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// Fewer of twenty draws may be alike than chance would let happen in a lifetime.
const DISTINCT_OF_TWENTY: usize = 15;

#[tokio::test]
async fn draws_are_the_requests_own() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "64MiB"]);
    narrow_draws_are_greedy_alone_and_in_a_crowd(&cluster).await;
    a_seed_holds_whatever_else_runs(&cluster).await;
    logprobs_are_numbers_whatever_is_masked(&cluster).await;
    biases_out_of_bounds_are_refused_beside_a_stream(&cluster).await;
    cluster.stop();
}

#[tokio::test]
async fn draws_without_a_seed_differ_also_after_a_restart() {
    // sampling-03.
    let mut firsts = Vec::new();
    for draws in [20, 5] {
        let cluster = Cluster::up(BINARY, &models::smollm2(), 1, &["--kv-cache-memory-bytes", "32MiB"]);
        let body = completion(&cluster, json!({"temperature": 1.2, "max_tokens": 12}));
        let mut texts = Vec::new();
        for _ in 0..draws {
            texts.push(text(&cluster.http.post(COMPLETIONS, &body).await.json()));
        }
        let distinct = texts.iter().collect::<BTreeSet<_>>().len();
        assert!(distinct * 20 >= DISTINCT_OF_TWENTY * draws, "{texts:?}");
        let ten = cluster.http.post(COMPLETIONS, &merged(body, json!({"n": 10}))).await.json();
        let choices = ten["choices"].as_array().expect("choices");
        assert!(choices.len() == 10 && choices.iter().any(|c| c["text"] != choices[0]["text"]), "{ten}");
        firsts.push(texts[..5].to_vec());
        cluster.stop();
    }
    assert_ne!(firsts[0], firsts[1], "a restart repeats what was drawn before");
}

fn completion(cluster: &Cluster, fields: Value) -> Value {
    merged(json!({"model": cluster.model, "prompt": "The capital of France is", "max_tokens": 8}), fields)
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn text(reply: &Value) -> String {
    reply["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{reply}")).to_owned()
}

/// sampling-01.
async fn narrow_draws_are_greedy_alone_and_in_a_crowd(cluster: &Cluster) {
    let ask = async |fields: Value| {
        let body = completion(cluster, merged(json!({"logprobs": 2, "seed": 3}), fields));
        let reply = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(reply.status.as_u16(), 200, "{body}: {}", reply.text);
        let reply = reply.json();
        let logprobs = reply["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("logprobs");
        assert!(logprobs.iter().all(|l| l.as_f64().is_some_and(|l| l <= 0.0)), "{body}: {reply}");
        text(&reply)
    };
    let greedy = ask(json!({"temperature": 0})).await;
    let banned: Value =
        (2_000..3_000).map(|id| (id.to_string(), json!(-100))).collect::<serde_json::Map<_, _>>().into();
    let narrow = [
        json!({"temperature": 1e-4}),
        json!({"temperature": 1e-8}),
        json!({"temperature": 1e-30, "top_p": 0.5}),
        json!({"temperature": 5e-324}),
        json!({"temperature": 1, "top_p": 1e-4}),
        json!({"temperature": 1, "top_p": 1e-9}),
        json!({"temperature": 2, "top_k": 1}),
        json!({"temperature": 1, "min_p": 1}),
    ];
    let wild = [
        json!({"temperature": 0, "repetition_penalty": 0.01}),
        json!({"temperature": 1, "repetition_penalty": 100}),
        json!({"temperature": 1e-30, "logit_bias": banned, "min_p": 1}),
    ];
    let alone = ask(narrow[0].clone()).await;
    assert_eq!(alone, greedy);
    let crowd = narrow.iter().chain(&wild).map(|fields| ask(fields.clone()));
    let answers = join_all(crowd).await;
    for (fields, answer) in narrow.iter().zip(&answers) {
        assert_eq!(*answer, greedy, "{fields}");
    }
    for (fields, answer) in wild.iter().zip(&answers[narrow.len()..]) {
        assert_eq!(*answer, ask(fields.clone()).await, "{fields}, alone");
    }
}

/// sampling-02: alone, beside others, on either worker, with a warm cache.
async fn a_seed_holds_whatever_else_runs(cluster: &Cluster) {
    let seeded = |seed: u64| completion(cluster, json!({"temperature": 1, "seed": seed, "max_tokens": 32}));
    let ask = async |seed| cluster.http.post(COMPLETIONS, &seeded(seed)).await;
    let expected = text(&ask(42).await.json());
    let mut workers = BTreeSet::new();
    for round in 0..5 {
        assert_eq!(text(&ask(42).await.json()), expected, "alone, number {round}");
        let crowd = (0..8).map(|other| ask(if other % 4 == 0 { 42 } else { 1_000 * round + other }));
        for reply in join_all(crowd).await.into_iter().step_by(4) {
            workers.extend(reply.header("x-thalweg-worker").map(str::to_owned));
            assert_eq!(text(&reply.json()), expected, "in a crowd, number {round}");
        }
    }
    assert!(!workers.is_empty());
    let texts: Vec<_> = join_all((1..=20).map(ask)).await.iter().map(|reply| text(&reply.json())).collect();
    assert!(texts.iter().collect::<BTreeSet<_>>().len() >= DISTINCT_OF_TWENTY, "{texts:?}");
}

/// logprobs-01.
async fn logprobs_are_numbers_whatever_is_masked(cluster: &Cluster) {
    let first = cluster
        .http
        .post(COMPLETIONS, &completion(cluster, json!({"temperature": 0, "return_token_ids": true})))
        .await;
    let best = first.json()["choices"][0]["token_ids"][0].to_string();
    for fields in [
        json!({"top_k": 1}),
        json!({"top_p": 0.05}),
        json!({"logit_bias": {best.as_str(): -100}}),
        json!({"guided_choice": ["Thalweg"]}),
    ] {
        for stream in [false, true] {
            let more = merged(fields.clone(), json!({"stream": stream, "seed": 5}));
            let legacy = completion(cluster, merged(more.clone(), json!({"logprobs": 5})));
            let messages = json!([{"role": "user", "content": "hi"}]);
            let chat = json!({"model": cluster.model, "messages": messages, "max_tokens": 8, "logprobs": true, "top_logprobs": 5});
            for (path, body) in [(COMPLETIONS, legacy), (CHAT, merged(chat, more))] {
                let reply = cluster.http.post(path, &body).await;
                assert_eq!(reply.status.as_u16(), 200, "{body}: {}", reply.text);
                // The parser takes neither NaN nor Infinity.
                let bodies = if stream { reply.chunks() } else { vec![reply.json()] };
                let logprobs = bodies.iter().map(|body| &body["choices"][0]["logprobs"]);
                let count: usize = logprobs.map(|logprobs| count_of(logprobs, &body)).sum();
                assert!(count > 0, "{body}: no logprob came");
            }
        }
    }
}

/// Tokens with a sound logprob, of either endpoint's shape.
fn count_of(logprobs: &Value, body: &Value) -> usize {
    let is_sound = |value: &Value| value.as_f64().is_some_and(|value| value <= 0.0);
    let legacy = logprobs["token_logprobs"].as_array().into_iter().flatten().inspect(|logprob| {
        assert!(is_sound(logprob), "{body}: {logprobs}");
    });
    let chat = logprobs["content"].as_array().into_iter().flatten().inspect(|token| {
        let top = token["top_logprobs"].as_array().expect("alternatives");
        assert!(is_sound(&token["logprob"]) && top.len() == 5, "{body}: {token}");
        assert!(top.iter().all(|other| is_sound(&other["logprob"])), "{body}: {token}");
    });
    legacy.count() + chat.count()
}

/// sampling-05.
async fn biases_out_of_bounds_are_refused_beside_a_stream(cluster: &Cluster) {
    let fields = json!({"stream": true, "max_tokens": 64, "temperature": 0, "ignore_eos": true});
    let mut stream = cluster.http.open(COMPLETIONS, &completion(cluster, fields)).await;
    stream.next().await.expect("it has begun");
    let many: serde_json::Map<_, _> = (0..5_000).map(|id| (id.to_string(), json!(1))).collect();
    for (bias, param) in [
        (json!({"99999999": 5}), "logit_bias.99999999"),
        (json!({"-1": 5}), "logit_bias.-1"),
        (json!({"abc": 1}), "logit_bias.abc"),
        (json!({"5": 1e9}), "logit_bias.5"),
        (json!({"5": null}), "logit_bias.5"),
        (json!(many), "logit_bias"),
    ] {
        let reply = cluster.http.post(COMPLETIONS, &completion(cluster, json!({"logit_bias": bias}))).await;
        assert_eq!(
            (reply.status.as_u16(), reply.error()["param"].as_str()),
            (400, Some(param)),
            "{}",
            reply.text
        );
        assert_eq!(cluster.http.get("/health").await.status.as_u16(), 200);
    }
    let chunks = stream.read().await.chunks();
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "length");
}
