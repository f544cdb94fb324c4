//! Many streams at once, a third of them cut off by their clients: nobody else notices, and nothing is left behind.

use futures::future::join_all;
use serde_json::{Value, json};
use thalweg_harness::{Cluster, Random, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const STREAMS: usize = 64;
const TOKENS: usize = 12;

#[tokio::test]
async fn cut_streams_leave_others_right_and_nothing_behind() {
    let mut random = Random::from_env(4);
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "64MiB"]);
    let at_rest = blocks(&cluster).await;

    let undisturbed = join_all((0..STREAMS).map(|i| whole_stream(&cluster, i))).await;
    assert!(undisturbed.iter().all(|text| !text.is_empty()));

    let mut order: Vec<_> = (0..STREAMS).collect();
    random.shuffle(&mut order);
    let cuts: Vec<Option<usize>> = {
        let mut cuts = vec![None; STREAMS];
        order.iter().take(STREAMS / 3).for_each(|i| cuts[*i] = Some(random.below(TOKENS)));
        cuts
    };
    let runs = cuts.iter().enumerate().map(async |(i, cut)| match cut {
        Some(events) => {
            cut_stream(&cluster, i, *events).await;
            None
        }
        None => Some(whole_stream(&cluster, i).await),
    });
    for (i, text) in join_all(runs).await.into_iter().enumerate() {
        if let Some(text) = text {
            assert_eq!(text, undisturbed[i], "stream {i} of {cuts:?}");
        }
    }

    cluster.eventually("the cluster at rest", async || is_at_rest(&cluster).await).await;
    assert_eq!(blocks(&cluster).await, at_rest, "every block is free or only cached");
    let scrape = cluster.metrics().await;
    let ended = |outcome: &str| {
        scrape.sum("thalweg_router_http_requests_total", &format!("outcome=\"{outcome}\"")).unwrap_or(0.0)
    };
    assert_eq!(ended("ok") + ended("cancelled"), 2.0 * STREAMS as f64, "every request has one record");
    cluster.stop();
}

fn request(cluster: &Cluster, i: usize) -> Value {
    json!({"model": cluster.model, "prompt": format!("{i} and {} are two numbers. The", i * 7), "max_tokens": TOKENS,
           "temperature": 0, "ignore_eos": true, "stream": true})
}

async fn whole_stream(cluster: &Cluster, i: usize) -> String {
    let reply = cluster.http.post("/v1/completions", &request(cluster, i)).await;
    let chunks = reply.chunks();
    assert_eq!(chunks.last().expect("chunks")["choices"][0]["finish_reason"], "length");
    chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect()
}

/// Reads some events and hangs up.
async fn cut_stream(cluster: &Cluster, i: usize, events: usize) {
    let mut stream = cluster.http.open("/v1/completions", &request(cluster, i)).await;
    assert_eq!(stream.status.as_u16(), 200);
    for _ in 0..events {
        stream.next().await;
    }
}

async fn is_at_rest(cluster: &Cluster) -> bool {
    let router = cluster.metrics().await;
    let of_router = ["streams", "queue_depth", "worker_running", "worker_waiting", "worker_bookings"];
    let mut busy: f64 = of_router.iter().map(|name| router.value(&format!("thalweg_router_{name}"))).sum();
    for worker in &cluster.worker_metrics {
        let scrape = thalweg_harness::Scrape::parse(&worker.get("/metrics").await.text);
        busy += scrape.value("vllm:num_requests_running") + scrape.value("vllm:num_requests_waiting");
    }
    busy == 0.0
}

async fn blocks(cluster: &Cluster) -> Vec<f64> {
    cluster.metrics().await.values("thalweg_router_worker_kv_blocks_available")
}
