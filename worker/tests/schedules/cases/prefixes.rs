//! Which blocks are found again, and by whom.

use super::*;

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
        let mut sim = simulation(SchedulerConfig {
            kv,
            max_num_seqs: 2,
            max_num_batched_tokens: 128,
            max_num_mixed_tokens: 128,
        });
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
