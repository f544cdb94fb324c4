//! Rows of one step: who gets how many tokens, and who must give blocks up for it.

use std::ops::Bound;

use super::sequence::Running;
use super::{Scheduler, SequenceKey};
use crate::kv::{FULL, KvCache, SLIDING};
use crate::plan::{Row, RowInput, StepPlan, Want};

/// A step to submit.
#[derive(Clone, Debug, PartialEq)]
pub struct Planned {
    /// For the runner.
    pub plan: StepPlan,
    /// Sequences that got a slot in it.
    pub started: Vec<Started>,
}

/// A sequence left the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Started {
    /// Which.
    pub key: SequenceKey,
    /// It ran before and was preempted.
    pub again: bool,
    /// Tokens whose KV was found.
    pub cached_tokens: usize,
    /// Tokens that were looked up; 0 when the cache was bypassed.
    pub looked_up_tokens: usize,
}

/// What is remembered of a submitted step.
#[derive(Debug)]
pub(super) struct StepRecord {
    pub(super) number: u64,
    pub(super) rows: Vec<RowRecord>,
    /// Masks of its constrained rows are still to come.
    pub(super) wants_masks: bool,
    pub(super) prefill_tokens: usize,
    pub(super) decode_rows: usize,
}

/// Whose row, and what it yields.
#[derive(Debug)]
pub(super) struct RowRecord {
    pub(super) key: SequenceKey,
    pub(super) samples: bool,
    /// Its draw waits for a mask.
    pub(super) constrained: bool,
    /// Prompt logprobs.
    pub(super) targets: usize,
    /// The prompt's embedding.
    pub(super) embeds: bool,
    /// With it a block of known tokens is full.
    pub(super) fills_block: bool,
}

/// Rows with prompt logprobs take at most this many tokens of a step, since each needs a row of logits.
pub const PROMPT_LOGPROB_TOKENS_MAX: usize = 256;

/// Sequences that decode from which on prompts take smaller steps beside them.
pub const MANY_DECODING: usize = 128;

/// A step in the making.
#[derive(Debug)]
pub(super) struct StepBuilder {
    plan: StepPlan,
    started: Vec<Started>,
    record: StepRecord,
    /// Tokens of the blocks that others may find; None when none may.
    named_block_tokens: Option<usize>,
    /// Tokens that prompts may still take; decoding sequences' tokens are set aside.
    pub(super) prefill_left: usize,
    /// Of these, with prompt logprobs.
    pub(super) logit_rows_left: usize,
    /// Blocks ran out: nobody is admitted in this step.
    pub(super) short_of_blocks: bool,
}

impl StepBuilder {
    /// With room for so many rows.
    pub(super) fn new(
        number: u64,
        rows: usize,
        token_budget: usize,
        named_block_tokens: Option<usize>,
    ) -> Self {
        Self {
            plan: StepPlan { rows: Vec::with_capacity(rows), ..StepPlan::default() },
            started: Vec::new(),
            record: StepRecord {
                number,
                rows: Vec::with_capacity(rows),
                wants_masks: false,
                prefill_tokens: 0,
                decode_rows: 0,
            },
            named_block_tokens,
            prefill_left: token_budget,
            logit_rows_left: PROMPT_LOGPROB_TOKENS_MAX,
            short_of_blocks: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.plan.rows.is_empty()
    }

    pub(super) fn finish(self) -> (Planned, StepRecord) {
        (Planned { plan: self.plan, started: self.started }, self.record)
    }

    /// A sequence gets a slot, before its first row.
    pub(super) fn start(&mut self, running: &Running, started: Started) {
        self.plan.slots.push(running.slot_init());
        self.started.push(started);
    }

    /// Tokens of the next row of this sequence, as far as budgets go.
    fn row_len(&self, running: &Running) -> usize {
        let budget = if running.is_decoding() { 1 } else { self.prefill_left };
        running.next_len(budget, self.logit_rows_left)
    }

    fn push(&mut self, running: &mut Running, len: usize) {
        let want = running.want(len);
        let context = running.computed;
        let input = if running.is_decoding() {
            RowInput::LastSampled
        } else {
            RowInput::Tokens(running.sequence.tokens[context..context + len].to_vec())
        };
        if running.is_decoding() {
            self.record.decode_rows += 1;
        } else {
            self.record.prefill_tokens += len;
            self.prefill_left -= len;
        }
        let (samples, targets) = yields(want, len);
        let embeds = matches!(want, Want::Embedding { ends: true, .. });
        if matches!(want, Want::PromptLogprobs { .. }) {
            self.logit_rows_left -= len;
        }
        running.computed += len;
        running.rows_in_flight += 1;
        running.samples_in_flight += usize::from(samples);
        let constrained = samples && running.sequence.constraint.is_some();
        if constrained {
            self.record.wants_masks = true;
            self.plan.constrained.push(self.plan.rows.len());
        }
        let fills_block = self.named_block_tokens.is_some_and(|tokens| running.has_new_block(tokens));
        let key = running.sequence.key;
        self.record.rows.push(RowRecord { key, samples, constrained, targets, embeds, fills_block });
        let tables = running.blocks.tables();
        let (slot, adapter) = (running.slot, running.sequence.adapter);
        self.plan.rows.push(Row { slot, adapter, input, context: context as u32, tables, want });
    }
}

/// Whether a row of `len` tokens samples, and its number of prompt logprobs.
fn yields(want: Want, len: usize) -> (bool, usize) {
    match want {
        Want::Nothing | Want::Embedding { .. } => (false, 0),
        Want::Sample { .. } => (true, 0),
        Want::PromptLogprobs { next, output_index, .. } => {
            (output_index.is_some(), len - usize::from(next.is_none()))
        }
    }
}

impl Scheduler {
    /// Rows for what runs, the oldest first: when blocks run out, the youngest loses its own.
    pub(super) fn continue_running(&mut self, step: &mut StepBuilder) {
        let decoding = self.running.values().filter(|r| r.is_decoding() && r.wants_row()).count();
        if decoding >= MANY_DECODING {
            step.prefill_left = step.prefill_left.min(self.config.max_num_mixed_tokens);
        }
        step.prefill_left -= decoding.min(step.prefill_left);
        let mut from = Bound::Unbounded;
        while let Some(key) = self.give_rows(from, step) {
            step.short_of_blocks = true;
            from = if self.make_room(key) { Bound::Included(key) } else { Bound::Excluded(key) };
        }
    }

    /// Rows for what runs from a key on, up to the first sequence for which no block is left, which is returned.
    fn give_rows(&mut self, from: Bound<SequenceKey>, step: &mut StepBuilder) -> Option<SequenceKey> {
        for (key, running) in self.running.range_mut((from, Bound::Unbounded)) {
            if !give_row(&mut self.kv, running, step) {
                return Some(*key);
            }
        }
        None
    }

    /// Preempts the youngest that may be so that `key` can go on; true when blocks came free at once. While any blocks are about to
    /// come free with a step in flight, it waits for those instead.
    fn make_room(&mut self, key: SequenceKey) -> bool {
        if self.running.values().any(|r| r.leaving.is_some()) {
            return false;
        }
        let mut youngest_first =
            self.running.iter().rev().filter(|(_, running)| !running.sequence.keeps_blocks());
        let Some(youngest) = youngest_first.next().map(|(key, _)| *key) else { return false };
        self.preempt(youngest) && youngest != key
    }
}

/// Adds this sequence's row, shorter than the budget where blocks are short. False when there is no block for a single
/// token; true also when it wants no row.
pub(super) fn give_row(kv: &mut KvCache, running: &mut Running, step: &mut StepBuilder) -> bool {
    if !running.wants_row() {
        return true;
    }
    kv.slide(&mut running.blocks, running.computed);
    let wanted = step.row_len(running);
    let len = wanted.min(kv.room(&running.blocks).saturating_sub(running.computed));
    if len == 0 {
        return wanted == 0;
    }
    for group in [FULL, SLIDING] {
        kv.reserve(&mut running.blocks, group, running.computed + len);
    }
    step.push(running, len);
    true
}
