//! Answers with a structure, from a real model: valid however they are asked for, and refused where they cannot be had.

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_harness::client::quantile;
use thalweg_harness::{Cluster, Running, models};
use tokio::time::Instant;

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// How long a grammar may be compiled, the router's work and the worker's, on a busy machine.
const REFUSAL_PATIENCE: Duration = Duration::from_secs(10);
/// What a grammar takes to compile on the engine's thread is more; what a machine with other tests on it adds is less.
const GAP_GROWTH_MAX: Duration = Duration::from_millis(250);

#[tokio::test]
async fn answers_have_the_structure_asked_for() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "64MiB"]);
    json_is_as_the_schema_says_streamed_and_not(&cluster).await;
    one_value_leaves_no_choice(&cluster).await;
    every_kind_of_constraint_is_kept(&cluster).await;
    choices_follow_the_grammar_each_on_its_own(&cluster).await;
    the_grammars_end_is_the_answers_end(&cluster).await;
    cluster.stop();
}

#[tokio::test]
async fn what_cannot_be_enforced_is_a_400_before_any_event() {
    // structured-01, structured-02, structured-03.
    let cluster = Cluster::up(BINARY, &models::smollm2(), 1, &["--kv-cache-memory-bytes", "32MiB"]);
    for (fields, param) in refused() {
        let whole = cluster.http.post(CHAT, &chat(&cluster, fields.clone())).await;
        let streamed =
            cluster.http.post(CHAT, &chat(&cluster, merged(fields.clone(), json!({"stream": true})))).await;
        let error = whole.error();
        assert_eq!(
            (whole.status.as_u16(), error["type"].as_str()),
            (400, Some("invalid_request_error")),
            "{fields}: {error}"
        );
        assert_eq!(
            (error["param"].as_str(), streamed.status.as_u16()),
            (Some(param), 400),
            "{fields}: {error}"
        );
        assert_eq!(streamed.error(), error, "{fields}");
    }
    let retries = cluster.metrics().await.sum("thalweg_router_retries_total", "").unwrap_or(0.0);
    assert_eq!(retries, 0.0, "no refusal is tried elsewhere");
    let plain = cluster.http.post(CHAT, &chat(&cluster, json!({"max_tokens": 2}))).await;
    assert_eq!(plain.status.as_u16(), 200, "the worker is healthy");
    cluster.stop();
}

/// structured-04: schemas made to take long neither do nor hold up what runs. Workers are simulated, so that streams have a rate
/// of their own and not the cores' that compilers leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn schemas_that_explode_are_refused_in_time_while_streams_go_on() {
    let cluster = Cluster::simulated(BINARY, &models::smollm2(), 1, "step: {base_seconds: 0.05}");
    let steady = json!({"stream": true, "ignore_eos": true, "max_tokens": 260, "temperature": 0});
    let body = chat(&cluster, steady);
    let background = [(); 4].map(|()| Running::start(&cluster.http, CHAT, body.clone()));
    cluster
        .eventually("a rate to compare with", async || background.iter().all(|stream| stream.tokens() > 50))
        .await;
    let attacked = Instant::now();
    let attacks = attacks().into_iter().map(async |fields| {
        let begun = Instant::now();
        let reply = cluster.http.post(CHAT, &chat(&cluster, merged(fields, json!({"max_tokens": 1})))).await;
        (reply, begun.elapsed())
    });
    for (reply, took) in futures::future::join_all(attacks).await {
        let status = reply.status.as_u16();
        assert!([200, 400, 429].contains(&status), "{status}: {}", reply.text);
        assert!(took < REFUSAL_PATIENCE, "{status} after {took:?}: {}", reply.text);
    }
    let repelled = Instant::now();
    let streams = Running::outcomes(background).await;
    for stream in &streams {
        assert_eq!((stream.failure(), stream.choices[0].finish_reason.as_str()), (None, "length"));
    }
    let before = quantile(streams.iter().flat_map(|stream| stream.gaps(..attacked)), 0.99);
    let meanwhile: Vec<_> = streams.iter().flat_map(|stream| stream.gaps(attacked..repelled)).collect();
    let (count, p99) = (meanwhile.len(), quantile(meanwhile, 0.99));
    eprintln!("p99 between tokens: {before:?} before, {p99:?} over {count} meanwhile");
    assert!(count >= 100, "the attack was over after {count} tokens");
    assert!(p99 < before + GAP_GROWTH_MAX, "p99 between tokens rose from {before:?} to {p99:?}");
    cluster.stop();
}

fn chat(cluster: &Cluster, fields: Value) -> Value {
    let question =
        "Describe the river Rhine: its name, its length in km and two of its cities. Answer in JSON.";
    let body = json!({"model": cluster.model, "temperature": 0, "messages": [{"role": "user", "content": question}]});
    merged(body, fields)
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn json_schema(schema: Value) -> Value {
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": true}});
    json!({ "response_format": format })
}

/// Bounded, so that the smallest of models comes to its end.
fn river() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "length_km": {"type": "integer", "minimum": 1, "maximum": 9999},
            "cities": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 2},
        },
        "required": ["name", "length_km", "cities"],
        "additionalProperties": false,
    })
}

fn is_river(text: &str) -> bool {
    let Ok(Value::Object(river)) = serde_json::from_str(text) else { return false };
    let short = |value: &Value| value.as_str().is_some_and(|text| text.chars().count() <= 12);
    river.len() == 3
        && short(&river["name"])
        && river["length_km"].as_u64().is_some_and(|km| (1..=9999).contains(&km))
        && river["cities"].as_array().is_some_and(|cities| cities.len() == 2 && cities.iter().all(short))
}

async fn json_is_as_the_schema_says_streamed_and_not(cluster: &Cluster) {
    let fields = merged(json_schema(river()), json!({"max_tokens": 400}));
    let whole = cluster.http.post(CHAT, &chat(cluster, fields.clone())).await.json();
    let choice = &whole["choices"][0];
    let text = choice["message"]["content"].as_str().expect("text");
    assert!(is_river(text), "{text}");
    assert_eq!(choice["finish_reason"], "stop");
    let streamed = merged(fields, json!({"stream": true}));
    let chunks = cluster.http.post(CHAT, &chat(cluster, streamed)).await.chunks();
    let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(pieces.collect::<String>(), text);
}

async fn one_value_leaves_no_choice(cluster: &Cluster) {
    let fields =
        merged(json_schema(json!({"enum": ["Thalweg"]})), json!({"logprobs": true, "temperature": 1.5}));
    let reply = cluster.http.post(CHAT, &chat(cluster, fields)).await.json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], "\"Thalweg\"");
    // Logprobs are the model's own: it would not have said this by itself.
    let logprobs = choice["logprobs"]["content"].as_array().expect("logprobs");
    assert_eq!(logprobs.len() as u64, reply["usage"]["completion_tokens"].as_u64().expect("a count"));
    assert!(logprobs.iter().any(|token| token["logprob"].as_f64().is_some_and(|l| l < -1.0)), "{choice}");
}

async fn every_kind_of_constraint_is_kept(cluster: &Cluster) {
    let digits = |text: &str| text.len() == 4 && text.bytes().all(|b| b.is_ascii_digit());
    let colour = |text: &str| ["red", "green", "dark blue"].contains(&text);
    let is_object = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
    let sum =
        |text: &str| text.split('+').count() == 3 && text.bytes().all(|b| b == b'+' || b.is_ascii_digit());
    let lark = "start: NUMBER \"+\" NUMBER \"+\" NUMBER\nNUMBER: /[0-9]{1,3}/";
    let choices = json!(["red", "green", "dark blue"]);
    // A schema of small objects, since the model may take long to end one of its own accord.
    let any =
        json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": false});
    type IsRight<'a> = &'a dyn Fn(&str) -> bool;
    let cases: [(Value, IsRight<'_>); 8] = [
        (json!({"guided_regex": "[0-9]{4}"}), &digits),
        (json!({"guided_choice": choices}), &colour),
        (json!({"guided_grammar": lark}), &sum),
        (json!({"guided_json": any}), &is_object),
        (json!({"structured_outputs": {"regex": "[0-9]{4}"}}), &digits),
        (json!({"structured_outputs": {"choice": choices}}), &colour),
        (json!({"structured_outputs": {"grammar": lark}}), &sum),
        (json!({"structured_outputs": {"json": any}}), &is_object),
    ];
    for (fields, is_right) in cases {
        for temperature in [0.0, 1.0] {
            let more = json!({"max_tokens": 100, "temperature": temperature, "seed": 3});
            let reply =
                cluster.http.post(CHAT, &chat(cluster, merged(fields.clone(), more.clone()))).await.json();
            let text = reply["choices"][0]["message"]["content"].as_str().unwrap_or_default();
            assert!(is_right(text), "{fields}: {text:?}");
            let body = merged(
                json!({"model": cluster.model, "prompt": "The answer is"}),
                merged(fields.clone(), more),
            );
            let reply = cluster.http.post(COMPLETIONS, &body).await.json();
            let text = reply["choices"][0]["text"].as_str().unwrap_or_default();
            assert!(is_right(text), "{fields}: {text:?}");
        }
    }
    let any = json!({"response_format": {"type": "json_object"}, "max_tokens": 300});
    let reply = cluster.http.post(CHAT, &chat(cluster, any)).await.json();
    let choice = &reply["choices"][0];
    let text = choice["message"]["content"].as_str().unwrap_or_default();
    assert!(text.trim_start().starts_with('{'), "{text}");
    assert!(choice["finish_reason"] == "length" || is_object(text), "{text}");
}

async fn choices_follow_the_grammar_each_on_its_own(cluster: &Cluster) {
    let fields = json!({"guided_regex": "[a-z]{3}(-[a-z]{3}){2,5}", "n": 4, "temperature": 1, "seed": 5, "max_tokens": 60});
    let reply = cluster.http.post(CHAT, &chat(cluster, fields)).await.json();
    let choices = reply["choices"].as_array().expect("choices");
    let texts: Vec<&str> = choices.iter().filter_map(|c| c["message"]["content"].as_str()).collect();
    assert_eq!(texts.len(), 4);
    for text in &texts {
        let words: Vec<&str> = text.split('-').collect();
        assert!((3..=6).contains(&words.len()) && words.iter().all(|word| word.len() == 3), "{text}");
    }
    assert!(texts.iter().any(|text| *text != texts[0]), "{texts:?}");
}

/// Neither ignore_eos nor min_tokens can add to what is complete; max_tokens cuts what is not.
async fn the_grammars_end_is_the_answers_end(cluster: &Cluster) {
    let check = async |fields: Value, text: &str, reason: &str| {
        let reply = cluster.http.post(CHAT, &chat(cluster, fields.clone())).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["message"]["content"], text, "{fields}: {reply}");
        assert_eq!(choice["finish_reason"], reason, "{fields}");
    };
    let only = json!({"guided_choice": ["done"]});
    check(merged(only.clone(), json!({"ignore_eos": true, "max_tokens": 50})), "done", "stop").await;
    check(merged(only.clone(), json!({"min_tokens": 20, "max_tokens": 50})), "done", "stop").await;
    check(merged(only, json!({"stop": ["one"], "max_tokens": 50})), "d", "stop").await;
    check(json!({"guided_regex": "aaaaaaaaa*", "max_tokens": 1, "logit_bias": {"81": 100}}), "a", "length")
        .await;
}

/// What must be refused, and the field that is named.
fn refused() -> Vec<(Value, &'static str)> {
    let schema = "response_format.json_schema.schema";
    let of_schema = |value: Value| (json_schema(value), schema);
    let format = |value: Value, param| (json!({ "response_format": value }), param);
    vec![
        of_schema(json!({"type": "string", "pattern": "("})),
        of_schema(json!({"type": "string", "pattern": "(?=a)b"})),
        of_schema(json!({"if": {"type": "string"}, "then": {"minLength": 1}})),
        of_schema(json!({"$ref": "#/$defs/missing"})),
        of_schema(json!({"$ref": "#"})),
        of_schema(json!({"type": "wobble"})),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 7}}}),
            schema,
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}}),
            schema,
        ),
        (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}), schema),
        format(json!({"type": "melody"}), "response_format.type"),
        format(
            json!({"type": "json_schema", "json_schema": {"schema": {}}}),
            "response_format.json_schema.name",
        ),
        format(
            json!({"type": "json_schema", "json_schema": {"name": "with spaces", "schema": {}}}),
            "response_format.json_schema.name",
        ),
        format(
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": "yes"}}),
            "response_format.json_schema.strict",
        ),
        (json!({"guided_regex": "(?!a)b"}), "guided_regex"),
        (json!({"guided_grammar": "start: nothing"}), "guided_grammar"),
        (json!({"guided_json": {}, "guided_whitespace_pattern": " *"}), "guided_whitespace_pattern"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
    ]
}

fn attacks() -> Vec<Value> {
    let nested = [6, 8, 10, 14].into_iter().map(|depth| json_schema(nested_one_of(depth)));
    let names: Vec<String> = (0..50_000).map(|at| format!("value-{at}")).collect();
    let others = [json_schema(json!({ "enum": names })), json!({"guided_regex": "(a|aa){1,60}b"})];
    let different = (0..30).map(|at| {
        json_schema(json!({"type": "object", "properties": {format!("field-{at}"): {"type": "string"}}, "required": [format!("field-{at}")]}))
    });
    nested.chain(others).chain(different).collect()
}

fn nested_one_of(depth: usize) -> Value {
    let inner = if depth == 0 { json!({"type": "string"}) } else { nested_one_of(depth - 1) };
    let option = |at: usize| json!({"type": "object", "properties": {"kind": {"const": at}, "value": inner}, "required": ["kind", "value"]});
    json!({"oneOf": [option(0), option(1)]})
}
