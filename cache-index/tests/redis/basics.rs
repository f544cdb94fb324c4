//! What works as long as Redis does.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use thalweg_cache_index::redis::{Limits, inspect};
use thalweg_cache_index::{BlockEvent, CacheIndex, RedisConfig, RedisIndex};
use thalweg_harness::redis::Redis;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

use crate::support::{PATIENCE, TestWorker, eventually, open, open_with};

#[tokio::test]
async fn what_a_worker_publishes_is_matched_in_another_process() {
    for binary in Redis::binaries() {
        let redis = Redis::of(&binary, &[]);
        let (workers, router) = (open(&redis.url()), open(&redis.url()));
        router.replica();
        let mut a = TestWorker::new(&workers, "a", 1);
        let mut b = TestWorker::new(&workers, "b", 1);
        a.store(0..100);
        a.remove(50..60);
        b.store(0..5_000);
        let known = || a.is_known_to(&router) && b.is_known_to(&router);
        eventually("both are known", PATIENCE, known).await;
        let chain: Vec<u64> = (0..200).collect();
        assert_eq!((a.matched_by(&router, &chain), b.matched_by(&router, &chain)), (50, 200));
        b.publish(vec![BlockEvent::Cleared]);
        eventually("b is empty", PATIENCE, || b.is_known_to(&router)).await;
        let stats = router.stats();
        assert!(!stats.degraded && stats.bootstrapped && stats.undecodable == 0, "{stats:?}");
        assert_eq!((stats.gaps, stats.workers_behind), (0, 0), "{stats:?}");
    }
}

#[tokio::test]
async fn a_router_that_starts_later_knows_everything_from_snapshot_and_stream() {
    let redis = Redis::start();
    let workers = open(&redis.url());
    let mut all: Vec<_> = (0..20).map(|i| TestWorker::new(&workers, &format!("w{i}"), 1)).collect();
    for (i, worker) in all.iter_mut().enumerate() {
        worker.store(0..1_000 + i as u64);
    }
    eventually("snapshots", PATIENCE, || workers.stats().snapshots_written >= 20).await;
    for worker in &mut all {
        worker.remove(100..200);
        worker.store(10_000..10_100);
    }
    let published = workers.stats().batches_published;
    eventually("batches behind the snapshots", PATIENCE, || workers.stats().batches_published >= published)
        .await;
    let router = open(&redis.url());
    router.replica();
    let known = || all.iter().all(|worker| worker.is_known_to(&router));
    eventually("all are known", PATIENCE, known).await;
}

#[tokio::test]
async fn a_restarted_worker_is_not_matched_on_what_its_old_life_left_in_redis() {
    // cache-index-01.
    check_restart(1, 2).await;
    // Its clock was set back meanwhile.
    check_restart(2, 1).await;
}

async fn check_restart(old_epoch: u64, new_epoch: u64) {
    let redis = Redis::start();
    let router = open(&redis.url());
    let chain: Vec<u64> = (0..100).collect();
    {
        let old_process = open(&redis.url());
        let mut old = TestWorker::new(&old_process, "w", old_epoch);
        old.store(0..100);
        eventually("the old life is known", PATIENCE, || old.is_known_to(&router)).await;
        eventually("its snapshot is there", PATIENCE, || old_process.stats().snapshots_written >= 1).await;
    }
    // The membership tells of the new life before the index does.
    let late = open(&redis.url());
    let new_process = open(&redis.url());
    let unborn = |router: &RedisIndex| {
        let replica = router.replica();
        let holder = replica.enroll(&WorkerId::new("w"), WorkerEpoch(new_epoch)).unwrap();
        replica.lookup(&chain, Instant::now()).blocks(holder)
    };
    assert_eq!(unborn(&router), 0, "the new epoch fences off the old");
    late.replica();
    assert_eq!(unborn(&late), 0);
    eventually("the late router has read all", PATIENCE, || late.stats().bootstrapped).await;
    assert_eq!(unborn(&late), 0, "a snapshot of another life is of no use");
    let mut new = TestWorker::new(&new_process, "w", new_epoch);
    new.store(0..7);
    let known = || new.is_known_to(&router) && new.is_known_to(&late);
    eventually("the new life is known", PATIENCE, known).await;
    assert_eq!(new.matched_by(&late, &chain), 7);
}

#[tokio::test]
async fn a_worker_forgotten_and_found_again_is_read_again_though_it_says_nothing() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..100);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    eventually("its snapshot is there", PATIENCE, || workers.stats().snapshots_written >= 1).await;
    // Events behind the snapshot have to be read again, too.
    worker.store(100..150);
    worker.remove(0..10);
    eventually("all of it is known", PATIENCE, || worker.is_known_to(&router)).await;
    router.replica().forget(&worker.id);
    assert!(!worker.is_known_to(&router));
    let limits = Limits::default();
    assert!(limits.snapshot_interval > PATIENCE, "no new snapshot helps it");
    eventually("it is known again", PATIENCE, || worker.is_known_to(&router)).await;
}

#[tokio::test]
async fn a_replica_in_use_is_fed_on_when_its_index_is_dropped_and_no_longer() {
    let redis = Redis::start();
    let workers = open(&redis.url());
    let mut worker = TestWorker::new(&workers, "w", 1);
    let replica = open(&redis.url()).replica();
    let holder = replica.enroll(&worker.id, worker.epoch).unwrap();
    for end in [10, 20] {
        worker.store(0..end);
        eventually("it is known", PATIENCE, || replica.blocks_of(holder) == end).await;
    }
    let readers = || redis.command(&["CLIENT", "LIST"]).matches("cmd=xread").count();
    eventually("four readers", PATIENCE, || readers() == 4).await;
    drop(replica);
    eventually("the readers are gone", PATIENCE, || readers() == 0).await;
}

#[tokio::test]
async fn snapshots_are_rewritten_by_time_and_by_events_and_expire() {
    let redis = Redis::start();
    let interval = Duration::from_millis(300);
    let by_time = open_with(&redis.url(), Limits { snapshot_interval: interval, ..Limits::default() });
    let _idle = TestWorker::new(&by_time, "idle", 1);
    eventually("three snapshots", PATIENCE, || by_time.stats().snapshots_written >= 3).await;
    let by_events = open_with(&redis.url(), Limits { snapshot_events: 1_000, ..Limits::default() });
    let mut busy = TestWorker::new(&by_events, "busy", 1);
    eventually("the first snapshot", PATIENCE, || by_events.stats().snapshots_written == 1).await;
    busy.store(0..999);
    busy.remove(0..1);
    eventually("the next snapshot", PATIENCE, || by_events.stats().snapshots_written == 2).await;
    let keys = redis.command(&["KEYS", "*:snapshot:*"]);
    assert!(keys.starts_with("*2\r\n"), "{keys}");
    for key in keys.split("\r\n").filter(|line| line.contains("snapshot")) {
        let ttl = redis.command(&["TTL", key]);
        assert!((":590"..=":600").contains(&ttl.trim_end()), "{key}: {ttl}");
    }
}

#[tokio::test]
async fn what_redis_holds_can_be_looked_at() {
    let redis = Redis::start();
    let workers = open(&redis.url());
    let mut a = TestWorker::new(&workers, "a", 5);
    let mut b = TestWorker::new(&workers, "b", 6);
    a.store(0..1_000);
    eventually("two snapshots", PATIENCE, || workers.stats().snapshots_written >= 2).await;
    a.remove(0..10);
    b.store(5..8);
    let batches = 2 + 2 + 3;
    eventually("all is published", PATIENCE, || workers.stats().batches_published >= batches).await;
    let config = RedisConfig::new(redis.url().parse().unwrap());
    let holders = inspect::holders(&config, &BTreeSet::from([5, 7, 100, 9_999])).await.unwrap();
    let expected = [("a", BTreeSet::from([100])), ("b", BTreeSet::from([5, 7]))];
    assert_eq!(holders.read, BTreeMap::from(expected.map(|(name, held)| (WorkerId::new(name), held))));
    assert_eq!(inspect::blocks_of(&config, &a.id).await.unwrap().unwrap(), a.held);
    assert_eq!(inspect::blocks_of(&config, &WorkerId::new("c")).await.unwrap(), None);
    let mut summaries = inspect::workers(&config).await.unwrap().read;
    summaries.sort_by(|a, b| a.worker.cmp(&b.worker));
    let epochs: Vec<_> = summaries.iter().map(|summary| summary.at.epoch.0).collect();
    assert_eq!(epochs, [5, 6]);
    assert!(summaries.iter().all(|summary| summary.age < PATIENCE), "{summaries:?}");
}

#[tokio::test]
async fn a_key_that_cannot_be_read_hides_no_other() {
    let redis = Redis::start();
    let workers = open(&redis.url());
    let mut all: Vec<_> =
        ["a", "b", "c", "d"].map(|name| TestWorker::new(&workers, name, 1)).into_iter().collect();
    all.iter_mut().for_each(|worker| worker.store(0..10));
    eventually("four snapshots", PATIENCE, || workers.stats().snapshots_written >= 4).await;
    let published = workers.stats().batches_published;
    eventually("all is published", PATIENCE, || workers.stats().batches_published >= published.max(8)).await;
    let listed = redis.command(&["KEYS", "*:snapshot:*"]);
    let key = |worker: &str| {
        let key = listed.split("\r\n").find(|line| line.ends_with(&format!(":snapshot:{worker}")));
        key.expect("a snapshot").to_owned()
    };
    let (foreign, other_type) = (key("a"), key("b"));
    redis.command(&["SET", &foreign, "\u{7}of another version"]);
    redis.command(&["DEL", &other_type]);
    redis.command(&["LPUSH", &other_type, "x"]);
    redis.command(&["SET", "{tw1:63}:workers", "no sorted set"]);

    let config = RedisConfig::new(redis.url().parse().unwrap());
    let bad: BTreeSet<_> = [foreign.as_str(), &other_type, "{tw1:63}:workers"].into_iter().collect();
    let rest = [WorkerId::new("c"), WorkerId::new("d")];
    let found = inspect::workers(&config).await.unwrap();
    assert_eq!(found.unreadable.keys().map(String::as_str).collect::<BTreeSet<_>>(), bad);
    assert_eq!(
        found.read.into_iter().map(|summary| summary.worker).collect::<BTreeSet<_>>(),
        rest.clone().into()
    );
    let found = inspect::holders(&config, &BTreeSet::from([3])).await.unwrap();
    assert_eq!(found.unreadable.keys().map(String::as_str).collect::<BTreeSet<_>>(), bad);
    assert_eq!(found.read.into_keys().collect::<BTreeSet<_>>(), rest.into());
    for (worker, key) in [("a", &foreign), ("b", &other_type)] {
        let error = inspect::blocks_of(&config, &WorkerId::new(worker)).await.unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}
