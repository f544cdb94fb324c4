//! Embeddings while workers are killed.

use serde_json::{Value, json};
use thalweg_harness::{Fleet, HttpClient, Reply};
use tokio::task::JoinSet;

use crate::support::{SLOW_PREFILL, prompt, seconds, sim};

const REQUESTS: usize = 24;
const INPUTS: usize = 6;

fn body(request: usize) -> Value {
    let inputs: Vec<String> = (0..INPUTS).map(|i| prompt(request * INPUTS + i, 200)).collect();
    json!({"model": "llama3", "input": inputs})
}

/// A worker is killed while it embeds: its inputs are computed elsewhere, and every request gets the vectors that it would have
/// got.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_killed_while_it_embeds_fails_nobody() {
    let mut fleet = sim(SLOW_PREFILL).workers(3).start().await;
    let undisturbed = all(&fleet).await;
    let running = start(&fleet);
    let embedding = async || fleet.worker_metrics(1).await.value("vllm:num_requests_running") >= 1.0;
    thalweg_harness::fleet::within(seconds(30), "inputs on the worker", embedding).await;
    fleet.kill_worker(1);
    let disturbed = finish(running).await;
    assert_eq!(disturbed, undisturbed, "the same vectors, in order");
    let retries = fleet.router_metrics(0).await.count("thalweg_router_retries_total", "");
    assert!(retries >= 1.0, "nothing was on the killed worker");
    eprintln!("{retries} inputs were tried elsewhere");
    fleet.restart_worker(1);
    fleet.all_ready().await;
    assert_eq!(all(&fleet).await, undisturbed);
    fleet.at_rest().await;
    fleet.finish().await;
}

type Running = JoinSet<(usize, Reply)>;

fn start(fleet: &Fleet) -> Running {
    let ask = |http: HttpClient, request| async move {
        (request, http.post("/v1/embeddings", &body(request)).await)
    };
    (0..REQUESTS).map(|request| ask(fleet.http().clone(), request)).collect()
}

/// The data of every reply, by request.
async fn finish(running: Running) -> Vec<Value> {
    let mut replies = running.join_all().await;
    replies.sort_by_key(|(request, _)| *request);
    let data = |(request, reply): (usize, Reply)| {
        assert_eq!(reply.status.as_u16(), 200, "request {request}: {}", reply.text);
        reply.json()["data"].clone()
    };
    replies.into_iter().map(data).collect()
}

async fn all(fleet: &Fleet) -> Vec<Value> {
    finish(start(fleet)).await
}
