//! The block pool against a model of it: plain sets.

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::kv::{BlockPool, BlockRef, KvBudget, blocks_per_sequence, plan_blocks};

/// What the pool should know.
#[derive(Default)]
struct Model {
    references: BTreeMap<u32, usize>,
    names: BTreeMap<u32, BlockHash>,
    /// Cached blocks, least recently used first.
    lru: Vec<u32>,
    free: BTreeSet<u32>,
}

fn name(n: u64) -> BlockHash {
    BlockHash([n.to_le_bytes(), [0; 8]].concat().try_into().unwrap())
}

#[test]
fn random_operations_agree_with_a_model() {
    for seed in 0..200 {
        println!("seed {seed}");
        run(seed);
    }
}

fn run(seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let total = rng.random_range(1..12u32);
    let mut pool = BlockPool::new(total as usize);
    let mut model = Model { free: (0..total).collect(), ..Model::default() };
    let mut held: Vec<BlockRef> = Vec::new();
    let mut names = 0;
    for _ in 0..300 {
        match rng.random_range(0..5) {
            0 => match pool.allocate() {
                Some((block, evicted)) => {
                    assert_eq!(evicted, model.allocate(block.id().0));
                    held.push(block);
                }
                None => assert!(model.free.is_empty() && model.lru.is_empty()),
            },
            1 if !held.is_empty() => {
                let block = held.swap_remove(rng.random_range(0..held.len()));
                model.release(block.id().0);
                pool.release(block);
            }
            2 if !held.is_empty() => {
                let block = &held[rng.random_range(0..held.len())];
                names += 1;
                model.names.insert(block.id().0, name(names));
                pool.name(block, name(names));
            }
            3 => {
                let known: Vec<u32> = model.references.keys().chain(&model.lru).copied().collect();
                if let Some(id) = known.get(rng.random_range(0..known.len().max(1))) {
                    model.retain(*id);
                    held.push(pool.retain(thalweg_worker::plan::BlockId(*id)));
                }
            }
            _ if !model.names.is_empty() => {
                let at = rng.random_range(0..model.names.len());
                let id = *model.names.keys().nth(at).unwrap();
                model.forget(id);
                pool.forget(thalweg_worker::plan::BlockId(id));
            }
            _ => {}
        }
        assert!(pool.adds_up());
        let counts = (pool.free(), pool.cached(), pool.in_use());
        assert_eq!(counts, (model.free.len(), model.lru.len(), model.references.len()));
    }
}

impl Model {
    fn allocate(&mut self, id: u32) -> Option<BlockHash> {
        if !self.free.remove(&id) {
            assert!(self.free.is_empty(), "cached blocks are kept while others are free");
            assert_eq!(self.lru.remove(0), id, "the least recently used goes first");
        }
        self.references.insert(id, 1);
        self.names.remove(&id)
    }

    fn retain(&mut self, id: u32) {
        self.lru.retain(|cached| *cached != id);
        *self.references.entry(id).or_default() += 1;
    }

    fn release(&mut self, id: u32) {
        let count = self.references.get_mut(&id).unwrap();
        *count -= 1;
        if *count == 0 {
            self.references.remove(&id);
            if self.names.contains_key(&id) {
                self.lru.push(id);
            } else {
                self.free.insert(id);
            }
        }
    }

    fn forget(&mut self, id: u32) {
        self.names.remove(&id);
        if self.lru.contains(&id) {
            self.lru.retain(|cached| *cached != id);
            self.free.insert(id);
        }
    }
}

/// Gemma-3-270M: 3 full and 15 sliding layers, one KV head of 256, bf16.
const GEMMA: KvBudget = KvBudget {
    bytes: 512 << 20,
    bytes_per_block: [3 * 2 * 16 * 256 * 2, 15 * 2 * 16 * 256 * 2],
    block_tokens: 16,
    sliding_window: Some(512),
    max_model_len: 32_768,
};

#[test]
fn memory_is_divided_between_the_groups() {
    let [full, sliding] = plan_blocks(&GEMMA).unwrap();
    let bytes = full as u64 * GEMMA.bytes_per_block[0] + sliding as u64 * GEMMA.bytes_per_block[1];
    assert!(
        bytes <= GEMMA.bytes && bytes + GEMMA.bytes_per_block[1] > GEMMA.bytes,
        "{bytes} of {}",
        GEMMA.bytes
    );
    // Sequences of 2,048 tokens hold 128 full and 33 sliding blocks: as many fit in either group.
    assert_eq!(full / 128, sliding / 33);

    let only_full = KvBudget { bytes_per_block: [1024, 0], sliding_window: None, ..GEMMA };
    assert_eq!(plan_blocks(&only_full).unwrap(), [512 << 10, 0]);
    let only_sliding = KvBudget { bytes_per_block: [0, 1024], ..GEMMA };
    assert_eq!(plan_blocks(&only_sliding).unwrap(), [0, 512 << 10]);
}

#[test]
fn a_cache_that_holds_no_sequence_is_refused_with_the_numbers() {
    let tight = KvBudget { bytes: GEMMA.bytes_per_block[0] * 2048 + GEMMA.bytes_per_block[1] * 33, ..GEMMA };
    assert_eq!(plan_blocks(&tight).unwrap(), [2048, 33]);
    assert_eq!(blocks_per_sequence(32_768, 16, Some(512)), [2048, 33]);
    let error = plan_blocks(&KvBudget { bytes: tight.bytes - 1, ..tight }).unwrap_err();
    assert_eq!((error.needed, error.fitting_len), (tight.bytes, 2047 * 16));
    let text = error.to_string();
    assert!(text.contains("--kv-cache-memory-bytes") && text.contains("--max-model-len"), "{text}");
}
