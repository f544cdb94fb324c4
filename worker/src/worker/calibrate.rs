//! How fast this worker is, roughly, before its first request: also the first touch of weights and caches.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::backend::BackendError;
use crate::engine::{DecodeRate, EngineConfig, Rates};
use crate::plan::{
    AdapterSlot, BlockId, BlockTable, KV_GROUPS, Row, RowInput, SlotId, SlotInit, StepPlan, Want,
};
use crate::runner::Runner;
use crate::sampling::SamplingParams;

/// Tokens of the measured prefill; where they take less than `PREFILL_SECONDS_MIN`, as on a GPU, so few say little of a prompt, and
/// the larger number is measured.
const PREFILL_TOKENS: [usize; 2] = [32, 512];
const PREFILL_SECONDS_MIN: f64 = 0.02;
/// Sequences of the larger measured decode step: with one it gives the slope, without which a burst would cost nothing.
const DECODE_BATCH: usize = 8;
/// Counted runs of each step, after one that pays for page faults. The fastest counts: others were disturbed.
const RUNS: usize = 3;

/// Times a prompt, and decode steps of one and of several sequences. Leaves nothing behind that anyone would read: slots
/// and blocks are written anew before their next use.
pub(super) fn profile(runner: &mut dyn Runner, config: &EngineConfig) -> Result<Rates, BackendError> {
    let room = config.max_num_batched_tokens.min(config.max_model_len.saturating_sub(1));
    let [few, many] =
        PREFILL_TOKENS.map(|tokens| room.min(config.sliding_window.unwrap_or(room)).min(tokens));
    if few == 0 {
        return Ok(Rates::default());
    }
    let (mut tokens, mut prefill_seconds) = (few, fastest(runner, &step(1, few, config))?);
    if prefill_seconds < PREFILL_SECONDS_MIN && many > few {
        (tokens, prefill_seconds) = (many, fastest(runner, &step(1, many, config))?);
    }
    let mut decode = Vec::new();
    for batch in BTreeSet::from([1, batch_max(config)]) {
        let step_seconds = fastest(runner, &step(batch, 1, config))?;
        decode.push(DecodeRate { batch: batch as u32, step_seconds, samples: RUNS as u32 });
    }
    Ok(Rates {
        prefill_tokens_per_second: if prefill_seconds > 0.0 { tokens as f64 / prefill_seconds } else { 0.0 },
        prefill_samples: RUNS as u32,
        decode,
    })
}

fn fastest(runner: &mut dyn Runner, plan: &StepPlan) -> Result<f64, BackendError> {
    let mut run = || {
        let step = runner.submit(plan.clone())?;
        Ok::<_, BackendError>(runner.collect(step)?.seconds)
    };
    run()?;
    (0..RUNS).try_fold(f64::INFINITY, |least, _| Ok(least.min(run()?)))
}

/// Sequences that slots, blocks (one each) and a step's budget have room for.
fn batch_max(config: &EngineConfig) -> usize {
    let blocks = (0..KV_GROUPS).filter(|group| config.has_group[*group]).map(|group| config.kv_blocks[group]);
    let room = config.max_num_seqs.min(config.max_num_batched_tokens);
    blocks.fold(room.min(DECODE_BATCH), usize::min).max(1)
}

/// A step in which each of `sequences` begins with so many tokens; one of them is what a decode step computes.
fn step(sequences: usize, tokens: usize, config: &EngineConfig) -> StepPlan {
    let prompt: Arc<[u32]> = (0..tokens).map(|i| (i % config.vocab_size) as u32).collect();
    let sampling = Arc::new(SamplingParams::greedy());
    let slots = (0..sequences).map(|slot| SlotInit {
        slot: SlotId(slot as u32),
        sampling: Arc::clone(&sampling),
        choice: 0,
        prompt: Arc::clone(&prompt),
        output: Vec::new(),
    });
    let rows = (0..sequences).map(|slot| Row {
        slot: SlotId(slot as u32),
        adapter: AdapterSlot::BASE,
        input: RowInput::Tokens(prompt.to_vec()),
        context: 0,
        tables: tables(slot, tokens, config),
        want: Want::Sample { output_index: 0 },
    });
    StepPlan { slots: slots.collect(), rows: rows.collect(), ..StepPlan::default() }
}

/// Blocks of one sequence, behind those of the ones before it.
fn tables(sequence: usize, tokens: usize, config: &EngineConfig) -> [BlockTable; KV_GROUPS] {
    let blocks = tokens.div_ceil(config.block_tokens) as u32;
    let first = sequence as u32 * blocks;
    config.has_group.map(|has_layers| match has_layers {
        true => BlockTable { first: 0, blocks: (first..first + blocks).map(BlockId).collect() },
        false => BlockTable::default(),
    })
}
