//! A real model behind the whole stack, as OpenAI's clients use it.

use serde_json::{Value, json};
use thalweg_harness::{Cluster, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Outputs of llama.cpp, with their probabilities.
const GOLDEN: &str = include_str!("golden/smollm2-135m-instruct-q4_1.json");

/// In a golden case the best token leads by so much that every sound implementation must take it.
const CLEAR_GAP: f64 = 0.5;

#[tokio::test]
async fn one_command_serves_a_real_model() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "64MiB"]);
    let golden: Value = serde_json::from_str(GOLDEN).expect("JSON");
    prompts_become_the_reference_ids(&cluster, &golden).await;
    first_tokens_are_the_references(&cluster, &golden).await;
    answers_are_sensible_and_streams_say_the_same(&cluster).await;
    choices_follow_their_seed(&cluster).await;
    echoed_logprobs_do_not_depend_on_the_cache(&cluster).await;
    cluster.stop();
}

#[tokio::test]
async fn a_router_serves_on_when_a_worker_dies() {
    let args = ["--kv-cache-memory-bytes", "32MiB", "--threads", "1"];
    let mut cluster = Cluster::of_processes(BINARY, &models::smollm2(), 2, &args).await;
    let body = completion(&cluster, json!({"max_tokens": 4}));
    let before = cluster.http.post(COMPLETIONS, &body).await.json();
    cluster.kill(1);
    for _ in 0..4 {
        let after = cluster.http.post(COMPLETIONS, &body).await;
        assert_eq!(after.json()["choices"], before["choices"]);
    }
}

fn chat(cluster: &Cluster, fields: Value) -> Value {
    let question = "What is the capital of France? Answer in one sentence.";
    let body = json!({"model": cluster.model, "temperature": 0, "messages": [{"role": "user", "content": question}]});
    merged(body, fields)
}

fn completion(cluster: &Cluster, fields: Value) -> Value {
    merged(json!({"model": cluster.model, "temperature": 0, "prompt": "The capital of France is"}), fields)
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

async fn prompts_become_the_reference_ids(cluster: &Cluster, golden: &Value) {
    for case in golden["cases"].as_array().expect("cases") {
        let body = json!({"model": cluster.model, "prompt": case["prompt"]});
        let reply = cluster.http.post("/tokenize", &body).await.json();
        assert_eq!(reply["tokens"], case["prompt_ids"], "{}", case["name"]);
        let text = cluster.http.post("/detokenize", &json!({"tokens": reply["tokens"]})).await.json();
        assert_eq!(text["prompt"], case["prompt"], "{}", case["name"]);
    }
}

async fn first_tokens_are_the_references(cluster: &Cluster, golden: &Value) {
    let mut compared = 0;
    for case in golden["cases"].as_array().expect("cases") {
        let gap = case["ref_f32"]["teacher_forced_top1_top2_gap"][0].as_f64().expect("a gap");
        if gap <= CLEAR_GAP {
            continue;
        }
        let fields = json!({"prompt": case["prompt_ids"], "max_tokens": 1, "return_token_ids": true});
        let reply = cluster.http.post(COMPLETIONS, &completion(cluster, fields)).await.json();
        let expected = &case["ref_f32"]["teacher_forced_argmax"][0];
        assert_eq!(&reply["choices"][0]["token_ids"][0], expected, "{}: {reply}", case["name"]);
        compared += 1;
    }
    assert!(compared > 0, "some case has a clear best token");
}

async fn answers_are_sensible_and_streams_say_the_same(cluster: &Cluster) {
    let whole = cluster.http.post(CHAT, &chat(cluster, json!({"max_tokens": 24}))).await.json();
    let text = whole["choices"][0]["message"]["content"].as_str().expect("text");
    assert!(text.contains("Paris"), "{text}");

    let options = json!({"max_tokens": 24, "stream": true, "stream_options": {"include_usage": true}});
    let chunks = cluster.http.post(CHAT, &chat(cluster, options)).await.chunks();
    let delta =
        |chunk: &Value| chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned();
    assert_eq!(chunks.iter().map(delta).collect::<String>(), text);
    let (of_stream, of_whole) = (&chunks.last().expect("chunks")["usage"], &whole["usage"]);
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(of_stream[count], of_whole[count]);
    }

    let body = completion(cluster, json!({"max_tokens": 8, "stop": [" is", "."]}));
    let stopped = cluster.http.post(COMPLETIONS, &body).await.json();
    let choice = &stopped["choices"][0];
    assert!(choice["text"].as_str().is_some_and(|t| !t.contains('.') && !t.contains(" is")), "{choice}");
}

async fn choices_follow_their_seed(cluster: &Cluster) {
    // api-07.
    let fields = json!({"temperature": 1, "n": 4, "seed": 11, "max_tokens": 8, "logprobs": 0});
    let body = completion(cluster, fields);
    let first = cluster.http.post(COMPLETIONS, &body).await.json();
    for again in futures::future::join_all([(); 8].map(|()| cluster.http.post(COMPLETIONS, &body))).await {
        assert_eq!(first["choices"], again.json()["choices"], "eight at once");
    }
    let choices = first["choices"].as_array().expect("choices");
    assert_eq!(choices.iter().map(|c| c["index"].as_u64()).collect::<Vec<_>>(), [0, 1, 2, 3].map(Some));
    let tokens = |c: &Value| c["logprobs"]["tokens"].as_array().map_or(0, Vec::len) as u64;
    assert_eq!(first["usage"]["completion_tokens"], choices.iter().map(tokens).sum::<u64>());
    let texts: Vec<_> = choices.iter().map(|c| &c["text"]).collect();
    assert!(texts.iter().any(|t| *t != texts[0]), "four choices of one seed differ: {texts:?}");

    let streamed = merged(body, json!({"stream": true}));
    let chunks = cluster.http.post(COMPLETIONS, &streamed).await.chunks();
    for (index, text) in texts.iter().enumerate() {
        let of_index = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == index);
        let streamed: String = of_index.filter_map(|c| c["text"].as_str()).collect();
        assert_eq!(json!(streamed), **text);
    }
}

async fn echoed_logprobs_do_not_depend_on_the_cache(cluster: &Cluster) {
    let prompt: Vec<u64> = (0..10 * 16 + 3).map(|i| 1000 + i * 7).collect();
    let fields = json!({"prompt": prompt, "echo": true, "logprobs": 3, "max_tokens": 1});
    let echo = completion(cluster, fields);
    let plain = completion(cluster, json!({"prompt": prompt, "max_tokens": 1}));
    let mut all = Vec::new();
    for body in [&echo, &echo, &plain, &echo] {
        let reply = cluster.http.post(COMPLETIONS, body).await.json();
        let logprobs = reply["choices"][0]["logprobs"]["token_logprobs"].as_array().cloned();
        all.extend(logprobs);
    }
    assert_eq!(all.len(), 3);
    assert_eq!(all[0].len(), prompt.len() + 1);
    assert!(all[0][0].is_null() && all[0][1..].iter().all(|l| l.as_f64().is_some_and(|l| l <= 0.0)));
    // logprobs-02.
    assert!(all.iter().all(|logprobs| *logprobs == all[0]), "bitwise the same, cached or not");
    let alone = merged(echo, json!({"max_tokens": 0}));
    let reply = cluster.http.post(COMPLETIONS, &alone).await.json();
    let scores = reply["choices"][0]["logprobs"]["token_logprobs"].as_array().expect("an array");
    assert_eq!(scores[..], all[0][..prompt.len()], "with and without an answer");
    assert_eq!(
        (&reply["usage"]["completion_tokens"], &reply["choices"][0]["finish_reason"]),
        (&json!(0), &json!("length"))
    );
}
