//! What a lookup costs: 2,000 blocks over 1,000 workers and 10 million (block, worker) entries.
//!
//! `cargo run --release -p thalweg-cache-index --example lookup [entries]`
#![allow(clippy::print_stdout, reason = "a benchmark prints its figures")]

use std::hint::black_box;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_cache_index::{BlockEvent, EventBatch, Replica};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

const WORKERS: usize = 1_000;
const CHAIN: usize = 2_000;

fn main() {
    let entries: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(10_000_000);
    let mut rng = StdRng::seed_from_u64(7);
    let replica = Replica::default();
    let mut seqs = vec![0u64; WORKERS];
    let mut store = |i: usize, keys: Vec<u64>| {
        seqs[i] += 1;
        let events = vec![BlockEvent::Stored(keys)];
        replica.apply(&EventBatch {
            worker: WorkerId::new(format!("w{i}")),
            epoch: WorkerEpoch(1),
            seq: seqs[i],
            events,
        });
    };

    let before = resident_bytes();
    let start = Instant::now();
    let few_depths = stored_chain(&mut rng, 16, &mut store);
    let many_depths = stored_chain(&mut rng, WORKERS, &mut store);
    // The rest is interleaved: each worker stores its own conversations in batches of up to 64 blocks.
    let mut stored = 2 * WORKERS * CHAIN / 2;
    while stored < entries {
        let batch = rng.random_range(1..=64).min(entries - stored);
        store(rng.random_range(0..WORKERS), (0..batch).map(|_| rng.random()).collect());
        stored += batch;
    }
    println!("{stored} entries in {:.1} s", start.elapsed().as_secs_f64());
    if let (Some(before), Some(after)) = (before, resident_bytes()) {
        println!("{:.1} bytes an entry", (after - before) as f64 / stored as f64);
    }
    println!("{:?}", replica.stats());
    measure("16 depths, 1,000 workers", &replica, &few_depths);
    measure("1,000 depths, 1,000 workers", &replica, &many_depths);
    measure("a miss", &replica, &(0..CHAIN as u64).map(|_| rng.random()).collect::<Vec<_>>());
}

/// A chain that every worker holds down to one of `depths` depths.
fn stored_chain(rng: &mut StdRng, depths: usize, store: &mut impl FnMut(usize, Vec<u64>)) -> Vec<u64> {
    let chain: Vec<u64> = (0..CHAIN).map(|_| rng.random()).collect();
    for i in 0..WORKERS {
        store(i, chain[..CHAIN * (i % depths + 1) / depths].to_vec());
    }
    chain
}

fn measure(name: &str, replica: &Replica, keys: &[u64]) {
    let mut evict = vec![0u64; 8 << 20];
    let mut micros: Vec<f64> = (0..2_000)
        .map(|round| {
            if round % 20 == 0 {
                evict.iter_mut().for_each(|word| *word = word.wrapping_add(1));
            }
            let start = Instant::now();
            black_box(replica.lookup(black_box(keys), start));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_by(f64::total_cmp);
    let at = |q: f64| micros[((micros.len() - 1) as f64 * q) as usize];
    println!("{name}: p50 {:.2} us, p99 {:.2} us (every 20th with cold caches)", at(0.5), at(0.99));
}

fn resident_bytes() -> Option<usize> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    statm.split_whitespace().nth(1)?.parse::<usize>().ok().map(|pages| pages * 4096)
}
