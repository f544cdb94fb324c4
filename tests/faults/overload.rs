//! More than there is room for, and no room at all.

use std::time::Duration;

use thalweg_harness::client::{assert_no_failures, quantile};
use thalweg_harness::{Load, Outcome, Running};
use tokio::time::Instant;

use crate::support::{answers, prompt, seconds, short_or_long, sim, stream, whole};

/// 20 ms a step and at most 8 sequences: 400 tokens a second a worker.
const NARROW: &str = "step: {base_seconds: 0.02, prefill_token_seconds: 0.0001}";
/// 99 of 100 refusals come within it. The short form shares two cores with other tests, so its bound is for hangs alone.
const REFUSAL_LONG: Duration = Duration::from_millis(50);
const REFUSAL_SHORT: Duration = Duration::from_millis(250);
/// Time to the first token that counts as served in time.
const SLO: Duration = Duration::from_secs(2);

/// Ten times more clients than room: answers within the SLO stay within 10% of their peak, refusals come within
/// 50 ms (long form), and the router's memory stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overload_costs_no_goodput() {
    let plan = sim(NARROW).workers(2).worker_args(&["--max-num-seqs", "8"]);
    let plan = plan.router_args(&["--queue-requests-max", "16", "--queue-timeout", "1.5"]);
    let mut fleet = plan.alone().start().await;
    let time = short_or_long(seconds(5), seconds(60));
    let run = async |fleet: &thalweg_harness::Fleet, clients: usize| {
        let load = Load::start(clients, &[fleet.http()], "/v1/completions", |n| stream(&prompt(n, 30), 20));
        tokio::time::sleep(time).await;
        let end = Instant::now();
        (load.stop().await, end)
    };
    let (at_peak, end) = run(&fleet, 16).await;
    assert_no_failures("at the peak", &at_peak);
    let peak = goodput(&at_peak, end);
    let before = fleet.routers[0].process().resident_bytes();
    let (overloaded, end) = run(&fleet, 160).await;
    let after = fleet.routers[0].process().resident_bytes();
    let refused: Vec<_> = overloaded.iter().filter(|outcome| outcome.status == 429).collect();
    let odd: Vec<_> = overloaded.iter().filter(|o| o.status != 429 && o.failure().is_some()).collect();
    assert!(odd.is_empty(), "{} ended in another way: {:?}", odd.len(), odd.first());
    assert!(refused.iter().all(|outcome| !outcome.header("retry-after").is_empty()));
    let slowest = quantile(refused.iter().map(|outcome| outcome.took), 0.99);
    let (good, refusals) = (goodput(&overloaded, end), refused.len());
    eprintln!("in time {peak} at the peak, {good} of {} overloaded", overloaded.len());
    eprintln!("{refusals} refused, p99 {slowest:?}; router {} -> {} MiB", before >> 20, after >> 20);
    assert!(refusals > overloaded.len() / 4, "{refusals} of {} refused: no overload", overloaded.len());
    assert!(good as f64 >= 0.9 * peak as f64, "in time {good}, {peak} at the peak");
    assert!(slowest < short_or_long(REFUSAL_SHORT, REFUSAL_LONG), "p99 of refusals {slowest:?}");
    assert!(after < before + (32 << 20), "the router grew from {before} to {after} bytes");
    fleet.at_rest().await;
    fleet.finish().await;
}

/// Answers that began in time and were whole by `end`.
fn goodput(outcomes: &[Outcome], end: Instant) -> usize {
    let is_good =
        |o: &&Outcome| o.failure().is_none() && o.first < SLO && o.ended.is_some_and(|at| at <= end);
    outcomes.iter().filter(is_good).count()
}

/// Without any worker: 503 that says why, once they are given up; /health stays green, and a worker that comes is used without
/// a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_worker_is_a_503_until_one_comes() {
    let mut fleet = sim(NARROW).workers(2).start().await;
    fleet.kill_worker(0);
    fleet.kill_worker(1);
    let outcome = fleet.ask(whole("anybody there?", 5)).outcome().await;
    assert_eq!(outcome.status, 503, "{:?}", outcome.error);
    assert!(outcome.error.as_ref().is_some_and(|error| error.contains("worker")), "{:?}", outcome.error);
    assert!(outcome.took < seconds(5), "{:?}", outcome.took);
    assert_eq!(fleet.http().get("/health").await.status.as_u16(), 200);
    fleet.restart_worker(1);
    fleet.ready(1).await;
    assert_no_failures("with a worker again", &answers(&fleet, &[whole("hello", 5)]).await);
    fleet.finish().await;
}

/// Many prompts with one new prefix within a second: the first ones compute it, the rest find it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_prefix_is_computed_a_few_times_at_most() {
    let profile = "step: {base_seconds: 0.002, prefill_token_seconds: 0.0001}";
    let plan = sim(profile).workers(4).worker_args(&["--max-num-seqs", "256"]).alone();
    let fleet = plan.start().await;
    let requests = short_or_long(200, 1000);
    let mut ticks = tokio::time::interval(seconds(1) / requests as u32);
    let prefix = prompt(7, 320);
    let mut running = Vec::new();
    for number in 0..requests {
        ticks.tick().await;
        running.push(fleet.ask(whole(&format!("{prefix}{number}"), 4)));
    }
    let outcomes = Running::outcomes(running).await;
    assert_no_failures("one new prefix", &outcomes);
    let cold = outcomes.iter().filter(|outcome| outcome.cached_tokens() < 160).count();
    eprintln!("{cold} of {requests} prompts computed the prefix");
    assert!(cold <= 8, "{cold} of {requests} prompts computed the prefix");
    fleet.finish().await;
}
