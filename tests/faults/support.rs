//! What the tests of this target share: profiles, requests, and how large a test is.

use std::time::Duration;

use serde_json::{Value, json};
use thalweg_harness::{Fleet, FleetPlan, Outcome, Running};

/// The binary under test.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");

/// 100 tokens a second for each stream, 5,000 prompt tokens a second.
pub(crate) const STEADY: &str = "step: {base_seconds: 0.01, prefill_token_seconds: 0.0002}";
/// A prompt of 300 tokens takes 0.2 s.
pub(crate) const SLOW_PREFILL: &str = "step: {base_seconds: 0.005, prefill_token_seconds: 0.0006}";

/// Picks the long form's figure when `THALWEG_TEST_LONG` is set.
pub(crate) fn short_or_long<T>(short: T, long: T) -> T {
    if std::env::var_os("THALWEG_TEST_LONG").is_some() { long } else { short }
}

/// Seconds, for brevity.
pub(crate) fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Simulated workers.
pub(crate) fn sim(profile: &str) -> FleetPlan {
    FleetPlan::sim(BINARY, profile)
}

/// A prompt of so many tokens that begins like no other of another number (a byte is a token).
pub(crate) fn prompt(number: usize, tokens: usize) -> String {
    let words = ["river", "stone", "bread", "clock", "bird", "bridge", "green", "quiet"];
    let mut text = format!("{number} ");
    for at in 0.. {
        text += words[(number + at) % words.len()];
        text.push(' ');
        if text.len() >= tokens {
            break;
        }
    }
    text.truncate(tokens);
    text
}

/// A greedy stream of exactly so many tokens, which shows their ids and what was used.
pub(crate) fn stream(prompt: &str, max_tokens: usize) -> Value {
    json!({
        "model": "llama3", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}, "return_token_ids": true,
    })
}

/// The same, answered as a whole.
pub(crate) fn whole(prompt: &str, max_tokens: usize) -> Value {
    let mut body = stream(prompt, max_tokens);
    body["stream"] = false.into();
    body.as_object_mut().expect("an object").remove("stream_options");
    body
}

/// Overrides fields of a request.
pub(crate) fn with(mut body: Value, fields: Value) -> Value {
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

/// Sends all at once to the first router.
pub(crate) fn ask_all(fleet: &Fleet, bodies: &[Value]) -> Vec<Running> {
    bodies.iter().map(|body| fleet.ask(body.clone())).collect()
}

/// Sends all at once and waits for the answers.
pub(crate) async fn answers(fleet: &Fleet, bodies: &[Value]) -> Vec<Outcome> {
    Running::outcomes(ask_all(fleet, bodies)).await
}

/// Waits until every stream has so many tokens.
pub(crate) async fn all_have(running: &[Running], tokens: usize) {
    let have = async || running.iter().all(|one| one.tokens() >= tokens || one.is_over());
    thalweg_harness::fleet::eventually("tokens on every stream", have).await;
    let over = running.iter().filter(|one| one.is_over()).count();
    assert_eq!(over, 0, "streams end before the fault; make them longer");
}

/// Every answer is as if nothing had happened.
pub(crate) fn assert_same_answers(disturbed: &[Outcome], undisturbed: &[Outcome]) {
    assert_eq!(disturbed.len(), undisturbed.len());
    for (number, (got, expected)) in disturbed.iter().zip(undisturbed).enumerate() {
        assert_eq!(got.answer(), expected.answer(), "request {number}");
    }
}

/// Longest pause between two events over all streams.
pub(crate) fn longest_gap(outcomes: &[Outcome]) -> Duration {
    outcomes.iter().map(|outcome| outcome.gap_max()).max().unwrap_or_default()
}
