//! Faults that other engines had, as scenarios.

use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::kv::{FULL, KvCache, KvConfig, Parent, SLIDING, SequenceBlocks};
use thalweg_worker::plan::AdapterSlot;
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::{
    MANY_DECODING, NewSequence, OVERTAKEN_MAX, PREEMPTIONS_MAX, SchedulerConfig, SequenceKey,
};

use crate::hash_model::HashModel;
use crate::workload::{Simulation, random_ids};

mod prefixes;
mod turns;

/// Full attention, blocks of 16.
fn config(blocks: usize, max_num_seqs: usize, max_num_batched_tokens: usize) -> SchedulerConfig {
    let kv = KvConfig {
        block_tokens: 16,
        blocks: [blocks, 0],
        has_group: [true, false],
        sliding_window: None,
        prefix_caching: true,
    };
    SchedulerConfig { kv, max_num_seqs, max_num_batched_tokens, max_num_mixed_tokens: max_num_batched_tokens }
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
