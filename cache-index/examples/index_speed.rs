//! What the index over Redis costs, against the limits that it was designed for.
//!
//! `cargo run --release -p thalweg-cache-index --example index_speed [entries] [seconds]`: entries to start with, 10
//! million by default, and seconds of an hour's event volume to replay, all 3,600 by default.
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_cache_index::{BlockEvent, CacheIndex, EventBatch, IndexStats, RedisConfig, RedisIndex, Replica};
use thalweg_harness::redis::Redis;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

/// Workers of the cluster that lookups and starts are measured with, and of the hour.
const WORKERS: usize = 1_000;
const HOUR_WORKERS: usize = 100;
/// Blocks of a batch: 500 a second, every 50 ms.
const BATCH_BLOCKS: usize = 25;
const BATCHES_PER_SECOND: usize = 20;
/// Blocks that a worker of the hour holds before each new one replaces an old one.
const HELD: usize = 20_000;
const CHAIN: usize = 2_000;
/// Batches under way at most, well below what is given up.
const UNDER_WAY: u64 = 20_000;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut args = std::env::args().skip(1).map(|arg| arg.parse().unwrap());
    let entries: usize = args.next().unwrap_or(10_000_000);
    let seconds: usize = args.next().unwrap_or(3_600);
    apply_rate(entries.min(10_000_000));
    start_of_a_router(entries).await;
    lookups_under_events(entries.min(10_000_000)).await;
    hour(seconds).await;
}

/// Batches of one worker after another, numbered.
struct Source {
    rng: StdRng,
    seqs: Vec<u64>,
}

impl Source {
    fn new(workers: usize) -> Self {
        Self { rng: StdRng::seed_from_u64(7), seqs: vec![0; workers] }
    }

    fn batch(&mut self, i: usize, events: Vec<BlockEvent>) -> EventBatch {
        self.seqs[i] += 1;
        let worker = WorkerId::new(format!("worker-{i}"));
        EventBatch { worker, epoch: WorkerEpoch(1), seq: self.seqs[i], events }
    }

    fn stored(&mut self, i: usize, blocks: usize) -> EventBatch {
        let keys = (0..blocks).map(|_| self.rng.random()).collect();
        self.batch(i, vec![BlockEvent::Stored(keys)])
    }
}

/// One thread that takes batches in, and what an entry of the replica takes.
fn apply_rate(entries: usize) {
    let replica = Replica::default();
    let mut source = Source::new(WORKERS);
    let before = resident_bytes();
    let mut busy = Duration::ZERO;
    for n in 0..entries / BATCH_BLOCKS {
        let batch = source.stored(n % WORKERS, BATCH_BLOCKS);
        let start = Instant::now();
        replica.follow(0, &batch, start);
        busy += start.elapsed();
    }
    let rate = entries as f64 / busy.as_secs_f64() / 1e6;
    println!("apply: {rate:.2} M block events/s on one core (at least 1)");
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        println!("replica: {:.1} bytes an entry (at most 40)", (after - before) as f64 / entries as f64);
    }
}

/// How soon a router knows everything that is in Redis.
async fn start_of_a_router(entries: usize) {
    let redis = Redis::start();
    let workers = WORKERS.min(100);
    let publisher = open(&redis);
    let mut source = Source::new(workers);
    let each = entries / workers;
    for i in 0..workers {
        publisher.publish(source.stored(i, each));
        until(&publisher, |stats| stats.snapshots_written > i as u64).await;
    }
    let usage = snapshot_bytes(&redis);
    println!("Redis: {:.2} bytes an entry in a snapshot (at most 12)", usage as f64 / each as f64);
    println!("Redis: {} MB with {entries} entries", used_memory(&redis) >> 20);
    let start = Instant::now();
    let router = open(&redis);
    let replica = router.replica();
    until(&router, |stats| stats.bootstrapped).await;
    let took = start.elapsed().as_secs_f64();
    let blocks = replica.stats().blocks;
    println!(
        "start: {blocks} entries in {took:.2} s, {:.2} M/s (10 M in 5 s, 100 M in 60 s)",
        rate(blocks, took)
    );
}

/// Lookups over all workers while events come in.
async fn lookups_under_events(entries: usize) {
    let replica = Arc::new(Replica::default());
    let mut source = Source::new(WORKERS);
    let chain: Vec<u64> = (0..CHAIN).map(|_| source.rng.random()).collect();
    for i in 0..WORKERS {
        let keys = chain[..CHAIN * (i % 16 + 1) / 16].to_vec();
        let batch = source.batch(i, vec![BlockEvent::Stored(keys)]);
        replica.follow(0, &batch, Instant::now());
    }
    for n in 0..entries.saturating_sub(WORKERS * CHAIN / 2) / BATCH_BLOCKS {
        let batch = source.stored(n % WORKERS, BATCH_BLOCKS);
        replica.follow(0, &batch, Instant::now());
    }
    measure("lookup, 16 depths, no events", &replica, &chain);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, applied_to) = (Arc::clone(&stop), Arc::clone(&replica));
    let events = std::thread::spawn(move || {
        let start = Instant::now();
        let mut applied = 0;
        while !stopped.load(Ordering::Relaxed) {
            // 100,000 a second, whenever they are due.
            if (applied as f64) < start.elapsed().as_secs_f64() * 100_000.0 {
                let batch = source.stored(applied / BATCH_BLOCKS % WORKERS, BATCH_BLOCKS);
                applied_to.follow(0, &batch, Instant::now());
                applied += BATCH_BLOCKS;
            } else {
                std::thread::yield_now();
            }
        }
        applied as f64 / start.elapsed().as_secs_f64()
    });
    measure("lookup, 16 depths, under events", &replica, &chain);
    stop.store(true, Ordering::Relaxed);
    println!("events meanwhile: {:.0} a second", events.join().unwrap());
}

/// An hour of 100 workers that store 500 blocks a second and evict as many, as fast as it goes.
async fn hour(seconds: usize) {
    let redis = Redis::start();
    let (publisher, router) = (open(&redis), open(&redis));
    let replica = router.replica();
    let mut source = Source::new(HOUR_WORKERS);
    let start = Instant::now();
    let (mut peak, mut events) = (0, 0);
    let key = |i: usize, n: usize| ((i as u64) << 40 | n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for n in 0..seconds * BATCHES_PER_SECOND {
        for i in 0..HOUR_WORKERS {
            let first = n * BATCH_BLOCKS;
            let mut batch =
                vec![BlockEvent::Stored((first..first + BATCH_BLOCKS).map(|n| key(i, n)).collect())];
            if let Some(old) = first.checked_sub(HELD) {
                batch.insert(0, BlockEvent::Removed((old..old + BATCH_BLOCKS).map(|n| key(i, n)).collect()));
            }
            events += batch.len() * BATCH_BLOCKS;
            publisher.publish(source.batch(i, batch));
        }
        if n % 20 == 0 {
            let sent: u64 = source.seqs.iter().sum();
            until(&publisher, |stats| stats.batches_published + stats.batches_dropped + UNDER_WAY > sent)
                .await;
            while replica.tidy(Instant::now(), 10_000) {}
        }
        if n % 1_000 == 0 {
            peak = used_memory(&redis).max(peak);
        }
    }
    until(&publisher, |stats| flushed(&source, stats)).await;
    let took = start.elapsed().as_secs_f64();
    let now = used_memory(&redis);
    println!(
        "an hour's volume, {seconds} s of it: {took:.1} s, {:.2} M block events/s, Redis {} MB, peak {} MB",
        rate(events, took),
        now >> 20,
        peak.max(now) >> 20
    );
    let last = |i: usize| u64::MAX - i as u64;
    for i in 0..HOUR_WORKERS {
        publisher.publish(source.batch(i, vec![BlockEvent::Stored(vec![last(i)])]));
    }
    until(&router, |_| (0..HOUR_WORKERS).all(|i| held(&replica, i, last(i)))).await;
    let took = start.elapsed().as_secs_f64();
    println!(
        "a router follows: {took:.1} s, {:.2} M block events/s; {:?}",
        rate(events, took),
        router.stats()
    );
}

fn held(replica: &Replica, i: usize, key: u64) -> bool {
    let holder = replica.enroll(&WorkerId::new(format!("worker-{i}")), WorkerEpoch(1)).unwrap();
    replica.lookup(&[key], Instant::now()).blocks(holder) == 1
}

fn flushed(source: &Source, stats: IndexStats) -> bool {
    stats.batches_published + stats.batches_dropped >= source.seqs.iter().sum()
}

fn open(redis: &Redis) -> RedisIndex {
    RedisIndex::open(RedisConfig::new(redis.url().parse().unwrap())).unwrap()
}

async fn until(index: &RedisIndex, holds: impl Fn(IndexStats) -> bool) {
    let mut ticks = tokio::time::interval(Duration::from_millis(1));
    while !holds(index.stats()) {
        ticks.tick().await;
    }
}

fn measure(name: &str, replica: &Replica, keys: &[u64]) {
    let mut micros: Vec<f64> = (0..20_000)
        .map(|_| {
            let start = Instant::now();
            black_box(replica.lookup(black_box(keys), start));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    let at = |q: f64| micros[((micros.len() - 1) as f64 * q) as usize];
    println!("{name}: p50 {:.2} us, p99 {:.2} us", at(0.5), at(0.99));
}

fn rate(count: usize, seconds: f64) -> f64 {
    count as f64 / seconds / 1e6
}

fn used_memory(redis: &Redis) -> u64 {
    let info = redis.command(&["INFO", "memory"]);
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    line.trim().parse().unwrap()
}

/// Of the first snapshot that comes up.
fn snapshot_bytes(redis: &Redis) -> u64 {
    let keys = redis.command(&["KEYS", "*:snapshot:worker-0"]);
    let key = keys.lines().find(|line| line.contains("snapshot")).unwrap();
    redis.command(&["MEMORY", "USAGE", key, "SAMPLES", "0"]).trim().trim_start_matches(':').parse().unwrap()
}

fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    statm.split_whitespace().nth(1)?.parse::<usize>().ok().map(|pages| pages * 4096)
}
