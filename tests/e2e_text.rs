//! The text of a real tokenizer, streamed and whole: characters stay whole, stop strings cut where they begin, nothing that was
//! held back is lost, and ends of turns are no text.

use serde_json::{Value, json};
use thalweg_harness::{Cluster, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";

/// What a client has of an answer.
#[derive(Debug, PartialEq)]
struct Told {
    text: String,
    finish: String,
    completion_tokens: u64,
}

#[tokio::test]
async fn streams_and_whole_answers_have_the_same_text() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 1, &["--kv-cache-memory-bytes", "64MiB"]);
    characters_of_several_tokens_stay_whole(&cluster).await;
    stop_strings_cut_where_they_begin(&cluster).await;
    what_is_held_back_is_delivered_at_the_end(&cluster).await;
    every_end_of_turn_ends_the_answer(&cluster).await;
    cached_tokens_are_told_alike(&cluster).await;
    cluster.stop();
}

fn chat(cluster: &Cluster, fields: Value) -> Value {
    let mut body = json!({"model": cluster.model, "temperature": 0, "max_tokens": 200,
                          "messages": [{"role": "user", "content": "Count to four."}]});
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// The answer as a whole, and that a stream brings the same in pieces of whole characters.
async fn ask(cluster: &Cluster, fields: &Value) -> Told {
    let reply = cluster.http.post(CHAT, &chat(cluster, fields.clone())).await.json();
    let choice = &reply["choices"][0];
    let whole = told(choice["message"]["content"].as_str().unwrap_or_default(), choice, &reply["usage"]);

    let mut body = chat(cluster, fields.clone());
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = cluster.http.post(CHAT, &body).await.chunks();
    let (usage, chunks) = chunks.split_last().expect("chunks");
    let deltas: Vec<&str> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert!(deltas.iter().all(|delta| !delta.contains(char::REPLACEMENT_CHARACTER)), "{deltas:?}");
    let last = &chunks.last().expect("a finish")["choices"][0];
    let streamed = told(&deltas.concat(), last, &usage["usage"]);
    assert_eq!(streamed, whole, "{fields}");
    whole
}

fn told(text: &str, choice: &Value, usage: &Value) -> Told {
    Told {
        text: text.to_owned(),
        finish: choice["finish_reason"].as_str().unwrap_or_default().to_owned(),
        completion_tokens: usage["completion_tokens"].as_u64().expect("a count"),
    }
}

/// streaming-04.
async fn characters_of_several_tokens_stay_whole(cluster: &Cluster) {
    let value = "žluť 大阪 🍋👨‍👩‍👦 สวัสดี";
    let schema = json!({"name": "answer", "schema": {"enum": [value]}});
    let fields = json!({"response_format": {"type": "json_schema", "json_schema": schema}});
    let told = ask(cluster, &fields).await;
    assert_eq!(serde_json::from_str::<Value>(&told.text).ok(), Some(json!(value)), "{told:?}");
    assert_eq!(told.finish, "stop");
    let bare = ask(cluster, &json!({"guided_choice": [value]})).await;
    assert_eq!(bare.text, value);
    // Cut anywhere, also within a character.
    for max_tokens in (1..bare.completion_tokens).step_by(5) {
        let cut = ask(cluster, &json!({"guided_choice": [value], "max_tokens": max_tokens})).await;
        assert!(value.starts_with(&cut.text), "{max_tokens}: {cut:?}");
        assert_eq!((cut.finish.as_str(), cut.completion_tokens), ("length", max_tokens));
    }
}

/// stop-01.
async fn stop_strings_cut_where_they_begin(cluster: &Cluster) {
    let forced = "one two three four";
    let check = async |stop: Value, expected: &str| {
        let told = ask(cluster, &json!({"guided_choice": [forced], "stop": stop})).await;
        assert_eq!((told.text.as_str(), told.finish.as_str()), (expected, "stop"), "{stop}: {told:?}");
        told.completion_tokens
    };
    let all = check(json!([]), forced).await;
    assert!(check(json!(["three"]), "one two ").await < all, "tokens behind the stop string do not count");
    check(json!(["o three f"]), "one tw").await;
    check(json!(["e"]), "on").await;
    check(json!(["hre", "two thr"]), "one ").await;
    check(json!(["our", "zzz"]), "one two three f").await;
    check(json!([forced]), "").await;
    let long = "river ".repeat(34);
    let told = ask(cluster, &json!({"guided_choice": [format!("A {long}z")], "stop": [&long[..200]]})).await;
    assert_eq!((told.text.as_str(), told.finish.as_str()), ("A ", "stop"));
}

/// stop-02: of two that overlap the first to be complete wins.
async fn what_is_held_back_is_delivered_at_the_end(cluster: &Cluster) {
    let forced = json!({"guided_choice": ["a big sunfl"], "stop": ["sunflower oil"]});
    let ended = ask(cluster, &forced).await;
    assert_eq!((ended.text.as_str(), ended.finish.as_str()), ("a big sunfl", "stop"));
    for max_tokens in [3, 5, 7] {
        let free = json!({"guided_choice": ["a big sunflower seed, or two"], "max_tokens": max_tokens});
        let mut stopping = free.clone();
        stopping["stop"] = json!(["sunflower oil", "seed, or three"]);
        let (free, stopping) = (ask(cluster, &free).await, ask(cluster, &stopping).await);
        assert_eq!(stopping, free, "{max_tokens} tokens");
        assert_eq!(free.finish, "length");
    }
    let overlapping = ask(cluster, &json!({"guided_choice": ["x abc"], "stop": ["ab", "abc"]})).await;
    assert_eq!((overlapping.text.as_str(), overlapping.finish.as_str()), ("x ", "stop"));
}

/// stop-03: a model of two ends, whose file names one of them alone.
async fn every_end_of_turn_ends_the_answer(cluster: &Cluster) {
    for end in ["0", "2"] {
        let fields = json!({"logit_bias": {end: 100}, "max_tokens": 20});
        let told = ask(cluster, &fields).await;
        assert_eq!((told.text.as_str(), told.finish.as_str()), ("", "stop"), "token {end}: {told:?}");
        let mut ignoring = fields;
        ignoring["ignore_eos"] = json!(true);
        let told = ask(cluster, &ignoring).await;
        assert_eq!((told.finish.as_str(), told.completion_tokens), ("length", 20), "token {end}: {told:?}");
        assert!(!told.text.contains("<|"), "{told:?}");
    }
}

/// prefix-cache-07: in whole blocks, and 0 where nothing was found.
async fn cached_tokens_are_told_alike(cluster: &Cluster) {
    let messages =
        json!([{"role": "user", "content": "Which rivers flow from the Alps to the sea? ".repeat(4)}]);
    let body = |stream: bool| {
        let fields = json!({"messages": messages, "max_tokens": 1, "cache_salt": "cold", "stream": stream});
        let mut body = chat(cluster, fields);
        if stream {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    };
    let mut cached = Vec::new();
    for stream in [false, false, true] {
        let reply = cluster.http.post(CHAT, &body(stream)).await;
        let last = if stream { reply.chunks().pop().expect("a chunk") } else { reply.json() };
        let usage = &last["usage"];
        let tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        let tokens = tokens.unwrap_or_else(|| panic!("{usage}"));
        assert!(tokens % 16 == 0 && Some(tokens) <= usage["prompt_tokens"].as_u64(), "{usage}");
        cached.push(tokens);
    }
    assert!(cached[0] == 0 && cached[1] > 16 && cached[2] == cached[1], "{cached:?}");
}
