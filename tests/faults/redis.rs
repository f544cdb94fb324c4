//! Redis slow, frozen, killed, emptied and failed over, and an index that is told wrong things: a hint, never truth.

use std::time::Duration;

use thalweg_harness::client::{assert_no_failures, quantile};
use thalweg_harness::fleet::{eventually, within};
use thalweg_harness::redis::Redis;
use thalweg_harness::{Fleet, Load, Outcome, Proxy, Running};
use tokio::time::Instant;

use crate::support::{STEADY, answers, prompt, seconds, short_or_long, sim, stream, whole};

/// A router that has Redis again knows so within this time.
const RECOVERY: Duration = Duration::from_secs(5);
/// Names of keys that do not lapse within an hour.
const KEYS_THAT_STAY: &str = "local stay = {} for _, key in ipairs(redis.call('KEYS', '*')) do \
     local left = redis.call('TTL', key) if left < 0 or left > 3600 then stay[#stay + 1] = key end end return stay";
/// Tokens of a prompt that is looked for again: 12 blocks.
const PROMPT: usize = 200;

/// Redis frozen, killed, restarted empty, slow and full under load: no request fails or waits for it, gauges say so
/// meanwhile (of one that is full, those of workers alone, who write), routers stay ready, and all is well again within 5 s without a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_in_trouble_fails_no_request() {
    // cache-index-08.
    let mut redis = Redis::start();
    let proxy = Proxy::start(([127, 0, 0, 1], redis.port).into());
    let url = format!("redis://{}", proxy.address());
    let fleet = sim(STEADY).workers(2).routers(2).args(&["--index", &url]).start().await;
    let both = [&fleet.routers[0].http, &fleet.routers[1].http];
    let load = Load::start(8, &both, "/v1/completions", |n| whole(&prompt(n % 40, 100), 10));
    eventually("a healthy index", async || !is_degraded(&fleet).await).await;
    load.goes_on(80).await;
    let is_noticed = async |what: &str| {
        within(seconds(10), what, async || is_degraded(&fleet).await).await;
        load.goes_on(short_or_long(80, 1500)).await;
        assert!(fleet.http().get("/ready").await.status.is_success(), "{what}: still ready");
    };
    let recovers = async |what: &str| {
        let took = within(RECOVERY, what, async || !is_degraded(&fleet).await).await;
        eprintln!("{what}: recovered after {took:?}");
    };

    redis.freeze();
    is_noticed("frozen").await;
    redis.thaw();
    recovers("frozen").await;
    redis.kill();
    is_noticed("killed").await;
    redis.restart_empty();
    recovers("restarted empty").await;
    refilled(&fleet).await;
    proxy.delay(seconds(2));
    load.goes_on(100).await;
    proxy.forward();
    recovers("slow").await;
    within(RECOVERY, "slow: all publish", async || publishing(&fleet).await == 2).await;
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let news: Vec<_> = (0..16).map(|i| whole(&prompt(60_000 + i, PROMPT), 4)).collect();
    assert_no_failures("full", &answers(&fleet, &news).await);
    within(seconds(10), "full: workers say so", async || publishing(&fleet).await == 0).await;
    load.goes_on(100).await;
    assert!(!is_degraded(&fleet).await, "full: routers read, and reading works");
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    let took = within(RECOVERY, "full: all publish", async || publishing(&fleet).await == 2).await;
    eprintln!("full: recovered after {took:?}");

    let outcomes = load.stop().await;
    assert_no_failures("Redis in trouble", &outcomes);
    let slow = quantile(outcomes.iter().map(|outcome| outcome.took), 0.99);
    eprintln!("p99 of all {slow:?}");
    assert!(slow < seconds(1), "nobody waits for Redis: {slow:?}");
    fleet.finish().await;
}

/// The master is killed and Sentinel promotes its replica: no request fails, and the index works again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinel_fails_no_request() {
    let mut master = Redis::start();
    let replica = Redis::replica_of(&master);
    let sentinel = Redis::sentinel_of(&master, "index");
    let url = format!("redis+sentinel://127.0.0.1:{}/index", sentinel.port);
    let mut fleet = sim(STEADY).workers(2).args(&["--index", &url]).start().await;
    let load = Load::start(8, &[fleet.http()], "/v1/completions", |n| whole(&prompt(n % 40, 100), 10));
    eventually("a healthy index", async || !is_degraded(&fleet).await).await;
    load.goes_on(80).await;
    master.kill();
    replica.eventually(&["INFO", "replication"], |text| text.contains("role:master"));
    let took = within(seconds(10), "recovery", async || !is_degraded(&fleet).await).await;
    eprintln!("recovered {took:?} after the replica took over");
    load.goes_on(80).await;
    assert_no_failures("a failover", &load.stop().await);
    // A router that knows nothing learns it from the new master.
    fleet.kill_router(0);
    fleet.restart_router(0);
    fleet.all_ready().await;
    refilled(&fleet).await;
    fleet.finish().await;
}

/// Two restarted routers know within 5 s which worker has what, without any prompt being sent again before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_router_knows_the_caches() {
    // cache-index-02.
    let redis = Redis::start();
    let mut fleet = sim(STEADY).workers(4).routers(2).args(&["--index", &redis.url()]).start().await;
    let bodies: Vec<_> = (0..40).map(|i| whole(&prompt(i, PROMPT), 4)).collect();
    assert_no_failures("warming", &answers(&fleet, &bodies).await);
    indexed(&fleet, 40 * 12).await;
    for router in 0..2 {
        fleet.kill_router(router);
        fleet.restart_router(router);
        let known = async || blocks_at(&fleet, router).await >= 40.0 * 12.0;
        let took = within(seconds(5), "the index is known", known).await;
        eprintln!("known {took:?} after the router listens");
    }
    fleet.all_ready().await;
    let ask = |(i, body): (usize, &serde_json::Value)| {
        Running::start(&fleet.routers[i % 2].http, "/v1/completions", body.clone())
    };
    let again = Running::outcomes(bodies.iter().enumerate().map(ask).collect::<Vec<_>>()).await;
    assert_no_failures("known prompts", &again);
    let hits = hits(&again);
    assert!(hits >= 38, "{hits} of 40 known prompts went where they are cached");
    fleet.finish().await;
}

/// Batches of cache events that are doubled and swapped change nothing; what is lost on the way costs time alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_lost_doubled_and_swapped_cost_time_alone() {
    let redis = Redis::start();
    let mut fleet = sim(STEADY).workers(2).args(&["--index", &redis.url()]).start().await;
    // Lost before the publisher numbers what it keeps, a third of the batches is not known to anybody.
    let faults = [("duplicated", 30), ("reordered", 30), ("lost", 15)];
    for (round, (fault, known)) in faults.into_iter().enumerate() {
        let before = blocks(&fleet).await as usize;
        (0..2).for_each(|worker| fleet.switch_faults(worker, &format!("{{cache_events: {fault}}}")));
        let bodies: Vec<_> = (0..30).map(|i| whole(&prompt(1000 * (round + 1) + i, PROMPT), 4)).collect();
        // In a row, so that they are told of in many batches.
        let mut first = Vec::new();
        for body in &bodies {
            first.push(fleet.ask(body.clone()).outcome().await);
        }
        assert_no_failures(fault, &first);
        (0..2).for_each(|worker| fleet.switch_faults(worker, ""));
        // One more batch of each brings what was held back.
        let nudge: Vec<_> = (0..8).map(|i| whole(&prompt(9000 + 10 * round + i, PROMPT), 4)).collect();
        answers(&fleet, &nudge).await;
        indexed(&fleet, before + known * 12).await;
        let again = answers(&fleet, &bodies).await;
        assert_no_failures(fault, &again);
        let hits = hits(&again);
        let metrics = fleet.router_metrics(0).await;
        let counts = ["predicted_cached_tokens_total", "actual_cached_tokens_total", "worker_hit_confidence"]
            .map(|name| metrics.values(&format!("thalweg_router_{name}")));
        eprintln!("{fault}: {hits} of 30 found again; predicted, actual, confidence {counts:?}");
        let confident = counts[2].iter().all(|confidence| *confidence > 0.8);
        assert!(confident, "{fault}: predictions come true, and yet {counts:?}");
        assert!(hits * 20 >= known * 19, "{fault}: {hits} of 30 known prompts went where they are cached");
    }
    fleet.finish().await;
}

/// A worker that was killed and is back has an empty cache, while Redis still has its old entries: they are not believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_of_an_earlier_life_are_not_believed() {
    // cache-index-01.
    let redis = Redis::start();
    let mut fleet = sim(STEADY).workers(2).args(&["--index", &redis.url()]).start().await;
    let bodies: Vec<_> = (0..50).map(|i| whole(&prompt(i, PROMPT), 4)).collect();
    let warm = answers(&fleet, &bodies).await;
    assert_no_failures("warming", &warm);
    indexed(&fleet, 50 * 12).await;
    fleet.kill_worker(0);
    assert_eq!(
        redis.command(&["EVAL", KEYS_THAT_STAY, "0"]),
        "*0\r\n",
        "what it left behind lapses by itself"
    );
    fleet.restart_worker(0);
    fleet.all_ready().await;
    let before = fleet.router_metrics(0).await;
    let again = answers(&fleet, &bodies).await;
    assert_no_failures("after a restart", &again);
    let after = fleet.router_metrics(0).await;
    let counted = |name: &str| {
        let name = format!("thalweg_router_{name}_cached_tokens_total");
        after.count(&name, "") - before.count(&name, "")
    };
    let (predicted, actual) = (counted("predicted"), counted("actual"));
    eprintln!("predicted {predicted}, actual {actual} of {} tokens", 50 * PROMPT);
    assert!(predicted <= actual + (2 * PROMPT) as f64, "predicted {predicted}, actual {actual}");
    assert!(again.iter().any(|outcome| outcome.header("x-thalweg-worker") == "w0"), "it gets work");
    fleet.finish().await;
}

/// A worker that tells another Redis of its blocks: the router names it, its prefixes are not counted on, and nobody fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_another_index_is_named() {
    // cache-index-07.
    let (redis, other) = (Redis::start(), Redis::start());
    let plan = sim("step: {base_seconds: 0.001}").workers(2).args(&["--index", &redis.url()]);
    let mut fleet = plan.of_worker(1, "--index", &other.url()).start().await;
    let begun = Instant::now();
    // Workers alike take turns: each gets some of them.
    let bodies: Vec<_> = (0..40).map(|i| whole(&prompt(i, PROMPT), 2)).collect();
    assert_no_failures("another index", &answers(&fleet, &bodies).await);
    let event =
        fleet.routers[0].process().logged("worker serves prompts but tells the cache index of no block");
    assert_eq!(event["worker"], "w1");
    assert!(begun.elapsed() < seconds(10), "it was named after {:?}", begun.elapsed());
    let metrics = fleet.router_metrics(0).await;
    let blocks =
        |worker: &str| metrics.count("thalweg_router_worker_indexed_blocks", &format!("worker=\"{worker}\""));
    assert_eq!(blocks("w1"), 0.0);
    assert!(blocks("w0") > 0.0);
    let silent =
        |worker: &str| metrics.count("thalweg_router_worker_index_silent", &format!("worker=\"{worker}\""));
    assert_eq!((silent("w0"), silent("w1")), (0.0, 1.0));
    fleet.finish().await;
}

/// A crowd is served while one worker loses a part of its events and the other one swaps them: what is predicted of the caches is
/// discounted, and nothing fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_is_served_while_events_go_wrong() {
    let redis = Redis::start();
    let plan = sim("step: {base_seconds: 0.002}").workers(2).worker_args(&["--max-num-seqs", "256"]);
    let mut fleet = plan.args(&["--index", &redis.url()]).start().await;
    fleet.switch_faults(0, "{cache_events: lost}");
    fleet.switch_faults(1, "{cache_events: reordered}");
    let bodies: Vec<_> = (0..short_or_long(300, 1000)).map(|i| whole(&prompt(i % 50, PROMPT), 4)).collect();
    for _ in 0..2 {
        assert_no_failures("a crowd", &answers(&fleet, &bodies).await);
    }
    (0..2).for_each(|worker| fleet.switch_faults(worker, ""));
    refilled(&fleet).await;
    fleet.at_rest().await;
    fleet.finish().await;
}

/// Streams do not notice that Redis is away from the start: the index is a hint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_starts_without_redis() {
    let mut redis = Redis::start();
    let url = redis.url();
    redis.kill();
    let fleet = sim(STEADY).workers(2).args(&["--index", &url]).start().await;
    let bodies: Vec<_> = (0..16).map(|i| stream(&prompt(i, 50), 20)).collect();
    assert_no_failures("without Redis", &answers(&fleet, &bodies).await);
    assert!(is_degraded(&fleet).await);
    redis.restart_empty();
    let took = within(RECOVERY, "recovery", async || !is_degraded(&fleet).await).await;
    eprintln!("recovered after {took:?}");
    refilled(&fleet).await;
    fleet.finish().await;
}

/// Whether any router says that it cannot reach the index.
async fn is_degraded(fleet: &Fleet) -> bool {
    let mut degraded = false;
    for router in 0..fleet.routers.len() {
        degraded |= fleet.router_metrics(router).await.value("thalweg_router_index_degraded") > 0.0;
    }
    degraded
}

/// Workers that say that Redis takes what they write.
async fn publishing(fleet: &Fleet) -> usize {
    let mut publishing = 0;
    for worker in 0..fleet.workers.len() {
        let metrics = fleet.worker_metrics(worker).await;
        publishing += usize::from(metrics.value("thalweg_worker_cache_publishing") > 0.0);
    }
    publishing
}

async fn blocks(fleet: &Fleet) -> f64 {
    blocks_at(fleet, 0).await
}

async fn blocks_at(fleet: &Fleet, router: usize) -> f64 {
    fleet.router_metrics(router).await.value("thalweg_router_index_blocks")
}

/// Waits until the first router knows of so many blocks.
async fn indexed(fleet: &Fleet, at_least: usize) {
    within(seconds(10), "blocks in the index", async || blocks(fleet).await >= at_least as f64).await;
}

/// New prompts find their way into every router's index.
async fn refilled(fleet: &Fleet) {
    let before = blocks(fleet).await;
    let bodies: Vec<_> = (0..8).map(|i| whole(&prompt(70_000 + i, PROMPT), 4)).collect();
    assert_no_failures("new prompts", &answers(fleet, &bodies).await);
    let more = async || blocks(fleet).await >= before + 8.0 * 12.0;
    within(RECOVERY, "new blocks in the index", more).await;
}

/// Answers that found at least half of their prompt cached.
fn hits(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.cached_tokens() as usize >= PROMPT / 2).count()
}
