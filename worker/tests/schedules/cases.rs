//! Faults that other engines had, as scenarios.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::kv::{FULL, KvCache, KvConfig, Parent, SLIDING, SequenceBlocks};
use thalweg_worker::plan::AdapterSlot;
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::{NewSequence, OVERTAKEN_MAX, PREEMPTIONS_MAX, SchedulerConfig, SequenceKey};

use crate::hash_model::HashModel;
use crate::workload::{Simulation, random_ids};

/// Full attention, blocks of 16.
fn config(blocks: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> SchedulerConfig {
    let kv = KvConfig {
        block_tokens: 16,
        blocks: [blocks, 0],
        has_group: [true, false],
        sliding_window: None,
        prefix_caching: true,
    };
    SchedulerConfig { kv, max_num_seqs, max_num_batched_tokens }
}

fn simulation(config: SchedulerConfig) -> Simulation {
    let SchedulerConfig { kv, .. } = config;
    Simulation::over(config, HashModel { seed: 7, has_group: kv.has_group, window: kv.sliding_window })
}

fn sequence(request: u64, prompt: &[u32], output_max: usize) -> NewSequence {
    NewSequence {
        key: SequenceKey { priority: 0, request, choice: 0 },
        prompt: prompt.into(),
        output: Vec::new(),
        sampling: Arc::new(SamplingParams { seed: request, ..SamplingParams::greedy() }),
        output_max,
        root: BlockHash([0; 16]),
        adapter: AdapterSlot::BASE,
        prompt_logprobs: None,
        pooling: None,
        leader: None,
    }
}

fn ids(seed: u64, len: usize) -> Vec<u32> {
    random_ids(&mut StdRng::seed_from_u64(seed), len)
}

/// vllm#36390: a request that needs much held up the whole queue.
#[test]
fn small_requests_pass_a_big_one_which_still_finishes() {
    // scheduler-03.
    let mut sim = simulation(config(64, 32, 1024));
    sim.add(sequence(1, &ids(1, 39 * 16), 16));
    sim.step();
    sim.add(sequence(2, &ids(2, 49 * 16), 16));
    (3..13).for_each(|request| sim.add(sequence(request, &ids(request, 20), 8)));
    (0..3).for_each(|_| assert!(sim.step()));
    let started: Vec<u64> = sim.started.iter().map(|s| s.key.request).collect();
    assert!(!started.contains(&2) && (3..13).all(|small| started.contains(&small)), "{started:?}");
    sim.finish();
    assert_eq!(sim.finished.len(), 12);
}

/// The other side of it: the big one is overtaken a bounded number of times while small ones keep coming.
#[test]
fn a_big_request_is_overtaken_a_bounded_number_of_times() {
    // scheduler-03.
    let mut sim = simulation(config(64, 8, 1024));
    sim.add(sequence(1, &ids(1, 20), 60));
    sim.step();
    sim.add(sequence(2, &ids(2, 63 * 16), 8));
    let mut request = 2;
    while !sim.finished.iter().any(|key| key.request == 2) {
        request += 1;
        sim.add(sequence(request, &ids(request, 20), 8));
        sim.step();
        assert!(request < 1000, "the big one starves");
    }
    let before = sim.started.iter().position(|s| s.key.request == 2).unwrap();
    assert!(before <= 1 + OVERTAKEN_MAX as usize, "{before} started before it");
    sim.finish();
}

/// vllm#16832 and vllm#41951: answers cut short after a preemption; the same one preempted again and again.
#[test]
fn preempted_sequences_answer_in_full_and_keep_their_place() {
    // scheduler-05, scheduler-08.
    let mut sim = simulation(config(64, 8, 256));
    let mut request = 0;
    let mut rounds = 0;
    while request < 60 {
        if rounds % 12 == 0 {
            request += 1;
            sim.add(sequence(request, &ids(request, 40), 300));
        }
        rounds += 1;
        assert!(sim.step());
    }
    sim.finish();
    assert!(sim.scheduler.preemptions() > 10, "the pool is not tight: {}", sim.scheduler.preemptions());
    assert_eq!(sim.finished.len(), 60);
    for (place, key) in sim.finished.iter().enumerate() {
        let late = (place as u64 + 1).abs_diff(key.request);
        assert!(late <= 8, "request {} finished as number {}", key.request, place + 1);
    }
}

/// The same under priorities: groups of those that matter more come on and on, and each time something has to give way.
#[test]
fn a_sequence_is_preempted_a_bounded_number_of_times_whatever_comes() {
    // scheduler-08.
    let mut sim = simulation(config(64, 8, 256));
    let long = sequence(1, &ids(1, 40), 900);
    let urgent = |request| NewSequence {
        key: SequenceKey { priority: -1, request, choice: 0 },
        ..sequence(request, &ids(request, 40), 150)
    };
    sim.add(long.clone());
    for round in 0.. {
        if sim.finished.contains(&long.key) {
            break;
        }
        if round % 200 == 0 {
            (0..3).for_each(|at| sim.add(urgent(2 + round + at)));
        }
        assert!(sim.step());
        assert!(round < 10_000, "it starves");
    }
    sim.finish();
    assert_eq!(sim.most_preemptions(), PREEMPTIONS_MAX as usize, "the bound is reached, and holds");
}

/// Two that lost their blocks too often, and whose whole needs do not fit together: one waits for the end of the other, and
/// whoever comes meanwhile passes it, since it loses nothing to them.
#[test]
fn newcomers_pass_one_that_waits_for_its_whole_need() {
    // scheduler-08.
    let mut sim = simulation(config(256, 40, 256));
    let [first, second] = [1, 2].map(|request| sequence(request, &ids(request, 40), 2100));
    [&first, &second].into_iter().for_each(|long| sim.add(long.clone()));
    let returns = |sim: &Simulation, long: &NewSequence| {
        sim.started.iter().filter(|started| started.again && started.key == long.key).count()
    };
    let most = PREEMPTIONS_MAX as usize;
    // Each wave of urgent ones takes both their blocks.
    for wave in 1..=u64::from(PREEMPTIONS_MAX) {
        for request in 100 * wave..100 * wave + 30 {
            let key = SequenceKey { priority: -1, request, choice: 0 };
            sim.add(NewSequence { key, ..sequence(request, &ids(request, 16), 150) });
        }
        while sim.live.len() > 2 {
            assert!(sim.step());
        }
        (0..20).for_each(|_| assert!(sim.step()));
    }
    assert_eq!([&first, &second].map(|long| returns(&sim, long)), [most, most - 1], "one is back, one waits");
    let said = sim.live[&second.key].got.len();
    (1000..1020).for_each(|request| sim.add(sequence(request, &ids(request, 20), 8)));
    while sim.live.len() > 2 {
        assert!(sim.step());
        assert_eq!(sim.live[&second.key].got.len(), said, "it waits");
    }
    assert!(sim.live.contains_key(&first.key), "nobody waited for the one that runs");
    sim.finish();
    assert_eq!(sim.finished[sim.finished.len() - 2..], [first.key, second.key]);
    assert_eq!(returns(&sim, &second), most);
}

/// vllm#1026: a long prompt stopped all who were decoding.
#[test]
fn long_prompts_do_not_stop_decoding() {
    // scheduler-07.
    let mut sim = simulation(config(2048, 8, 256));
    // Alone, one of them takes so many steps to its first token.
    let mut alone = simulation(config(2048, 8, 256));
    alone.add(sequence(2, &ids(2, 4000), 4));
    let steps_alone =
        (1..1000).find(|_| alone.step() && alone.live.values().any(|live| !live.got.is_empty()));
    sim.add(sequence(1, &ids(1, 20), 200));
    while sim.step() && sim.live.values().all(|live| live.got.len() < 5) {}
    (2..7).for_each(|request| sim.add(sequence(request, &ids(request, 4000), 4)));
    let (mut tokens, mut first) = (5, None);
    while tokens < 60 {
        sim.step();
        let now = sim.live.values().next().unwrap().got.len();
        assert_eq!(now, tokens + 1, "every step brings a token");
        tokens = now;
        let begun = sim.live.iter().any(|(key, live)| key.request == 2 && !live.got.is_empty());
        first = first.or(begun.then_some(tokens - 5));
    }
    assert!(first < steps_alone.map(|steps| 2 * steps), "first token after {first:?}, alone {steps_alone:?}");
    assert!(sim.runner.step_tokens.iter().all(|tokens| *tokens <= 256));
    sim.finish();
}

/// mistral.rs#1026, mistral.rs#121, litellm#41071: the same prompt again, with a token more, a token less, block-aligned,
/// and a short one that is the beginning of a cached one. `cached_tokens` is in whole blocks and never the whole prompt.
#[test]
fn repeated_prompts_hit_whole_blocks_and_compute_at_least_a_token() {
    // prefix-cache-02, prefix-cache-03, prefix-cache-07.
    let prompt = ids(1, 100);
    let cases = [
        (88, 0),
        (88, 80),
        (88, 80),
        (89, 80),
        (87, 80),
        (80, 64),
        (81, 80),
        (60, 48),
        (13, 0),
        (1, 0),
        (17, 16),
        (88, 80),
    ];
    let mut sim = simulation(config(64, 4, 64));
    for (request, (len, cached)) in cases.into_iter().enumerate() {
        sim.add(sequence(request as u64, &prompt[..len], 5));
        sim.finish();
        let started = sim.started.pop().unwrap();
        assert_eq!(started.cached_tokens, cached, "number {request}: {len} tokens");
    }
}

/// The output of an answer, its end id included, is part of the next turn's prefix.
#[test]
fn the_next_turn_finds_prompt_and_answer() {
    let mut sim = simulation(config(64, 4, 64));
    let mut turn = ids(1, 30);
    let answer = sim.runner.model.answer(&turn, &[], &SamplingParams::greedy(), 0, 40).0;
    let sampling = Arc::new(SamplingParams {
        end_ids: vec![answer[33].token],
        min_tokens: 33,
        ..SamplingParams::greedy()
    });
    sim.add(NewSequence { sampling, ..sequence(0, &turn, 40) });
    sim.finish();
    turn.extend(answer[..34].iter().map(|t| t.token));
    assert_eq!(turn.len(), 64);
    turn.push(1);
    sim.add(sequence(1, &turn, 2));
    sim.finish();
    assert_eq!(sim.started.pop().unwrap().cached_tokens, 64);
}

/// A block may be matched from the step after the one that writes it, and is told of when that has completed.
#[test]
fn a_block_is_told_when_the_step_that_fills_it_has_completed() {
    let mut sim = simulation(config(64, 4, 64));
    sim.add(sequence(1, &ids(1, 15), 20));
    let mut told = Vec::new();
    assert!(sim.submit());
    for _ in 0..3 {
        // The first step's token fills the block, and the second step, in flight by then, writes it.
        assert!(sim.submit() && sim.collect());
        told.push(sim.index.len());
    }
    assert_eq!(told, [0, 1, 1]);
    sim.finish();
}

/// mlx-lm#980: prefix reuse was off or wrong for models with a sliding window.
#[test]
fn sliding_windows_reuse_prefixes_and_bound_their_blocks() {
    // kv-cache-02.
    let kv = KvConfig {
        block_tokens: 16,
        blocks: [512, 256],
        has_group: [true, true],
        sliding_window: Some(512),
        prefix_caching: true,
    };
    for shared in [300, 512, 520, 1000] {
        let mut sim = simulation(SchedulerConfig { kv, max_num_seqs: 2, max_num_batched_tokens: 128 });
        let prefix = ids(1, shared);
        for request in 0..3 {
            sim.add(sequence(request, &[&prefix[..], &ids(request, 20)].concat(), 30));
            while sim.step() {
                // Window, one step's tokens and the block that is being filled.
                let held = sim.scheduler.usage(SLIDING).in_use;
                assert!(held <= 512 / 16 + 128 / 16 + 2, "{held} sliding blocks are held");
            }
            let expected = if request == 0 { 0 } else { shared / 16 * 16 };
            assert_eq!(sim.started.pop().unwrap().cached_tokens, expected, "{shared} shared");
        }
        sim.finish();
    }
}

/// vllm#5578: many samples of one prompt stored it many times, and preempted ones came behind new ones.
#[test]
fn choices_share_their_prompt_and_preempted_ones_come_first() {
    // kv-cache-04.
    let mut sim = simulation(config(80, 12, 256));
    let prompt = ids(1, 30 * 16 + 5);
    let leader = SequenceKey { priority: 0, request: 1, choice: 0 };
    let choice = |request, choice| NewSequence {
        key: SequenceKey { priority: 0, request, choice },
        leader: (choice > 0).then_some(SequenceKey { request, ..leader }),
        ..sequence(request, &prompt, 60)
    };
    (1..11).for_each(|request| (0..4).for_each(|c| sim.add(choice(request, c))));
    (0..6).for_each(|_| assert!(sim.step()));
    let held = sim.scheduler.usage(FULL).in_use;
    assert!(sim.step_rows > 4 && held <= 30 + 2 * 12, "{held} blocks for {} sequences", sim.step_rows);
    sim.finish();
    assert_eq!(sim.finished.len(), 40);
    for (at, again) in sim.started.iter().enumerate().filter(|(_, s)| s.again) {
        let first = sim.started[..at].iter().rposition(|s| s.key == again.key).unwrap();
        let passed = sim.started[first..at].iter().filter(|s| s.key > again.key).count();
        assert!(passed <= 12, "{passed} newer ones started before {:?} could go on", again.key);
    }
}

/// A request of many choices, on a worker with few places, takes turns with those that come after it.
#[test]
fn many_choices_do_not_hold_up_later_requests() {
    let mut sim = simulation(config(64, 1, 256));
    for choice in 0..4 {
        let first = sequence(1, &ids(1, 20), 4);
        let leader = (choice > 0).then_some(first.key);
        sim.add(NewSequence { key: SequenceKey { choice, ..first.key }, leader, ..first });
    }
    let waiting = |sim: &Simulation| {
        let load = sim.scheduler.load();
        (load.waiting, load.waiting_ahead)
    };
    assert_eq!(waiting(&sim), (4, 2), "the next one stands behind its second choice");
    sim.step();
    (2..4).for_each(|request| sim.add(sequence(request, &ids(request, 20), 4)));
    assert_eq!(waiting(&sim), (5, 5));
    sim.finish();
    let order: Vec<_> = sim.started.iter().map(|s| (s.key.request, s.key.choice)).collect();
    assert_eq!(order, [(1, 0), (1, 1), (2, 0), (1, 2), (3, 0), (1, 3)]);
}

/// llama.cpp#27148: an answer from somebody else's conversation, under load and eviction.
#[test]
fn clients_never_see_each_others_prefixes() {
    // prefix-cache-01.
    let seed = 11;
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut sim = simulation(config(40, 8, 128));
    let system = ids(1, 64);
    let mut histories: Vec<Vec<u32>> = (0..8).map(|client| [&system[..], &[client; 20]].concat()).collect();
    for request in 0..300 {
        let client = rng.random_range(0..8);
        sim.add(NewSequence {
            root: BlockHash([client as u8 % 2; 16]),
            ..sequence(request, &histories[client], 12)
        });
        for _ in 0..rng.random_range(0..8) {
            sim.step();
        }
        let more = random_ids(&mut rng, 9);
        histories[client].extend(more);
        histories[client].truncate(64 + 20 + rng.random_range(1..200));
    }
    sim.finish();
    assert_eq!(sim.finished.len(), 300);
    assert!(sim.started.iter().any(|s| s.cached_tokens > 64), "nothing was reused");
}

/// Two prefixes whose hashes collide: neither is taken for the other, nor is a child of the one for a child of the other.
#[test]
fn a_colliding_hash_costs_a_hit_but_never_the_answer() {
    let config = config(16, 1, 1).kv;
    let mut cache = KvCache::new(config);
    let root = BlockHash([0; 16]);
    let (same, child) = (BlockHash([1; 16]), BlockHash([2; 16]));
    let (a, b, tail) = ([1; 16], [2; 16], [3; 16]);
    let store = |cache: &mut KvCache, first: &[u32]| {
        let mut blocks = SequenceBlocks::default();
        cache.reserve(&mut blocks, FULL, 32);
        let parent = cache.remember(&mut blocks, 0, (Parent::Root(root), same, first), 1);
        cache.remember(&mut blocks, 1, (parent, child, &tail), 1);
        cache.release(blocks);
    };
    let hit =
        |cache: &KvCache, first: &[u32]| cache.find(root, &[same, child], &[first, &tail].concat(), 2).blocks;
    store(&mut cache, &a);
    assert_eq!((hit(&cache, &a), hit(&cache, &b)), (2, 0));
    store(&mut cache, &b);
    assert_eq!((hit(&cache, &a), hit(&cache, &b)), (0, 2));
    assert_eq!(cache.find(BlockHash([9; 16]), &[same], &b, 1).blocks, 0, "another root");
    assert!(cache.adds_up());
}

/// A child that outlives its parent's node is not taken for a child of the parent's namesake.
#[test]
fn a_child_belongs_to_one_parent_only() {
    let mut cache = KvCache::new(config(3, 1, 1).kv);
    let root = BlockHash([0; 16]);
    let (same, child) = (BlockHash([1; 16]), BlockHash([2; 16]));
    let mut blocks = SequenceBlocks::default();
    cache.reserve(&mut blocks, FULL, 32);
    let parent = cache.remember(&mut blocks, 0, (Parent::Root(root), same, &[1; 16]), 1);
    cache.remember(&mut blocks, 1, (parent, child, &[3; 16]), 1);
    let mut namesake = SequenceBlocks::default();
    cache.reserve(&mut namesake, FULL, 16);
    cache.remember(&mut namesake, 0, (Parent::Root(root), same, &[2; 16]), 2);
    let tokens = [[2; 16], [3; 16]].concat();
    assert_eq!(cache.find(root, &[same, child], &tokens, 2).blocks, 1);
    cache.release(namesake);
    cache.release(blocks);
    assert!(cache.adds_up());
}
