//! How fast this worker is, roughly, before its first request: also the first touch of weights and caches.

use std::sync::Arc;

use crate::backend::BackendError;
use crate::engine::{DecodeRate, EngineConfig, Rates};
use crate::plan::{BlockId, BlockTable, KV_GROUPS, Row, RowInput, SlotId, SlotInit, StepPlan, Want};
use crate::runner::Runner;
use crate::sampling::SamplingParams;

/// Tokens of the measured prefill.
const PREFILL_TOKENS: usize = 32;

/// Runs a prompt twice and decodes two tokens; the second of each is what counts, as the first one pays for page faults.
/// Leaves nothing behind that anyone would read: slot and blocks are written anew before their next use.
pub(super) fn profile(runner: &mut dyn Runner, config: &EngineConfig) -> Result<Rates, BackendError> {
    let room = config.max_num_batched_tokens.min(config.max_model_len.saturating_sub(2));
    let tokens = room.min(config.sliding_window.unwrap_or(room)).min(PREFILL_TOKENS);
    if tokens == 0 {
        return Ok(Rates::default());
    }
    let mut seconds = |plan: StepPlan| {
        let step = runner.submit(plan)?;
        Ok(runner.collect(step)?.seconds)
    };
    let prompt: Arc<[u32]> = (0..tokens).map(|i| (i % config.vocab_size) as u32).collect();
    seconds(prefill(&prompt, config))?;
    let prefill_seconds = seconds(prefill(&prompt, config))?;
    seconds(decode(tokens, 1, config))?;
    let step_seconds = seconds(decode(tokens + 1, 2, config))?;
    Ok(Rates {
        prefill_tokens_per_second: if prefill_seconds > 0.0 { tokens as f64 / prefill_seconds } else { 0.0 },
        prefill_samples: 1,
        decode: vec![DecodeRate { batch: 1, step_seconds, samples: 1 }],
    })
}

fn prefill(prompt: &Arc<[u32]>, config: &EngineConfig) -> StepPlan {
    let init = SlotInit {
        slot: SlotId(0),
        sampling: Arc::new(SamplingParams::greedy()),
        choice: 0,
        prompt: Arc::clone(prompt),
        output: Vec::new(),
    };
    let row = Row {
        slot: SlotId(0),
        input: RowInput::Tokens(prompt.to_vec()),
        context: 0,
        tables: tables(prompt.len(), config),
        want: Want::Sample { output_index: 0 },
    };
    StepPlan { slots: vec![init], rows: vec![row] }
}

fn decode(context: usize, output_index: u32, config: &EngineConfig) -> StepPlan {
    let row = Row {
        slot: SlotId(0),
        input: RowInput::LastSampled,
        context: context as u32,
        tables: tables(context + 1, config),
        want: Want::Sample { output_index },
    };
    StepPlan { slots: Vec::new(), rows: vec![row] }
}

fn tables(tokens: usize, config: &EngineConfig) -> [BlockTable; KV_GROUPS] {
    let blocks = tokens.div_ceil(config.block_tokens) as u32;
    config.has_group.map(|has_layers| match has_layers {
        true => BlockTable { first: 0, blocks: (0..blocks).map(BlockId).collect() },
        false => BlockTable::default(),
    })
}
