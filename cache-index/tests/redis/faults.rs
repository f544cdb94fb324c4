//! What happens while Redis is frozen, gone, empty or refuses.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use thalweg_cache_index::redis::Limits;
use thalweg_cache_index::{BlockEvent, CacheIndex};
use thalweg_harness::Proxy;
use thalweg_harness::redis::Redis;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

use crate::support::{PATIENCE, RECOVERY, TestWorker, eventually, long, meanwhile, open, open_with};

/// A publisher or a lookup that waits for Redis would take seconds.
const AT_ONCE: Duration = Duration::from_millis(100);

#[tokio::test]
async fn frozen_redis_delays_nothing_and_is_caught_up_with_after_its_thaw() {
    // cache-index-08.
    for binary in Redis::binaries() {
        let redis = Redis::of(&binary, &[]);
        let (workers, router) = (open(&redis.url()), open(&redis.url()));
        let mut worker = TestWorker::new(&workers, "w", 1);
        worker.store(0..1_000);
        eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
        redis.freeze();
        let chain: Vec<u64> = (0..1_000).collect();
        let begin = Instant::now();
        for i in 0..1_000u64 {
            worker.store([2_000 + i]);
        }
        assert!(begin.elapsed() < AT_ONCE, "publishing took {:?}", begin.elapsed());
        let both = || workers.stats().degraded && router.stats().degraded;
        eventually("both notice", PATIENCE, both).await;
        meanwhile("matching on the last replica", Duration::from_secs(long(1, 30)), || {
            let begin = Instant::now();
            worker.matched_by(&router, &chain) == 1_000 && begin.elapsed() < AT_ONCE
        })
        .await;
        redis.thaw();
        let recovered =
            || worker.is_known_to(&router) && !workers.stats().degraded && !router.stats().degraded;
        let took = eventually("recovery", RECOVERY, recovered).await;
        eprintln!("{binary}: recovered {took:?} after the thaw");
    }
}

#[tokio::test]
async fn killed_and_restarted_empty_it_is_filled_anew() {
    for binary in Redis::binaries() {
        let mut redis = Redis::of(&binary, &[]);
        let (workers, router) = (open(&redis.url()), open(&redis.url()));
        let mut worker = TestWorker::new(&workers, "w", 1);
        let mut idle = TestWorker::new(&workers, "idle", 1);
        worker.store(0..1_000);
        idle.store(0..10);
        let known = || worker.is_known_to(&router) && idle.is_known_to(&router);
        eventually("both are known", PATIENCE, known).await;
        redis.kill();
        worker.remove(500..600);
        worker.store(5_000..6_000);
        eventually("the router notices", PATIENCE, || router.stats().degraded).await;
        assert_eq!(idle.matched_by(&router, &[0, 1, 2]), 3, "the last replica serves on");
        redis.restart_empty();
        let recovered =
            || worker.is_known_to(&router) && !workers.stats().degraded && !router.stats().degraded;
        let took = eventually("recovery", RECOVERY, recovered).await;
        eprintln!("{binary}: recovered {took:?} after the restart");
        let late = open(&redis.url());
        late.replica();
        let known = || worker.is_known_to(&late) && idle.is_known_to(&late);
        eventually("a router that knew nothing finds both", RECOVERY, known).await;
    }
}

#[tokio::test]
async fn answers_that_take_two_seconds_delay_nothing() {
    let redis = Redis::start();
    let proxy = Proxy::start(SocketAddr::from((Ipv4Addr::LOCALHOST, redis.port)));
    let url = format!("redis://{}", proxy.address());
    let (workers, router) = (open(&url), open(&url));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..100);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    proxy.delay(Duration::from_secs(2));
    worker.store(100..200);
    eventually("both notice", PATIENCE, || workers.stats().degraded && router.stats().degraded).await;
    let begin = Instant::now();
    worker.store(200..300);
    assert_eq!(worker.matched_by(&router, &[0, 1, 2]), 3);
    assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
    proxy.forward();
    let recovered = || worker.is_known_to(&router) && !workers.stats().degraded && !router.stats().degraded;
    eventually("recovery", RECOVERY, recovered).await;
}

#[tokio::test]
async fn a_router_may_start_before_redis() {
    let mut redis = Redis::start();
    redis.kill();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..10);
    assert_eq!(worker.matched_by(&router, &[0, 1]), 0);
    eventually("both notice", PATIENCE, || workers.stats().degraded && router.stats().degraded).await;
    redis.restart_empty();
    eventually("it is known", RECOVERY, || worker.is_known_to(&router)).await;
    eventually("all shards are read", RECOVERY, || router.stats().bootstrapped).await;
}

#[tokio::test]
async fn emptied_under_open_connections_it_is_filled_anew() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..1_000);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    eventually("a snapshot", PATIENCE, || workers.stats().snapshots_written == 1).await;
    assert_eq!(redis.command(&["FLUSHALL"]), "+OK\r\n");
    let late = open(&redis.url());
    late.replica();
    eventually("a late router knows it", RECOVERY, || worker.is_known_to(&late)).await;
    assert!(worker.is_known_to(&router));
}

#[tokio::test]
async fn an_overflow_begins_a_new_generation_with_a_snapshot() {
    let redis = Redis::start();
    let limits = Limits { pending_bytes: 10_000, ..Limits::default() };
    let (workers, router) = (open_with(&redis.url(), limits), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..100);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    redis.freeze();
    for i in 0..100u64 {
        worker.store(1_000 * (i + 1)..1_000 * (i + 1) + 100);
        worker.remove([i]);
    }
    eventually("batches are dropped", PATIENCE, || workers.stats().batches_dropped >= 100).await;
    eventually("both notice", PATIENCE, || workers.stats().degraded && router.stats().degraded).await;
    redis.thaw();
    eventually("the snapshot makes up", RECOVERY, || worker.is_known_to(&router)).await;
    assert!(router.stats().gaps >= 1 && router.stats().snapshots_read >= 1, "{:?}", router.stats());
}

#[tokio::test]
async fn a_stream_trimmed_under_a_slow_reader_is_a_gap_that_closes() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..10);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    // Entries that were never read vanish, as when a router was away for longer than the stream reaches back.
    let stream = redis.command(&["KEYS", "{tw1:*}"]);
    let stream = stream.split("\r\n").nth(2).unwrap();
    redis.freeze();
    worker.store(10..20);
    redis.thaw();
    assert!(redis.command(&["XTRIM", stream, "MAXLEN", "0"]).starts_with(':'));
    worker.store(20..30);
    worker.publish(vec![BlockEvent::Removed(vec![0])]);
    eventually("it is known again", PATIENCE, || worker.is_known_to(&router)).await;
    // A router that starts now finds a snapshot that does not join the stream any more, unless it was rewritten.
    let late = open(&redis.url());
    late.replica();
    eventually("a late router knows it", PATIENCE, || worker.is_known_to(&late)).await;
}

#[tokio::test]
async fn a_worker_that_restarts_under_load_is_known_at_once() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..10);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    let before = workers.stats();
    let mut worker = TestWorker::new(&workers, "w", 2);
    let mut block = 0;
    let mut store = || {
        block += 1;
        worker.store([block]);
    };
    // Nobody has told the router of the new epoch when its first batches and its snapshot come.
    eventually("batches that the router takes for another life's", PATIENCE, || {
        store();
        let stats = workers.stats();
        stats.snapshots_written > before.snapshots_written
            && stats.batches_published > before.batches_published + 100
    })
    .await;
    let holder = router.replica().enroll(&WorkerId::new("w"), WorkerEpoch(2)).unwrap();
    eventually("all of them are known while more come", RECOVERY, || {
        store();
        router.stats().workers_behind == 0 && router.replica().blocks_of(holder) > 100
    })
    .await;
    eventually("the rest", RECOVERY, || worker.is_known_to(&router)).await;
    assert!(router.stats().gaps <= 1, "{:?}", router.stats());
}

#[tokio::test]
async fn refusals_degrade_and_end() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..10);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    let other = Redis::start();
    let port = other.port.to_string();
    type Commands<'a> = [&'a [&'a str]; 1];
    let cases: [(&str, Commands<'_>, Commands<'_>); 4] = [
        ("OOM", [&["CONFIG", "SET", "maxmemory", "1"]], [&["CONFIG", "SET", "maxmemory", "0"]]),
        ("READONLY", [&["REPLICAOF", "127.0.0.1", &port]], [&["REPLICAOF", "NO", "ONE"]]),
        ("XADD", [&["ACL", "SETUSER", "default", "-xadd"]], [&["ACL", "SETUSER", "default", "+xadd"]]),
        ("XRANGE", [&["ACL", "SETUSER", "default", "-xrange"]], [&["ACL", "SETUSER", "default", "+xrange"]]),
    ];
    for (name, begin, end) in cases {
        begin.iter().for_each(|command| assert_eq!(redis.command(command), "+OK\r\n"));
        worker.store(worker.held.len() as u64..worker.held.len() as u64 + 10);
        eventually(name, PATIENCE, || workers.stats().degraded).await;
        let before = workers.stats().reconnects;
        meanwhile("degraded, as the last replica serves on,", Duration::from_secs(2), || {
            workers.stats().degraded && worker.matched_by(&router, &[0, 1, 2]) == 3
        })
        .await;
        let reconnects = workers.stats().reconnects - before;
        assert!(reconnects <= 10, "{name}: {reconnects} attempts within two seconds");
        end.iter().for_each(|command| assert_eq!(redis.command(command), "+OK\r\n"));
        let recovered = || worker.is_known_to(&router) && !workers.stats().degraded;
        eventually("recovery", RECOVERY, recovered).await;
    }
}

#[tokio::test]
async fn a_reader_that_cannot_have_snapshots_is_degraded_until_it_can() {
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let mut worker = TestWorker::new(&workers, "w", 1);
    worker.store(0..10);
    eventually("it is known", PATIENCE, || worker.is_known_to(&router)).await;
    let acl = |rules: &[&str]| {
        assert_eq!(redis.command(&[&["ACL", "SETUSER", "default"], rules].concat()), "+OK\r\n");
    };
    acl(&["-get", "-getrange"]);
    let stranger = router.replica().enroll(&WorkerId::new("stranger"), WorkerEpoch(1));
    assert!(stranger.is_some());
    eventually("a snapshot is missed", PATIENCE, || router.stats().degraded).await;
    worker.store(10..20);
    meanwhile("degraded, as entries come", Duration::from_secs(3), || router.stats().degraded).await;
    assert_eq!(worker.matched_by(&router, &[0, 1, 12]), 3);
    acl(&["+get", "+getrange"]);
    eventually("recovery", RECOVERY, || !router.stats().degraded).await;
}

#[tokio::test]
async fn a_large_worker_forgotten_stops_matching_at_once_while_lookups_go_on() {
    // cache-index-10.
    let redis = Redis::start();
    let (workers, router) = (open(&redis.url()), open(&redis.url()));
    let replica = router.replica();
    let key = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let keys: Vec<u64> = (0..1_000_000).map(key).collect();
    let (mut large, mut other) =
        (TestWorker::new(&workers, "large", 1), TestWorker::new(&workers, "other", 1));
    for piece in keys.chunks(100_000) {
        large.store(piece.iter().copied());
    }
    other.store(keys[..2_000].iter().copied());
    let holder = replica.enroll(&large.id, large.epoch).unwrap();
    eventually("all are known", PATIENCE, || {
        replica.blocks_of(holder) == 1_000_000 && other.is_known_to(&router)
    })
    .await;
    let begin = Instant::now();
    replica.forget(&large.id);
    let other_holder = replica.enroll(&other.id, other.epoch).unwrap();
    let matches = replica.lookup(&keys[..2_000], Instant::now());
    assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
    assert_eq!((matches.blocks(holder), matches.blocks(other_holder)), (0, 2_000));
    let mut slowest = Duration::ZERO;
    let mut sweeping = true;
    while sweeping {
        sweeping = replica.tidy(Instant::now(), 10_000);
        let begin = Instant::now();
        assert_eq!(replica.lookup(&keys[..2_000], begin).blocks(other_holder), 2_000);
        slowest = slowest.max(begin.elapsed());
    }
    assert!(slowest < Duration::from_millis(100), "{slowest:?}");
}
