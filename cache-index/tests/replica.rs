//! The replica against a plain model of it, and its rules one by one.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use thalweg_cache_index::{Applied, BlockEvent, EventBatch, Replica};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

fn worker(i: usize) -> WorkerId {
    WorkerId::new(format!("w{i}"))
}

fn batch(i: usize, epoch: u64, seq: u64, events: Vec<BlockEvent>) -> EventBatch {
    EventBatch { worker: worker(i), epoch: WorkerEpoch(epoch), seq, events }
}

fn matched(replica: &Replica, i: usize, epoch: u64, keys: &[u64], now: Instant) -> u32 {
    let holder = replica.enroll(&worker(i), WorkerEpoch(epoch)).unwrap();
    replica.lookup(keys, now).blocks(holder)
}

/// What a worker holds, in the plainest form.
#[derive(Default)]
struct Model {
    epoch: u64,
    seq: u64,
    held: BTreeSet<u64>,
    suspended: bool,
}

impl Model {
    fn prefix(&self, keys: &[u64]) -> u32 {
        if self.suspended { 0 } else { keys.iter().take_while(|k| self.held.contains(k)).count() as u32 }
    }

    fn apply(&mut self, events: &[BlockEvent]) {
        for event in events {
            match event {
                BlockEvent::Stored(keys) => self.held.extend(keys),
                BlockEvent::Removed(keys) => self.held.retain(|k| !keys.contains(k)),
                BlockEvent::Cleared => self.held.clear(),
            }
        }
    }
}

/// A forest of chains: each shares a random part of an earlier one.
fn chains(rng: &mut StdRng) -> Vec<Vec<u64>> {
    let mut chains: Vec<Vec<u64>> = vec![(0..rng.random_range(1..60)).map(|_| rng.random()).collect()];
    for _ in 0..12 {
        let base = chains.choose(rng).unwrap().clone();
        let shared = rng.random_range(0..=base.len());
        let own = rng.random_range(0..40);
        chains.push(base[..shared].iter().copied().chain((0..own).map(|_| rng.random())).collect());
    }
    chains
}

fn random_events(rng: &mut StdRng, chains: &[Vec<u64>]) -> Vec<BlockEvent> {
    (0..rng.random_range(0..4))
        .map(|_| {
            let chain = chains.choose(rng).unwrap();
            let cut = rng.random_range(0..=chain.len());
            match rng.random_range(0..20) {
                0 => BlockEvent::Cleared,
                1..11 => BlockEvent::Stored(chain[..cut].to_vec()),
                11..17 => BlockEvent::Removed(chain[cut..].iter().rev().copied().collect()),
                _ => BlockEvent::Removed(chain.choose(rng).into_iter().copied().collect()),
            }
        })
        .collect()
}

fn step(rng: &mut StdRng, replica: &Replica, models: &mut [Model], chains: &[Vec<u64>], now: Instant) {
    let i = rng.random_range(0..models.len());
    let model = &mut models[i];
    match rng.random_range(0..40) {
        0 => {
            *model = Model { epoch: model.epoch + 1, suspended: model.suspended, ..Model::default() };
            replica.enroll(&worker(i), WorkerEpoch(model.epoch)).unwrap();
        }
        1 => {
            let holder = replica.enroll(&worker(i), WorkerEpoch(model.epoch)).unwrap();
            model.suspended = !model.suspended;
            replica.suspend(holder, model.suspended);
        }
        2 => {
            let stale = batch(i, model.epoch, model.seq, vec![BlockEvent::Stored(chains[0].clone())]);
            assert_eq!(replica.apply(&stale), Applied::Stale);
        }
        3 => {
            let missing = rng.random_range(1..5);
            let events = random_events(rng, chains);
            model.seq += missing + 1;
            model.held.clear();
            model.apply(&events);
            assert_eq!(replica.apply(&batch(i, model.epoch, model.seq, events)), Applied::Gap { missing });
        }
        4 => drop(replica.tidy(now, rng.random_range(1..400))),
        5 => {
            replica.forget(&worker(i));
            *model = Model { epoch: model.epoch, ..Model::default() };
        }
        _ => {
            let events = random_events(rng, chains);
            model.seq += 1;
            model.apply(&events);
            assert_eq!(replica.apply(&batch(i, model.epoch, model.seq, events)), Applied::InOrder);
        }
    }
}

#[test]
fn random_histories_match_the_model() {
    let now = Instant::now();
    for seed in 0..60u64 {
        let mut rng = StdRng::seed_from_u64(seed);
        let chains = chains(&mut rng);
        let replica = Replica::default();
        let mut models: Vec<Model> = (0..rng.random_range(1..90)).map(|_| Model::default()).collect();
        for _ in 0..400 {
            step(&mut rng, &replica, &mut models, &chains, now);
            let chain = chains.choose(&mut rng).unwrap();
            let matches: BTreeMap<usize, u32> =
                (0..models.len()).map(|i| (i, matched(&replica, i, models[i].epoch, chain, now))).collect();
            for (i, model) in models.iter().enumerate() {
                assert_eq!(matches[&i], model.prefix(chain), "seed {seed}, worker {i}");
            }
        }
        while replica.tidy(now, 64) {}
        while replica.tidy(now, 64) {}
        let distinct: BTreeSet<u64> = models.iter().flat_map(|m| m.held.iter().copied()).collect();
        assert_eq!(replica.stats().blocks, distinct.len(), "seed {seed}: only what is held is kept");
        for (i, model) in models.iter().enumerate() {
            let holder = replica.enroll(&worker(i), WorkerEpoch(model.epoch)).unwrap();
            assert_eq!(replica.blocks_of(holder), model.held.len() as u64, "seed {seed}, worker {i}");
        }
    }
}

#[test]
fn a_restarted_worker_holds_nothing_before_its_first_event() {
    // With its clock as it should be, and set back meanwhile.
    for new in [11, 9] {
        let (replica, now, keys) = (Replica::default(), Instant::now(), [1, 2, 3]);
        replica.apply(&batch(0, 10, 1, vec![BlockEvent::Stored(keys.to_vec())]));
        assert_eq!(matched(&replica, 0, 10, &keys, now), 3);
        assert_eq!(matched(&replica, 0, new, &keys, now), 0, "the new epoch fences off the old");
        let late = batch(0, 10, 2, vec![BlockEvent::Stored(keys.to_vec())]);
        assert_eq!(replica.apply(&late), Applied::Stale, "a late batch of the old life");
        assert_eq!(matched(&replica, 0, new, &keys, now), 0);
        let first = batch(0, new, 1, vec![BlockEvent::Stored(vec![1, 2])]);
        assert_eq!(replica.apply(&first), Applied::InOrder);
        assert_eq!(matched(&replica, 0, new, &keys, now), 2);
    }
}

#[test]
fn a_hole_ends_the_prefix_until_it_is_filled() {
    let (replica, now) = (Replica::default(), Instant::now());
    let keys: Vec<u64> = (0..100).collect();
    let mut seq = 0;
    let mut check = |event, expected| {
        seq += 1;
        replica.apply(&batch(0, 1, seq, vec![event]));
        assert_eq!(matched(&replica, 0, 1, &keys, now), expected);
    };
    check(BlockEvent::Stored(keys.clone()), 100);
    check(BlockEvent::Removed(vec![40]), 40);
    check(BlockEvent::Removed(vec![0]), 0);
    check(BlockEvent::Stored(vec![0]), 40);
    check(BlockEvent::Stored(vec![40]), 100);
}

#[test]
fn expected_blocks_count_from_the_prefills_end_until_overdue() {
    let (replica, start) = (Replica::default(), Instant::now());
    let holder = replica.enroll(&worker(0), WorkerEpoch(1)).unwrap();
    let at = |ms| start + Duration::from_millis(ms);
    let keys: Arc<[u64]> = (0..50).collect();
    let other: Vec<u64> = (0..30).chain(1000..1010).collect();
    let booked = replica.expect(holder, Arc::clone(&keys), at(100), at(5_100)).unwrap();
    let check = |now, chain: &[u64], expected| {
        assert_eq!(replica.lookup(chain, at(now)).blocks(holder), expected, "at {now} ms");
    };
    check(99, &keys, 0);
    check(100, &keys, 50);
    check(100, &other, 30);
    check(5_099, &keys, 50);
    check(5_100, &keys, 0);
    replica.withdraw(booked);
    check(200, &keys, 0);

    replica.expect(holder, Arc::clone(&keys), at(100), at(5_100));
    assert_eq!(matched(&replica, 0, 2, &keys, at(200)), 0, "a restart voids expectations");
    assert_eq!(replica.stats().expectations, 1);
    replica.tidy(at(5_100), 1);
    assert_eq!(replica.stats().expectations, 0);
}

#[test]
fn forgetting_a_large_worker_is_immediate_and_swept_in_pieces() {
    let (replica, now) = (Replica::default(), Instant::now());
    let keys: Vec<u64> = (0..100_000u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    for i in 0..2 {
        replica.apply(&batch(i, 1, 1, vec![BlockEvent::Stored(keys.clone())]));
    }
    replica.forget(&worker(0));
    let matches = replica.lookup(&keys, now);
    let holder = replica.enroll(&worker(1), WorkerEpoch(1)).unwrap();
    assert_eq!(matches.blocks(holder), 100_000);
    let mut pieces = 1;
    while replica.tidy(now, 10_000) {
        pieces += 1;
    }
    assert_eq!(pieces, 10, "each piece is bounded");
    assert_eq!(replica.stats().blocks, 100_000, "the other worker's blocks stay");
}

#[test]
fn a_workers_own_word_on_the_last_block_ends_what_was_expected() {
    let (replica, now) = (Replica::default(), Instant::now());
    let holders = [0, 1].map(|i| replica.enroll(&worker(i), WorkerEpoch(1)).unwrap());
    let keys: Arc<[u64]> = Arc::from([1, 2, 3]);
    let held = || holders.map(|holder| replica.lookup(&keys, now).blocks(holder));
    let mut seq = 0;
    let mut say = |event| {
        seq += 1;
        replica.apply(&batch(0, 1, seq, vec![event]));
    };
    let expect =
        |holder| replica.expect(holder, Arc::clone(&keys), now, now + Duration::from_secs(5)).unwrap();

    let booked = holders.map(expect);
    say(BlockEvent::Stored(vec![1, 2]));
    assert_eq!((held(), replica.stats().expectations), ([3, 3], 2), "the last block is yet to come");
    say(BlockEvent::Stored(vec![3, 4]));
    assert_eq!((held(), replica.stats().expectations), ([3, 3], 1), "told by the worker now");
    say(BlockEvent::Removed(vec![4, 3, 2]));
    assert_eq!(held(), [1, 3], "evicted before the expectation would have lapsed");
    replica.withdraw(booked[0]);
    assert_eq!(held(), [1, 3], "it was gone already");

    say(BlockEvent::Stored(vec![2, 3]));
    expect(holders[0]);
    assert_eq!((held(), replica.stats().expectations), ([3, 3], 2), "of a chain that is held already");
    say(BlockEvent::Removed(vec![3]));
    assert_eq!((held(), replica.stats().expectations), ([2, 3], 1), "evicted instead");
}

#[test]
fn more_workers_than_numbers_are_refused_and_numbers_come_back() {
    let (replica, now) = (Replica::default(), Instant::now());
    for i in 0..65_535 {
        assert!(replica.enroll(&worker(i), WorkerEpoch(1)).is_some(), "worker {i}");
    }
    assert_eq!(replica.enroll(&worker(70_000), WorkerEpoch(1)), None);
    let full = batch(70_000, 1, 1, vec![BlockEvent::Stored(vec![1])]);
    assert_eq!(replica.apply(&full), Applied::Full);
    replica.forget(&worker(5));
    while replica.tidy(now, 1_000) {}
    assert!(replica.enroll(&worker(70_000), WorkerEpoch(1)).is_some());
}

#[test]
fn what_does_not_change_is_found_in_full_while_all_around_it_does() {
    let replica = Replica::default();
    let chain: Vec<u64> = (1..400u64).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
    replica.apply(&batch(0, 1, 1, vec![BlockEvent::Stored(chain.clone())]));
    let steady = replica.enroll(&worker(0), WorkerEpoch(1)).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut lookups = 0u64;
                    while !done.load(std::sync::atomic::Ordering::Relaxed) {
                        let found = replica.lookup(&chain, Instant::now());
                        assert_eq!(found.blocks(steady), chain.len() as u32, "lookup {lookups}");
                        lookups += 1;
                    }
                    lookups
                })
            })
            .collect();
        let mut rng = StdRng::seed_from_u64(11);
        let mut seqs = [0; 40];
        for round in 0..6_000u64 {
            // Sets of holders come and go, and so do slots among those of the chain.
            let i = rng.random_range(1..seqs.len());
            let (from, to) = (rng.random_range(0..chain.len()), rng.random_range(0..chain.len()));
            let mut part = chain[from.min(to)..from.max(to)].to_vec();
            part.extend((0..20).map(|_| rng.random_range(0..500u64)));
            let event = match rng.random_range(0..20) {
                0 => BlockEvent::Cleared,
                1..11 => BlockEvent::Stored(part),
                _ => BlockEvent::Removed(part),
            };
            seqs[i] += 1;
            replica.apply(&batch(i, 1, seqs[i], vec![event]));
            if round % 50 == 0 {
                replica.tidy(Instant::now(), 2_000);
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let lookups: u64 = readers.into_iter().map(|reader| reader.join().unwrap()).sum();
        assert!(lookups > 0, "nobody looked");
    });
}
