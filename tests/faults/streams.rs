//! Clients that hang up, and clients that do not read.

use serde_json::json;
use thalweg_harness::client::{assert_no_failures, quantile};
use thalweg_harness::fleet::within;
use thalweg_harness::{EventStream, Fleet, HttpClient, Load, Random, Running};

use crate::support::{STEADY, prompt, seconds, short_or_long, sim, stream, whole, with};

/// A third of the streams is cut behind some chunks, a third before the first one: blocks and slots come back each time, the
/// workers count as many cancelled requests as were cut, and there is no drift over rounds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_streams_leave_nothing_behind() {
    // kv-cache-01.
    let fleet = sim(STEADY).workers(2).start().await;
    let streams = short_or_long(90, 300);
    let mut random = Random::from_env(40);
    let mut cut = 0;
    for round in 0..short_or_long(2, 5) {
        let mut kinds: Vec<usize> = (0..streams).map(|i| i % 3).collect();
        random.shuffle(&mut kinds);
        let mut whole = Vec::new();
        let mut hang_ups = Vec::new();
        for (i, kind) in kinds.iter().enumerate() {
            let body = stream(&prompt(round * 1000 + i, 40), 60);
            match kind {
                0 => whole.push(fleet.ask(body)),
                kind => {
                    let (http, chunks) = (fleet.http().clone(), if *kind == 1 { 3 } else { 0 });
                    hang_ups.push(tokio::spawn(async move { hang_up(&http, body, chunks).await }));
                }
            }
        }
        cut += hang_ups.len();
        for hang_up in hang_ups {
            hang_up.await.expect("no panic");
        }
        assert_no_failures("streams beside cut ones", &Running::outcomes(whole).await);
        fleet.at_rest().await;
        assert_eq!(blocks_in_use(&fleet).await, 0.0, "round {round}");
    }
    let cancelled = ended(&fleet, "cancelled").await;
    assert!(cancelled <= cut as f64, "{cancelled} were cancelled, {cut} were cut");
    assert!(cancelled >= cut as f64 * 0.5, "{cancelled} were cancelled, {cut} were cut");
    fleet.finish().await;
}

/// Whole (not streamed) requests whose client hangs up, running and queued: within a second nothing runs for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_request_ends_with_its_connection() {
    // scheduler-01.
    let fleet = sim(STEADY).workers(1).worker_args(&["--max-num-seqs", "4"]).start().await;
    let requests: Vec<_> = (0..short_or_long(12, 50))
        .map(|i| {
            tokio::spawn({
                let http = fleet.http().clone();
                async move { http.post("/v1/completions", &whole(&prompt(i, 30), 450)).await }
            })
        })
        .collect();
    let busy = async || {
        let running = fleet.worker_metrics(0).await.value("vllm:num_requests_running");
        running == 4.0 && fleet.router_metrics(0).await.value("thalweg_router_streams") >= 4.0
    };
    within(seconds(5), "some run and some wait", busy).await;
    requests.iter().for_each(|request| request.abort());
    let idle = async || {
        let scrape = fleet.worker_metrics(0).await;
        scrape.value("vllm:num_requests_running") + scrape.value("vllm:num_requests_waiting") == 0.0
    };
    let took = within(seconds(1), "nothing runs", idle).await;
    eprintln!("nothing runs {took:?} after the clients hung up");
    fleet.at_rest().await;
    assert_eq!(blocks_in_use(&fleet).await, 0.0);
    fleet.finish().await;
}

/// 64 clients that stop reading do not slow 64 that read, and are cut off when their time is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_clients_slow_nobody() {
    let plan = sim("step: {base_seconds: 0.01}").workers(2).worker_args(&["--max-num-seqs", "256"]);
    let fleet = plan.router_args(&["--client-stall-timeout", "3"]).alone().start().await;
    let body = |number: usize| stream(&prompt(number, 30), 100);
    let pace = async || {
        let load = Load::start(64, &[fleet.http()], "/v1/completions", body);
        load.goes_on(128).await;
        let outcomes = load.stop().await;
        assert_no_failures("clients that read", &outcomes);
        quantile(outcomes.iter().map(|outcome| outcome.took), 0.9)
    };
    let alone = pace().await;
    let mut stalled = Vec::new();
    for number in 0..64 {
        let body = stream(&prompt(5000 + number, 30), 450);
        // Choices with alternatives of each token are more than the buffers of a socket hold: their router must keep them.
        let heavy = with(body.clone(), json!({"logprobs": 20, "n": 32}));
        let body = if number < short_or_long(2, 8) { heavy } else { body };
        stalled.push(fleet.http().open("/v1/completions", &body).await);
    }
    let beside = pace().await;
    eprintln!("nine of ten took {alone:?} alone, {beside:?} beside 64 stalled clients");
    assert!(beside < alone * 2, "{alone:?} alone, {beside:?} beside stalled clients");
    fleet.at_rest().await;
    let cut = ended(&fleet, "cancelled").await;
    eprintln!("{cut} were cut off");
    assert!(
        cut >= short_or_long(2.0, 8.0),
        "{cut} clients were cut off, fewer than those with heavy streams"
    );
    drop(stalled);
    fleet.finish().await;
}

/// Reads so many chunks and hangs up; 0 does so before there is an answer.
async fn hang_up(http: &HttpClient, body: serde_json::Value, chunks: usize) {
    if chunks == 0 {
        let never = seconds(0);
        drop(tokio::time::timeout(never, http.open("/v1/completions", &body)).await);
        return;
    }
    let mut stream: EventStream = http.open("/v1/completions", &body).await;
    for _ in 0..chunks {
        stream.next().await;
    }
}

async fn blocks_in_use(fleet: &Fleet) -> f64 {
    let mut in_use = 0.0;
    for number in 0..fleet.workers.len() {
        in_use += fleet.worker_metrics(number).await.value("vllm:kv_cache_usage_perc");
    }
    in_use
}

async fn ended(fleet: &Fleet, outcome: &str) -> f64 {
    let labels = format!("outcome=\"{outcome}\"");
    fleet.router_metrics(0).await.count("thalweg_router_http_requests_total", &labels)
}
