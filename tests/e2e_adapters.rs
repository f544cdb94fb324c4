//! LoRA adapters named in `model`, behind a router: who answers, what, and what clients are told.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use thalweg_harness::client::assert_no_failures;
use thalweg_harness::fleet::eventually;
use thalweg_harness::{Cluster, Fleet, FleetPlan, HttpClient, Outcome, Proxy, Reply, Running, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
/// As in the reference, so that its tokens can be expected.
const EXACT: [&str; 4] = ["--dtype", "float32", "--kv-cache-dtype", "float32"];
/// Where the best token leads by no more, rounding may decide.
const CLEAR_GAP: f64 = 1e-3;
/// A second's bytes of a stream of 440 tokens that takes seconds.
const TRICKLE_BYTES: u64 = 4_000;
/// SHA-256 of `hello` and of `world`, by sha256sum.
const KEYS: &str = "
keys:
  - {name: one, sha256: 2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824, tenant: first}
  - {name: two, sha256: 486ea46224d1bb4fb680f34f7c9ad96a8f24ec88be73ea8e5a6c65260e9cb8a7, tenant: second,
     output-tokens-max: 5}
";

/// `NAME=FOLDER` of adapters of the tiny Llama, with commas between them.
fn modules(names: &[(&str, &str)]) -> String {
    let folder = models::tiny("llama3").join("adapters");
    let module = |(name, of): &(&str, &str)| format!("{name}={}", folder.join(of).display());
    names.iter().map(module).collect::<Vec<_>>().join(",")
}

/// Workers of the tiny Llama; each entry has the adapters of one worker.
fn plan(of_workers: &[&[(&str, &str)]]) -> FleetPlan {
    let plan = FleetPlan::model(BINARY, models::tiny("llama3"));
    let plan = plan.workers(of_workers.len()).worker_args(&EXACT);
    let with = |plan: FleetPlan, (number, names): (usize, &&[(&str, &str)])| match names.is_empty() {
        true => plan,
        false => plan.of_worker(number, "--enable-lora", &format!("--lora-modules={}", modules(names))),
    };
    of_workers.iter().enumerate().fold(plan, with)
}

fn up(workers: usize, more: &[&str]) -> Cluster {
    let modules = modules(&[("all", "all"), ("few", "few")]);
    let mut args = vec!["--enable-lora", "--lora-modules", &modules, "--kv-cache-memory-bytes", "64MiB"];
    args.extend(EXACT);
    args.extend(more);
    Cluster::up(BINARY, &models::tiny("llama3"), workers, &args)
}

/// A file of this test's own, not there yet.
fn scratch(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("adapters-{}-{name}", std::process::id()))
}

/// A greedy completion whose ids are shown.
fn asked(model: &str, prompt: impl Into<Value>, max_tokens: usize) -> Value {
    json!({
        "model": model, "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

fn merged(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// What the numpy decoder answers with this adapter merged into the weights; of the model itself if it is empty.
fn reference(adapter: &str) -> Value {
    let folder = models::tiny("llama3");
    let folder = if adapter.is_empty() { folder } else { folder.join("adapters").join(adapter) };
    let text = std::fs::read_to_string(folder.join("reference.json")).expect("reference.json");
    serde_json::from_str(&text).expect("JSON")
}

/// The reference's continuations and those of the server agree up to the first near tie; how many tokens were compared.
async fn agrees_with_reference(http: &HttpClient, model: &str, adapter: &str) -> usize {
    let mut compared = 0;
    for case in reference(adapter)["prompts"].as_array().expect("prompts") {
        let Some(greedy) = case["greedy"].as_array() else { continue };
        let reply = http.post(COMPLETIONS, &asked(model, case["ids"].clone(), greedy.len())).await.json();
        assert_eq!(reply["model"], model, "{reply}");
        let gaps = case["greedy_gaps"].as_array().expect("gaps").iter();
        let clear = gaps.take_while(|gap| gap.as_f64().is_some_and(|gap| gap > CLEAR_GAP)).count();
        let ids = reply["choices"][0]["token_ids"].as_array().expect("ids");
        assert_eq!(ids[..clear], greedy[..clear], "{model}, {} tokens", case["ids"]);
        compared += clear;
    }
    compared
}

fn cached(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count")
}

fn refusal(reply: &Reply) -> (u16, String, String) {
    let error = reply.error();
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
    (reply.status.as_u16(), text("code"), text("message"))
}

#[tokio::test]
async fn one_command_serves_adapters_as_models() {
    let cluster = up(1, &[]);
    let http = &cluster.http;
    adapters_are_listed_with_their_model(http).await;
    for (model, adapter) in [("llama3", ""), ("all", "all"), ("few", "few")] {
        let compared = agrees_with_reference(http, model, adapter).await;
        assert!(compared >= 30, "{model}: only {compared} tokens have a clear best");
    }
    prefixes_are_those_of_one_adapter(http).await;
    every_shape_of_reply_bears_the_adapters_name(http).await;
    chats_and_tokens_are_those_of_the_model(http).await;
    unknown_names_are_told_what_there_is(http).await;
    let metrics = cluster.metrics().await;
    for model in ["all", "few", "llama3"] {
        let tokens = metrics.count("thalweg_router_completion_tokens_total", &format!("model=\"{model}\""));
        assert!(tokens > 0.0, "{model}");
    }
    assert_eq!(
        metrics.sum("thalweg_router_http_requests_total", "model=\"no"),
        None,
        "names that exist alone"
    );
    cluster.stop();
}

async fn adapters_are_listed_with_their_model(http: &HttpClient) {
    let list = http.get("/v1/models").await.json();
    let card = |card: &Value| {
        assert!(card["object"] == "model" && card["max_model_len"] == 512, "{card}");
        [card["id"].clone(), card["root"].clone(), card["parent"].clone()]
    };
    let cards: Vec<_> = list["data"].as_array().expect("cards").iter().map(card).collect();
    let adapter = |name: &str| [json!(name), json!(name), json!("llama3")];
    assert_eq!(cards, [[json!("llama3"), json!("llama3"), Value::Null], adapter("all"), adapter("few")]);
    assert_eq!(card(&http.get("/v1/models/few").await.json()), adapter("few"));
}

async fn prefixes_are_those_of_one_adapter(http: &HttpClient) {
    let prompt: Vec<u32> = (0..100).map(|at| at * 7 % 256).collect();
    let mut answers = Vec::new();
    // Every other name finds the blocks of the one before in the worker's cache.
    for model in ["llama3", "all", "few"] {
        let first = http.post(COMPLETIONS, &asked(model, prompt.clone(), 16)).await.json();
        assert_eq!(cached(&first), 0, "{model}");
        answers.push(first["choices"][0]["token_ids"].clone());
    }
    for (model, answer) in ["llama3", "all", "few"].into_iter().zip(&answers) {
        let again = http.post(COMPLETIONS, &asked(model, prompt.clone(), 16)).await.json();
        assert_eq!((cached(&again), &again["choices"][0]["token_ids"]), (96, answer), "{model}");
    }
    assert!(answers[0] != answers[1] && answers[0] != answers[2] && answers[1] != answers[2], "{answers:?}");
}

async fn every_shape_of_reply_bears_the_adapters_name(http: &HttpClient) {
    let several = merged(asked("all", "A river", 8), json!({"n": 3, "temperature": 1, "seed": 5}));
    let whole = http.post(COMPLETIONS, &several).await.json();
    let texts: Vec<_> = whole["choices"].as_array().expect("choices").iter().map(|c| &c["text"]).collect();
    assert_eq!((whole["model"].as_str(), texts.len()), (Some("all"), 3));
    let chunks = http.post(COMPLETIONS, &merged(several, json!({"stream": true}))).await.chunks();
    assert!(chunks.iter().all(|chunk| chunk["model"] == "all"));
    for (index, text) in texts.iter().enumerate() {
        let of_index = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|c| c["index"] == index);
        assert_eq!(**text, of_index.filter_map(|c| c["text"].as_str()).collect::<String>());
    }
}

/// Template and tokenizer are those of the model; the answer is not.
async fn chats_and_tokens_are_those_of_the_model(http: &HttpClient) {
    let messages = json!([{"role": "user", "content": "Where does a river bend?"}]);
    let mut prompts = Vec::new();
    let mut answers = Vec::new();
    for model in ["llama3", "all"] {
        let tokens = http.post("/tokenize", &json!({"model": model, "messages": messages})).await.json();
        let text =
            http.post("/detokenize", &json!({"model": model, "tokens": tokens["tokens"]})).await.json();
        prompts.push((tokens, text));
        let chat = json!({"model": model, "messages": messages, "max_tokens": 12, "temperature": 0,
                          "return_token_ids": true, "ignore_eos": true});
        let whole = http.post(CHAT, &chat).await.json();
        assert_eq!(
            (whole["model"].as_str(), whole["object"].as_str()),
            (Some(model), Some("chat.completion"))
        );
        let streamed = http.post(CHAT, &merged(chat, json!({"stream": true}))).await.chunks();
        assert!(streamed.iter().all(|chunk| chunk["model"] == model));
        answers.push(whole["choices"][0]["token_ids"].clone());
    }
    assert_eq!(prompts[0], prompts[1]);
    assert_ne!(answers[0], answers[1]);
    // Without a name the model is meant, though the adapters' names come before its own.
    let tokens = http.post("/tokenize", &json!({"messages": messages})).await.json();
    assert_eq!(tokens, prompts[0].0);
}

async fn unknown_names_are_told_what_there_is(http: &HttpClient) {
    let (status, code, message) = refusal(&http.post(COMPLETIONS, &asked("none", "x", 1)).await);
    assert_eq!((status, code.as_str()), (404, "model_not_found"));
    assert!(message.contains("`none` does not exist") && message.contains("llama3, all, few"), "{message}");
    assert_eq!(http.get("/v1/models/none").await.status.as_u16(), 404);
}

#[tokio::test]
async fn keys_and_records_know_adapters() {
    let (keys, log) = (scratch("keys.yaml"), scratch("usage"));
    std::fs::write(&keys, KEYS).expect("written");
    let [keys, log] = [&keys, &log].map(|path| path.to_str().expect("UTF-8"));
    let cluster = up(1, &["--api-keys-file", keys, "--metrics-public", "--usage-log", log]);
    let ask = async |key: &str, max_tokens| {
        let body = asked("all", "a prompt that is longer than a block is", max_tokens).to_string();
        let key = format!("Bearer {key}");
        let headers = [("content-type", "application/json"), ("authorization", key.as_str())];
        cluster.http.post_with(COMPLETIONS, &headers, body).await
    };
    assert_eq!(ask("nobody", 3).await.status.as_u16(), 401);
    assert_eq!(cached(&ask("hello", 8).await.json()), 0);
    assert_eq!(cached(&ask("hello", 8).await.json()), 32);
    assert_eq!(cached(&ask("world", 5).await.json()), 0, "another tenant's blocks");
    let refused = refusal(&ask("world", 8).await);
    assert_eq!((refused.0, refused.1.as_str()), (400, "invalid_request"), "{}", refused.2);
    cluster.stop();
    let text = std::fs::read_to_string(log).expect("records");
    let record = |line: &str| serde_json::from_str::<Value>(line).expect("JSON");
    let records: Vec<_> = text.lines().map(record).collect();
    let told = |record: &Value| {
        let field = |name: &str| record[name].as_str().unwrap_or_default().to_owned();
        (field("tenant"), field("model"), field("outcome"))
    };
    let expected = [
        ("first", "all", "ok"),
        ("first", "all", "ok"),
        ("second", "all", "ok"),
        ("second", "", "invalid_request"),
    ];
    let expected = expected.map(|(tenant, model, end)| (tenant.to_owned(), model.to_owned(), end.to_owned()));
    assert_eq!(records.iter().map(told).collect::<Vec<_>>(), expected);
    [keys, log].into_iter().for_each(|path| std::fs::remove_file(path).expect("removed"));
}

/// Adapters are on the first and the last of three workers. The first is killed under streams, then the last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_go_on_where_the_adapter_is() {
    let mut fleet = plan(&[&[("all", "all")], &[], &[("all", "all")]]).proxies().start().await;
    let body = |number: usize| merged(asked("all", format!("{number} rivers"), 440), streamed());
    let bodies: Vec<_> = (0..6).map(body).collect();
    let ask = |fleet: &Fleet| bodies.iter().map(|body| fleet.ask(body.clone())).collect::<Vec<_>>();
    let undisturbed = Running::outcomes(ask(&fleet)).await;
    assert_no_failures("undisturbed", &undisturbed);
    assert!(undisturbed.iter().all(|one| ["w0", "w2"].contains(&one.header("x-thalweg-worker"))));
    let base = fleet.ask(merged(bodies[0].clone(), json!({"model": "llama3"}))).outcome().await;
    assert_ne!(base.choices, undisturbed[0].choices);

    // However fast it is, its tokens come so slowly that it dies in their midst.
    let proxy = |fleet: &Fleet, to: fn(&Proxy)| to(fleet.workers[0].proxy.as_ref().expect("a proxy"));
    proxy(&fleet, |proxy| proxy.throttle(TRICKLE_BYTES));
    let running = ask(&fleet);
    eventually("tokens on every stream", async || running.iter().all(|one| one.tokens() > 5)).await;
    fleet.kill_worker(0);
    // With what is on its way, as when its host is lost.
    proxy(&fleet, Proxy::cut);
    let disturbed = Running::outcomes(running).await;
    assert_no_failures("a worker with the adapter was killed", &disturbed);
    let answers = |outcomes: &[Outcome]| outcomes.iter().map(|one| one.choices.clone()).collect::<Vec<_>>();
    assert_eq!(answers(&disturbed), answers(&undisturbed));
    assert!(fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "") >= 1.0);

    fleet.kill_worker(2);
    fleet.ready(1).await;
    let gone = async || fleet.worker_state(0, 0).await == "gone" && fleet.worker_state(0, 2).await == "gone";
    eventually("both given up", gone).await;
    let refused = refusal(&fleet.http().post(COMPLETIONS, &asked("all", "x", 1)).await);
    assert_eq!((refused.0, refused.1.as_str()), (503, "unavailable"));
    assert!(refused.2.contains("adapter all of llama3: 2 lost"), "{}", refused.2);
    let unknown = refusal(&fleet.http().post(COMPLETIONS, &asked("al", "x", 1)).await);
    assert_eq!((unknown.0, unknown.1.as_str()), (404, "model_not_found"));
    let model = fleet.http().post(COMPLETIONS, &asked("llama3", "x", 1)).await;
    assert_eq!((model.status.as_u16(), model.header("x-thalweg-worker")), (200, Some("w1")));

    fleet.restart_worker(2);
    fleet.ready(2).await;
    let back = fleet.ask(bodies[0].clone()).outcome().await;
    assert_eq!(back.choices, undisturbed[0].choices);
    fleet.finish().await;
}

fn streamed() -> Value {
    json!({"stream": true, "stream_options": {"include_usage": true}})
}

/// One worker has an adapter of a name, another one a different adapter; a third calls its model so.
#[tokio::test]
async fn a_name_means_one_thing_and_the_others_are_told_of() {
    let mut fleet =
        plan(&[&[("x", "all")], &[("x", "few")], &[]]).of_worker(2, "--served-model-name", "x").start().await;
    let (http, mut workers) = (fleet.http().clone(), Vec::new());
    for number in 0..6 {
        let reply = http.post(COMPLETIONS, &asked("x", format!("{number} stones"), 2)).await;
        workers.push(reply.header("x-thalweg-worker").expect("a worker").to_owned());
    }
    workers.dedup();
    let [worker] = workers.try_into().expect("one worker alone");
    let (first, parent) = match worker.as_str() {
        "w0" => ("all", json!("llama3")),
        "w1" => ("few", json!("llama3")),
        _ => ("", Value::Null),
    };
    assert!(agrees_with_reference(&http, "x", first).await >= 30);
    assert_eq!(http.get("/v1/models/x").await.json()["parent"], parent);
    let warned = |event: &&Value| event["level"] == "WARN";
    let log = fleet.routers[0].process().log();
    let mut named: Vec<_> = log.iter().filter(warned).map(|event| event["worker"].clone()).collect();
    named.sort_by_key(Value::to_string);
    let others = ["w0", "w1", "w2"].into_iter().filter(|name| *name != worker);
    assert_eq!(named, others.map(Value::from).collect::<Vec<_>>(), "{log:?}");
    assert!(
        log.iter().filter(warned).all(|event| event["adapter"] == "x" || event["model"] == "x"),
        "{log:?}"
    );
    fleet.finish().await;
}

/// A worker that comes back without its adapter: the name is known, but nobody has it.
#[tokio::test]
async fn an_adapter_that_is_gone_is_told_from_an_unknown_one() {
    // Flags of a fleet do not change, files do.
    let settings = scratch("settings.yaml");
    let write = |text: String| std::fs::write(&settings, text).expect("written");
    write(format!("enable-lora: true\nlora-modules: [{}]\n", modules(&[("all", "all")])));
    let config = settings.to_str().expect("UTF-8");
    let mut fleet = plan(&[&[]]).worker_args(&["--config", config]).start().await;
    assert_eq!(fleet.http().post(COMPLETIONS, &asked("all", "x", 1)).await.status.as_u16(), 200);
    fleet.kill_worker(0);
    write(String::new());
    fleet.restart_worker(0);
    let answers = async || {
        fleet.http().post(COMPLETIONS, &asked("llama3", "x", 1)).await.status.as_u16() == 200
            && refusal(&fleet.http().post(COMPLETIONS, &asked("all", "x", 1)).await).2.contains("any more")
    };
    eventually("the new life is known", answers).await;
    let (status, code, message) = refusal(&fleet.http().post(COMPLETIONS, &asked("all", "x", 1)).await);
    assert_eq!((status, code.as_str()), (503, "unavailable"));
    assert!(message.contains("--lora-modules all=FOLDER"), "{message}");
    fleet.finish().await;
}
