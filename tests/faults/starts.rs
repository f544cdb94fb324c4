//! Routers that have just begun: whoever asks waits until they know their workers.

use serde_json::json;
use thalweg_harness::client::assert_no_failures;
use thalweg_harness::{Etcd, Running};

use crate::support::{STEADY, answers, ask_all, prompt, seconds, sim, stream, whole, with};

/// A router is killed and restarted, with static members and with etcd, and asked at once: every request is answered, those of
/// an unknown model with 404 as ever, and none before the workers had time to say what they serve.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_router_lets_requests_wait_for_its_workers() {
    let etcd = Etcd::start();
    let by_etcd = ["--membership", &etcd.url("/starts")];
    for plan in [sim(STEADY).workers(2), sim(STEADY).workers(2).args(&by_etcd)] {
        let mut fleet = plan.start().await;
        let unknown = with(whole("?", 5), json!({"model": "nobody"}));
        fleet.kill_router(0);
        fleet.restart_router(0);
        let early = fleet.ask(unknown.clone());
        let bodies: Vec<_> = (0..32).map(|i| stream(&prompt(i, 50), 5)).collect();
        let first = ask_all(&fleet, &bodies);
        let models = fleet.http().get("/v1/models").await;
        assert!(models.text.contains("llama3"), "{}", models.text);
        assert_no_failures("a router's first requests", &Running::outcomes(first).await);
        let early = early.outcome().await;
        assert_eq!(early.status, 404, "{:?}", early.error);
        assert!((seconds(3)..seconds(7)).contains(&early.took), "{:?}", early.took);
        let late = fleet.ask(unknown).outcome().await;
        assert_eq!(late.status, 404);
        assert!(late.took < seconds(1), "it knows by now: {:?}", late.took);
        fleet.finish().await;
    }
}

/// A router whose workers are all away says so after five seconds, and not for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_router_without_workers_says_so_in_the_end() {
    let mut fleet = sim(STEADY).workers(1).start().await;
    fleet.kill_router(0);
    fleet.kill_worker(0);
    fleet.restart_router(0);
    let outcome = fleet.ask(whole("anybody?", 5)).outcome().await;
    assert_eq!(outcome.status, 503, "{:?}", outcome.error);
    assert!(outcome.error.as_ref().is_some_and(|error| error.contains("no worker")), "{:?}", outcome.error);
    assert!((seconds(3)..seconds(7)).contains(&outcome.took), "{:?}", outcome.took);
    assert!(!outcome.header("retry-after").is_empty());
    fleet.restart_worker(0);
    fleet.all_ready().await;
    assert_no_failures("with a worker", &answers(&fleet, &[whole("hello", 5)]).await);
    fleet.finish().await;
}
