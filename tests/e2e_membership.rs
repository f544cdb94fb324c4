//! Processes that find each other by etcd: a worker registers when it serves, drains in order, and is missed by nobody.

use serde_json::{Value, json};
use thalweg_harness::{Etcd, HttpClient, Process, Scrape, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");

fn start(etcd: &Etcd, args: &[&str]) -> Process {
    let url = etcd.url("/e2e");
    let membership = ["--membership", &url, "--membership-lease-ttl", "2"];
    Process::start(BINARY, &[args, &membership].concat())
}

fn worker(etcd: &Etcd, id: &str) -> Process {
    let model = models::smollm2();
    let model = model.to_str().expect("a path in UTF-8");
    let place = ["--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--worker-id", id];
    start(etcd, &[&["worker", "--model", model, "--kv-cache-memory-bytes", "64MiB"], &place[..]].concat())
}

async fn ready(router: &HttpClient, workers: f64) {
    let until = async {
        loop {
            let scrape = Scrape::parse(&router.get("/metrics").await.text);
            if scrape.sum("thalweg_router_worker_state", "state=\"ready\"").unwrap_or(0.0) == workers {
                return;
            }
        }
    };
    let patience = std::time::Duration::from_secs(60);
    tokio::time::timeout(patience, until).await.unwrap_or_else(|_| panic!("{workers} ready workers"));
}

fn completion(max_tokens: u32) -> Value {
    json!({"model": "SmolLM2-135M-Instruct.Q4_1", "prompt": "Once upon a time", "max_tokens": max_tokens,
        "temperature": 0, "ignore_eos": true, "stream": true})
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_register_drain_and_leave() {
    let etcd = Etcd::start();
    let mut router = start(&etcd, &["router", "--http", "127.0.0.1:0"]);
    let http = router.logged("router listens")["http"].as_str().expect("text").parse().expect("an address");
    let http = HttpClient::new(http);
    let mut first = worker(&etcd, "one");
    let serves = first.logged("worker serves");
    first.logged("registered in etcd");
    ready(&http, 1.0).await;
    let value: Value = serde_json::from_str(&etcd.get("/e2e/workers/one").expect("a key")).expect("JSON");
    assert_eq!(value["address"], format!("grpc://{}", serves["grpc"].as_str().expect("text")));
    assert_eq!(value["draining"], false);
    assert_eq!(value["models"], json!(["SmolLM2-135M-Instruct.Q4_1"]));
    assert!(etcd.ctl(&["get", "--prefix", "--keys-only", "/e2e/routers/"]).contains("/e2e/routers/"));

    let scrape = Scrape::parse(&http.get("/metrics").await.text);
    assert_eq!(scrape.value("thalweg_membership_degraded"), 0.0);

    // A stream runs on the worker that is asked to end.
    let mut stream = http.open("/v1/completions", &completion(200)).await;
    stream.next().await.expect("an event");
    let second = worker(&etcd, "two");
    ready(&http, 2.0).await;
    let stopping = tokio::task::spawn_blocking(move || first.stop());
    let rest = stream.read().await;
    let chunks = rest.chunks();
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "length");
    stopping.await.expect("exit code 0 and a quiet log");
    assert_eq!(etcd.get("/e2e/workers/one"), None);
    assert!(etcd.get("/e2e/workers/two").is_some());

    // The other one goes on.
    let reply = http.post("/v1/completions", &completion(5)).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    router.stop();
    assert!(etcd.ctl(&["get", "--prefix", "--keys-only", "/e2e/routers/"]).is_empty());
    second.stop();
}
