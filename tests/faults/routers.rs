//! Routers that crash and routers that leave in order.

use std::time::Duration;

use thalweg_harness::client::assert_no_failures;
use thalweg_harness::fleet::within;
use thalweg_harness::{Load, Running};

use crate::support::{STEADY, all_have, prompt, seconds, short_or_long, sim, stream};

/// `kill -9` of one of two routers breaks its own streams and no other; its replacement serves at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_router_breaks_only_its_own_streams() {
    let mut fleet = sim(STEADY).workers(2).routers(2).start().await;
    let ask = |router: usize, i: usize| {
        Running::start(&fleet.routers[router].http, "/v1/completions", stream(&prompt(i, 50), 200))
    };
    let its: Vec<_> = (0..16).map(|i| ask(0, i)).collect();
    let others: Vec<_> = (16..32).map(|i| ask(1, i)).collect();
    all_have(&its, 10).await;
    all_have(&others, 10).await;
    fleet.kill_router(0);
    let broken = Running::outcomes(its).await;
    assert!(broken.iter().all(|outcome| outcome.failure().is_some()), "its streams cannot go on");
    assert_no_failures("the other router's streams", &Running::outcomes(others).await);
    fleet.restart_router(0);
    let serves = async || fleet.ask(stream("after a restart", 5)).outcome().await.failure().is_none();
    let took = within(seconds(5), "the replacement serves", serves).await;
    eprintln!("the replacement serves {took:?} after it listens");
    fleet.all_ready().await;
    fleet.at_rest().await;
    fleet.finish().await;
}

/// SIGTERM of a router under load: for the drain delay it still accepts and tells connections to close while /ready fails,
/// every stream ends whole, no connection is refused within the delay, and it exits with 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_router_breaks_nothing() {
    // drain-01, drain-02.
    let delay = short_or_long(2, 3);
    let delay_text = delay.to_string();
    let plan = sim(STEADY).workers(2).routers(2).router_args(&["--drain-delay", &delay_text]);
    let mut fleet = plan.start().await;
    let long: Vec<_> = (0..10)
        .map(|i| Running::start(fleet.http(), "/v1/completions", stream(&prompt(i, 30), 150 + 100 * delay)))
        .collect();
    all_have(&long, 10).await;
    let load = Load::start(8, &[fleet.http()], "/v1/completions", |n| stream(&prompt(100 + n, 30), 20));
    load.goes_on(8).await;
    assert_ne!(fleet.http().get("/health").await.header("connection"), Some("close"), "too early");
    fleet.routers[0].signal("TERM");
    let not_ready = async || fleet.http().get("/ready").await.status.as_u16() == 503;
    within(Duration::from_millis(500), "/ready fails", not_ready).await;
    // As a balancer that has not noticed: a new connection every 20 ms, until shortly before the delay is over.
    let mut ticks = tokio::time::interval(Duration::from_millis(20));
    let mut late = Vec::new();
    for number in 0..(delay - 1) * 50 {
        ticks.tick().await;
        late.push(Running::start(fleet.http(), "/v1/completions", stream(&prompt(200 + number, 30), 5)));
    }
    let late = Running::outcomes(late).await;
    assert_no_failures("connections within the drain delay", &late);
    let told = late.iter().filter(|outcome| outcome.header("connection") == "close").count();
    let under_load = load.stop().await;
    assert_no_failures("load while a router drains", &under_load);
    assert_no_failures("streams that outlast the delay", &Running::outcomes(long).await);
    assert_eq!(fleet.router_ended(0, seconds(5)).await, Some(0));
    assert_eq!(told, late.len(), "answers that told the connection to close");
    fleet.finish().await;
}

/// A router whose drain limit is over tells the clients that are left by an error event, and exits with 0 all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_limit_ends_streams_with_an_error_event() {
    // drain-01.
    let mut fleet = sim(STEADY).router_args(&["--drain-timeout", "1"]).start().await;
    let short: Vec<_> = (0..4).map(|i| fleet.ask(stream(&prompt(i, 30), 60))).collect();
    let long: Vec<_> = (4..8).map(|i| fleet.ask(stream(&prompt(i, 30), 450))).collect();
    all_have(&short, 10).await;
    all_have(&long, 10).await;
    fleet.routers[0].signal("TERM");
    assert_no_failures("streams within the limit", &Running::outcomes(short).await);
    all_end_with_an_error_event(long).await;
    assert_eq!(fleet.router_ended(0, seconds(3)).await, Some(0));
    fleet.at_rest().await;
    fleet.finish().await;
}

/// A second SIGTERM of a router, and of a worker, cuts the drain short: the router's clients are told so by an error event, the
/// worker's streams go on elsewhere, and both exit with 0.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_sigterm_cuts_a_drain_short() {
    // drain-01.
    let mut fleet = sim(STEADY).workers(2).start().await;
    let running: Vec<_> = (0..8).map(|i| fleet.ask(stream(&prompt(i, 30), 300))).collect();
    all_have(&running, 10).await;
    fleet.workers[0].signal("TERM");
    fleet.workers[0].process().logged("draining");
    fleet.workers[0].signal("TERM");
    assert_eq!(fleet.worker_ended(0, seconds(3)).await, Some(0));
    assert_no_failures("a worker told twice", &Running::outcomes(running).await);
    let resumes = fleet.router_metrics(0).await.count("thalweg_router_resumes_total", "");
    assert!(resumes >= 1.0, "nobody was left on it");

    let running: Vec<_> = (8..16).map(|i| fleet.ask(stream(&prompt(i, 30), 450))).collect();
    all_have(&running, 10).await;
    fleet.routers[0].signal("TERM");
    fleet.routers[0].process().logged("shutting down");
    fleet.routers[0].signal("TERM");
    all_end_with_an_error_event(running).await;
    assert_eq!(fleet.router_ended(0, seconds(3)).await, Some(0));
    fleet.at_rest().await;
    fleet.finish().await;
}

/// Three routers that do not know of each other, one with long streams only: no worker is left idle or overrun.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn routers_balance_what_they_do_not_see() {
    // routing-11.
    let fleet = sim(STEADY).workers(4).routers(3).worker_args(&["--max-num-seqs", "64"]).start().await;
    let streams = 200;
    let ask = |i: usize| {
        let tokens = if i.is_multiple_of(3) { 450 } else { 200 };
        Running::start(&fleet.routers[i % 3].http, "/v1/completions", stream(&prompt(i, 30), tokens))
    };
    let mut ticks = tokio::time::interval(Duration::from_millis(5));
    let mut running = Vec::new();
    for number in 0..streams {
        ticks.tick().await;
        running.push(ask(number));
    }
    all_have(&running, 5).await;
    let mut counts = Vec::new();
    for worker in 0..4 {
        counts.push(fleet.worker_metrics(worker).await.value("vllm:num_requests_running"));
    }
    let mean = counts.iter().sum::<f64>() / 4.0;
    eprintln!("running per worker {counts:?}");
    assert!(counts.iter().all(|count| (count - mean).abs() <= 0.3 * mean), "{counts:?}");
    assert_no_failures("three routers", &Running::outcomes(running).await);
    fleet.finish().await;
}

/// Not with a bare cut, though their streams had begun.
async fn all_end_with_an_error_event(running: Vec<Running>) {
    for outcome in Running::outcomes(running).await {
        let error = outcome.error.unwrap_or_default();
        assert!(error.contains("\"message\""), "no error event but {error:?}");
        assert_eq!(outcome.status, 200);
    }
}
