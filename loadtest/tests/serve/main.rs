//! Whole tests against a server that follows a script.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod server;

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_loadtest::plan::{Arrivals, Endpoint, Plan, Slo, Synthetic, Workload};
use thalweg_loadtest::{LoadError, Report, run};

use crate::server::{Reply, Server};

fn plan(url: &str, conversations: usize) -> Plan {
    Plan {
        url: url.parse().unwrap(),
        model: Some("tiny".into()),
        api_key: Some("secret".parse().unwrap()),
        endpoint: Endpoint::Chat,
        arrivals: Arrivals::Closed { concurrency: 3 },
        workload: Workload::Synthetic(Synthetic { words: 5, shared_words: 10, groups: 1, turns: 1 }),
        conversations,
        max_tokens: 4,
        ignore_eos: true,
        temperature: 0.0,
        slo: Slo::default(),
        timeout: Duration::from_secs(20),
        seed: 7,
        progress: false,
    }
}

fn chat(text: &str) -> String {
    format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
}

fn end(prompt_tokens: u64, cached_tokens: u64) -> String {
    let usage = json!({"prompt_tokens": prompt_tokens, "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": cached_tokens}});
    format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage}))
}

fn whole(worker: &str) -> Reply {
    Reply::stream(worker, &[chat("a"), chat("b"), end(20, 5)])
}

#[tokio::test]
async fn a_closed_loop_counts_tokens_workers_and_turns() {
    let server = Server::start(|number, _| whole(["w0", "w1"][number % 2])).await;
    let mut plan = plan(&server.url, 6);
    plan.workload = Workload::Synthetic(Synthetic { words: 5, shared_words: 10, groups: 1, turns: 2 });
    let report = run(plan).await.unwrap();
    assert_eq!((report.completed, report.failed), (12, 0));
    assert_eq!((report.prompt_tokens, report.cached_tokens, report.output_tokens), (240, 60, 24));
    assert_eq!((report.workers["w0"].requests, report.workers["w1"].share), (6, 0.5));
    assert!(server.most_at_once() <= 3);
    let (ttft, e2e) = (report.ttft_ms.unwrap(), report.e2e_ms.unwrap());
    assert!(
        ttft.p50 <= ttft.p99 && ttft.p99 <= e2e.max && report.itl_ms.is_some() && report.tpot_ms.is_some()
    );

    let bodies = server.bodies();
    let roles = |body: &Value| -> Vec<String> {
        body["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| message["role"].as_str().unwrap().into())
            .collect()
    };
    let second: Vec<&Value> = bodies.iter().filter(|body| roles(body).len() == 4).collect();
    assert_eq!(second.len(), 6);
    assert!(second.iter().all(|body| roles(body) == ["system", "user", "assistant", "user"]));
    assert!(second.iter().all(|body| body["messages"][2]["content"] == "ab"));
    assert!(bodies.iter().all(|body| body["messages"][0] == bodies[0]["messages"][0]), "one shared prefix");
    let first = &bodies[0];
    assert_eq!(
        (&first["model"], &first["max_tokens"], &first["stream"]),
        (&json!("tiny"), &json!(4), &json!(true))
    );
    assert_eq!(
        (&first["ignore_eos"], &first["stream_options"]),
        (&json!(true), &json!({"include_usage": true}))
    );
    assert!(server.heads().iter().all(|head| head.contains("authorization: Bearer secret")));
}

#[tokio::test]
async fn failures_are_counted_by_reason() {
    let server = Server::start(|number, _| match number {
        0 | 1 => Reply::status(429),
        2 => Reply::status(503),
        3 => Reply::stream("w0", &[chat("a")]).cut(),
        4 => Reply::stream(
            "w0",
            &[chat("a"), "data: {\"error\":{\"message\":\"m\",\"code\":\"lost\"}}\n\n".into()],
        ),
        5 => Reply::stream("w0", &[chat("a")]),
        _ => whole("w1"),
    })
    .await;
    let report = run(plan(&server.url, 10)).await.unwrap();
    assert_eq!((report.completed, report.failed), (4, 6));
    let expected = json!({"http 429": 2, "http 503": 1, "stream cut": 2, "error event lost": 1});
    assert_eq!(serde_json::to_value(&report.errors).unwrap(), expected);
    assert_eq!((report.workers["w0"].requests, report.workers["w1"].requests), (3, 4));
    assert_eq!(report.output_tokens, 8);
    let table = report.to_string();
    assert!(table.contains("4 completed, 6 failed") && table.contains("2 x http 429"), "{table}");
}

#[tokio::test]
async fn a_failed_turn_ends_its_conversation() {
    let server = Server::start(|number, _| if number == 1 { Reply::status(500) } else { whole("w0") }).await;
    let mut plan = plan(&server.url, 2);
    plan.arrivals = Arrivals::Closed { concurrency: 1 };
    plan.workload = Workload::Synthetic(Synthetic { words: 1, shared_words: 0, groups: 1, turns: 3 });
    let report = run(plan).await.unwrap();
    assert_eq!((report.completed, report.failed), (4, 1));
}

#[tokio::test]
async fn an_open_loop_does_not_wait_for_answers() {
    // No reply before all requests are there: a closed loop would never end.
    let server = Server::start_held(12, |_, _| whole("w0")).await;
    let mut plan = plan(&server.url, 12);
    plan.arrivals = Arrivals::Poisson { per_second: 400.0 };
    let report = run(plan).await.unwrap();
    assert_eq!((report.completed, server.most_at_once()), (12, 12));
}

#[tokio::test]
async fn answers_outside_the_limits_are_no_goodput() {
    let share = async |ttft_ms: f64| {
        let server = Server::start(|_, _| whole("w0")).await;
        let mut plan = plan(&server.url, 4);
        plan.slo = Slo { ttft_ms: Some(ttft_ms), tpot_ms: None };
        run(plan).await.unwrap().goodput.share
    };
    assert_eq!(share(60_000.0).await, 1.0);
    assert_eq!(share(0.0).await, 0.0);
}

#[tokio::test]
async fn completions_send_text_and_a_dataset_is_used_up_and_begun_again() {
    let server = Server::start(|_, _| {
        Reply::stream(
            "w0",
            &["data: {\"choices\":[{\"text\":\"x\"}]}\r\n\r\n".into(), "data: [DONE]\r\n\r\n".into()],
        )
    })
    .await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("prompts.jsonl");
    std::fs::write(&file, "{\"prompt\": \"one\"}\n{\"prompt\": \"two\"}\n").unwrap();
    let mut plan = plan(&server.url, 4);
    plan.endpoint = Endpoint::Completions;
    plan.workload = Workload::Dataset(file);
    let report = run(plan).await.unwrap();
    assert_eq!((report.completed, report.output_tokens), (4, 4));
    let mut prompts: Vec<Value> = server.bodies().iter().map(|body| body["prompt"].clone()).collect();
    prompts.sort_by_key(Value::to_string);
    assert_eq!(prompts, ["one", "one", "two", "two"]);
    assert!(server.heads().iter().all(|head| head.starts_with("POST /v1/completions ")));
}

#[tokio::test]
async fn the_first_model_is_taken_where_none_is_named() {
    let server = Server::start(|_, head| {
        if head.starts_with("GET /v1/models ") {
            Reply::json(&json!({"data": [{"id": "m1"}, {"id": "m2"}]}))
        } else {
            whole("w0")
        }
    })
    .await;
    let mut plan = plan(&server.url, 1);
    plan.model = None;
    let report: Report = run(plan).await.unwrap();
    assert_eq!((report.model.as_str(), &server.bodies()[0]["model"]), ("m1", &json!("m1")));
}

#[tokio::test]
async fn a_plan_that_cannot_begin_says_why() {
    let check = async |change: fn(&mut Plan), expected: &str| {
        let mut plan = plan("http://127.0.0.1:1", 1);
        change(&mut plan);
        let error: LoadError = run(plan).await.expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    };
    check(|plan| plan.model = None, "is the server up?").await;
    check(|plan| plan.conversations = 0, "conversations").await;
    check(|plan| plan.arrivals = Arrivals::Poisson { per_second: f64::NAN }, "request rate").await;
    check(|plan| plan.arrivals = Arrivals::Closed { concurrency: 0 }, "concurrency").await;
    check(|plan| plan.workload = Workload::Dataset("/nowhere/x.jsonl".into()), "/nowhere/x.jsonl").await;
}

#[tokio::test]
async fn a_server_that_is_gone_fails_every_request() {
    let report = run(plan("http://127.0.0.1:1", 3)).await.unwrap();
    assert_eq!((report.completed, report.failed, report.errors["connection"]), (0, 3, 3));
    assert_eq!(report.ttft_ms, None);
}
