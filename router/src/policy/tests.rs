use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use thalweg_proto::v1;

use super::*;

const ALL: [Policy; 5] =
    [Policy::Cost, Policy::LeastQueue, Policy::RoundRobin, Policy::PowerOfTwo, Policy::PrefixHash];

fn speed() -> Arc<Speed> {
    let step = |batch, step_seconds| v1::DecodeRate { batch, step_seconds, samples: 100 };
    let decode = vec![step(1, 0.010), step(8, 0.0135), step(64, 0.060)];
    Arc::new(
        Speed::of_table(&v1::Rates { prefill_tokens_per_second: 2_000.0, prefill_samples: 0, decode })
            .unwrap(),
    )
}

fn ask(prompt_tokens: u32) -> Ask {
    Ask { prompt_tokens, choices: 1, expected_output: 100.0, prefix_key: 7, harm_weight: 1.0 }
}

fn idle(name_hash: u64) -> Candidate {
    Candidate {
        name_hash,
        running: 0,
        waiting: 0,
        recent_sequences: 0.0,
        max_num_seqs: 64,
        prefill_tokens_ahead: 0,
        running_context_tokens: 0,
        kv_blocks_available: 10_000,
        block_tokens: 16,
        cached_tokens: 0,
        speed: speed(),
    }
}

/// A worker with so many sequences, as lately.
fn steady(running: u32, name_hash: u64) -> Candidate {
    Candidate { running, recent_sequences: running.into(), ..idle(name_hash) }
}

fn near(got: f64, expected: f64, what: &str) {
    assert!((got - expected).abs() < 1e-9, "{what}: {got}, not {expected}");
}

#[test]
fn each_term_of_the_cost_is_the_formulas() {
    let check = |ask: &Ask, worker: Candidate, [wait, prefill, decode, harm]: [f64; 4]| {
        let mean = cost::mean_batch(std::slice::from_ref(&worker));
        let cost = cost::predict(ask, &worker, mean);
        near(cost.wait, wait, "wait");
        near(cost.prefill, prefill, "prefill");
        near(cost.decode, decode, "decode");
        near(cost.harm, harm, "harm");
        near(cost.total(), wait + prefill + decode + harm, "total");
    };
    check(&ask(1_000), idle(0), [0.0, 0.5, 1.0, 0.0]);
    check(&ask(1_000), Candidate { cached_tokens: 800, ..idle(0) }, [0.0, 0.1, 1.0, 0.0]);
    check(&ask(1_000), Candidate { cached_tokens: 1_000, ..idle(0) }, [0.0, 0.0005, 1.0, 0.0]);
    check(&ask(1_000), Candidate { prefill_tokens_ahead: 4_000, ..idle(0) }, [2.0, 0.5, 1.0, 0.0]);
    // Seven run: a step of 13 ms becomes one of 13.5; 50 tokens each to come; each waits for our prefill, and so do the
    // seven after them.
    let seven = steady(7, 0);
    check(&ask(1_000), seven.clone(), [0.0, 0.5, 1.35, 7.0 * 50.0 * 0.0005 + 14.0 * 0.5]);
    check(&Ask { harm_weight: 0.0, ..ask(1_000) }, seven, [0.0, 0.5, 1.35, 0.0]);
    // Ten for a moment where four are the mean.
    let ten = cost::predict(&ask(1_000), &steady(10, 0), 4.0);
    near(ten.decode, 1.35, "decode");
    near(ten.harm, 7.0 * 50.0 * 0.0005 + 20.0 * 0.5, "harm");
    // All 8 slots taken and one more waits: two must end, one each 100 * 13.5 ms / 8.
    let full = Candidate { running: 8, waiting: 1, max_num_seqs: 8, ..idle(0) };
    near(cost::predict(&ask(16), &full, 8.0).wait, 2.0 * 100.0 * 0.0135 / 8.0, "slot wait");
    // 63 blocks are needed, 3 are free, each of 2 running sequences will give back 30.
    let no_blocks = Candidate { running: 2, running_context_tokens: 960, kv_blocks_available: 3, ..idle(0) };
    near(cost::predict(&ask(1_000), &no_blocks, 2.0).wait, 2.0 * 100.0 * 0.0105 / 2.0, "block wait");
}

#[test]
fn the_worker_that_ends_first_is_picked() {
    // routing-03.
    let check = |policy, prompt, candidates: &[Candidate], expected: usize| {
        let mut rng = StdRng::seed_from_u64(1);
        let got = pick(policy, &ask(prompt), candidates, 0, &mut rng).unwrap().index;
        assert_eq!(got, expected, "{policy:?} of {candidates:?}");
    };
    let busy = Candidate { prefill_tokens_ahead: 2_000, ..steady(8, 2) };
    // A cached prefix wins among equals, and loses against a queue that costs more than recomputing.
    check(Policy::Cost, 1_000, &[idle(1), Candidate { cached_tokens: 960, ..idle(2) }], 1);
    check(Policy::Cost, 1_000, &[idle(1), Candidate { cached_tokens: 960, ..busy.clone() }], 0);
    check(Policy::Cost, 16_000, &[idle(1), Candidate { cached_tokens: 15_900, ..busy.clone() }], 1);
    // A miss does not go to the worker that is overloaded, whatever lies in its cache.
    check(Policy::Cost, 1_000, &[steady(30, 1), idle(2)], 1);
    // A prefix is not left for a worker that is less busy for a moment, but a hot one is copied to an idle worker.
    let [holder, other] = [(6, 1), (3, 2)].map(|(running, name)| Candidate { running, ..steady(6, name) });
    let holds = |worker| Candidate { cached_tokens: 480, ..worker };
    check(Policy::Cost, 560, &[holds(holder), other], 0);
    check(Policy::Cost, 560, &[holds(steady(12, 1)), idle(2)], 1);
    check(Policy::LeastQueue, 1_000, &[busy.clone(), idle(1)], 1);
    check(Policy::LeastQueue, 16_000, &[Candidate { cached_tokens: 15_900, ..busy.clone() }, idle(1)], 1);
    check(Policy::PowerOfTwo, 16, &[busy.clone(), idle(1)], 1);
}

#[test]
fn no_candidate_no_pick() {
    for policy in ALL {
        let mut rng = StdRng::seed_from_u64(1);
        assert_eq!(pick(policy, &ask(1), &[], 3, &mut rng), None, "{policy:?}");
        assert_eq!(pick(policy, &ask(1), &[idle(1)], 3, &mut rng).unwrap().index, 0, "{policy:?}");
    }
}

#[test]
fn ties_spread_and_a_seed_repeats() {
    let candidates = [idle(1), idle(2), idle(3), Candidate { prefill_tokens_ahead: 500, ..idle(4) }];
    let run = |seed| {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..3_000)
            .map(|turn| pick(Policy::Cost, &ask(160), &candidates, turn, &mut rng).unwrap().index)
            .collect::<Vec<_>>()
    };
    let picks = run(5);
    assert_eq!(picks, run(5));
    let counts: Vec<usize> = (0..4).map(|i| picks.iter().filter(|p| **p == i).count()).collect();
    assert!(counts[..3].iter().all(|c| (900..1_100).contains(c)) && counts[3] == 0, "seed 5: {counts:?}");
}

#[test]
fn within_the_band_is_a_tie_beyond_it_is_not() {
    // An idle worker costs 0.08 + 1.0 s; the band is 2% of that.
    let ahead = |tokens| [idle(1), Candidate { prefill_tokens_ahead: tokens, ..idle(2) }];
    let share = |candidates: &[Candidate]| {
        let mut rng = StdRng::seed_from_u64(9);
        (0..200)
            .filter(|t| pick(Policy::Cost, &ask(160), candidates, *t, &mut rng).unwrap().index == 1)
            .count()
    };
    assert!((60..140).contains(&share(&ahead(42))), "21 ms of 1.08 s");
    assert_eq!(share(&ahead(44)), 0, "22 ms of 1.08 s");
    // Between tied workers the one with fewer sequences is no matter of chance.
    let slow = |running, name| Candidate { running, speed: Arc::new(Speed::default()), ..idle(name) };
    assert_eq!(share(&[slow(1, 1), slow(0, 2)]), 200, "flat step times");
}

#[test]
fn round_robin_takes_turns() {
    let mut rng = StdRng::seed_from_u64(1);
    let candidates = [idle(1), idle(2), idle(3)];
    let picks: Vec<usize> =
        (0..6).map(|t| pick(Policy::RoundRobin, &ask(1), &candidates, t, &mut rng).unwrap().index).collect();
    assert_eq!(picks, [0, 1, 2, 0, 1, 2]);
}

#[test]
fn prefix_hash_keeps_its_worker_and_moves_few_keys() {
    let workers: Vec<Candidate> = (0..10).map(|i| idle(1_000 + i)).collect();
    let owner = |key, workers: &[Candidate]| {
        let ask = Ask { prefix_key: key, ..ask(16) };
        workers[prefix_hash::pick(&ask, workers)].name_hash
    };
    let before: Vec<u64> = (0..1_000).map(|key| owner(key, &workers)).collect();
    let after: Vec<u64> = (0..1_000).map(|key| owner(key, &workers[1..])).collect();
    let moved = before.iter().zip(&after).filter(|(b, a)| b != a).count();
    let of_first = before.iter().filter(|b| **b == 1_000).count();
    assert_eq!(moved, of_first, "only the keys of the worker that left move");
    assert!((60..140).contains(&of_first), "{of_first} of 1,000 keys on one of 10 workers");

    let mut loaded = workers.clone();
    let i = prefix_hash::pick(&Ask { prefix_key: 1, ..ask(16) }, &workers);
    loaded[i].running = 5;
    assert_ne!(prefix_hash::pick(&Ask { prefix_key: 1, ..ask(16) }, &loaded), i, "the load bound holds");
}
