//! Answers that must be texts of a grammar, and workers that go away in the midst of them.

use serde_json::{Value, json};
use thalweg_harness::Running;
use thalweg_harness::client::assert_no_failures;

use crate::support::{STEADY, all_have, answers, ask_all, assert_same_answers, prompt, sim, stream, with};

/// Tokens of a stream before its worker is killed: well within the JSON string.
const BEGUN: usize = 40;

/// `kill -9` in the midst of JSON: another worker stands where the lost one stood in the grammar, so that the whole is the
/// answer of an undisturbed run, and valid.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_mid_json_leaves_it_valid() {
    let mut fleet = sim(STEADY).workers(3).start().await;
    let bodies: Vec<Value> = (0..16).map(|i| with(stream(&prompt(i, 40), 400), constraint(i))).collect();
    let undisturbed = answers(&fleet, &bodies).await;
    assert_no_failures("undisturbed", &undisturbed);
    let running = ask_all(&fleet, &bodies);
    all_have(&running, BEGUN).await;
    fleet.kill_worker(0);
    let disturbed = Running::outcomes(running).await;
    assert_no_failures("a worker killed mid-JSON", &disturbed);
    assert_same_answers(&disturbed, &undisturbed);
    for (number, outcome) in disturbed.iter().enumerate() {
        for choice in &outcome.choices {
            assert_eq!(choice.finish_reason, "stop", "request {number}");
            assert!(is_right(number, &choice.text), "request {number}: {}", choice.text);
        }
    }
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert!(resumes >= 4.0, "only {resumes} streams were on the killed worker");
    fleet.restart_worker(0);
    fleet.all_ready().await;
    fleet.at_rest().await;
    fleet.finish().await;
}

fn constraint(number: usize) -> Value {
    match number % 2 {
        0 => {
            let text = json!({"type": "string", "minLength": 80, "maxLength": 90, "pattern": "^[a-z ]*$"});
            let schema = json!({"type": "object", "properties": {"text": text}, "required": ["text"],
                                "additionalProperties": false});
            let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
            json!({"response_format": format, "n": 1 + number / 2 % 2, "temperature": 0.8, "seed": number})
        }
        _ => json!({"guided_regex": "([a-f]{3}-){30}[0-9]"}),
    }
}

fn is_right(number: usize, text: &str) -> bool {
    match number % 2 {
        0 => serde_json::from_str::<Value>(text).is_ok_and(|value| {
            value["text"].as_str().is_some_and(|text| {
                (80..=90).contains(&text.len()) && text.bytes().all(|b| b == b' ' || b.is_ascii_lowercase())
            })
        }),
        _ => text.len() == 121 && text.ends_with(|c: char| c.is_ascii_digit()),
    }
}
