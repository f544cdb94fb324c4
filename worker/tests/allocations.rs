//! What a step of decoding sequences allocates: its rows, and nothing that grows with what they hold.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::alloc::System;
use std::sync::Arc;

use cap::Cap;
use smallvec::smallvec;
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::kv::KvConfig;
use thalweg_worker::plan::{AdapterSlot, Logprobs, RowOutput, StepOutput, StepPlan};
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::{NewSequence, Scheduler, SchedulerConfig, SequenceKey};

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

const SEQUENCES: usize = 32;
/// A table of 256 blocks, 1 KiB.
const PROMPT: usize = 4096;
/// Of a row, its record, its output and its update; and of a block each 16 steps.
const BYTES_PER_ROW_MAX: usize = 640;

#[test]
fn a_decode_step_copies_nothing_of_what_its_sequences_hold() {
    let kv = KvConfig {
        block_tokens: 16,
        blocks: [SEQUENCES * 300, 0],
        has_group: [true, false],
        sliding_window: None,
        prefix_caching: true,
    };
    let mut scheduler = Scheduler::new(SchedulerConfig {
        kv,
        max_num_seqs: SEQUENCES,
        max_num_batched_tokens: 1 << 20,
        max_num_mixed_tokens: 1 << 20,
    });
    (0..SEQUENCES as u32).for_each(|number| scheduler.add(sequence(number)));
    let mut in_flight = scheduler.plan().unwrap().plan;
    // Until what tokens and prefixes stand in has grown.
    (0..100).for_each(|_| step(&mut scheduler, &mut in_flight));
    let (before, steps) = (ALLOCATOR.total_allocated(), 64);
    (0..steps).for_each(|_| step(&mut scheduler, &mut in_flight));
    let bytes = (ALLOCATOR.total_allocated() - before) / (steps * SEQUENCES);
    assert!(bytes <= BYTES_PER_ROW_MAX, "{bytes} bytes a row and step");
}

fn sequence(number: u32) -> NewSequence {
    NewSequence {
        key: SequenceKey { priority: 0, request: number.into(), choice: 0 },
        prompt: (0..PROMPT as u32).map(|at| at + number * 10_000).collect(),
        output: Vec::new(),
        sampling: Arc::new(SamplingParams::greedy()),
        output_max: 1000,
        root: BlockHash([0; 16]),
        adapter: AdapterSlot::BASE,
        prompt_logprobs: None,
        pooling: None,
        leader: None,
    }
}

/// Plans the next step, then takes in the one before, as the engine does.
fn step(scheduler: &mut Scheduler, in_flight: &mut StepPlan) {
    let next = scheduler.plan().unwrap().plan;
    let rows = std::mem::replace(in_flight, next).rows.len();
    let sampled = Logprobs { token: 7, logprob: f32::NAN, rank: 0, top: Vec::new() };
    let row = RowOutput { sampled: smallvec![sampled], ..RowOutput::default() };
    scheduler.complete(StepOutput { rows: vec![row; rows], seconds: 0.01 }).unwrap();
}
