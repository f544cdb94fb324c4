//! Decides what each step computes: pure bookkeeping over sequences and blocks, without clock, device or IO.
//!
//! Steps are planned up to two deep: a decoding sequence gets its next row before its last token is known. That token
//! may end it; the row then in flight is surplus, and what it draws is dropped here.

mod admission;
mod completion;
mod constraint;
mod masks;
mod rows;
mod sequence;

use std::collections::{BTreeMap, VecDeque};

use thalweg_cache_index::event::BlockEvent;

pub use admission::{OVERTAKEN_MAX, PREEMPTIONS_MAX};
pub use completion::{Completed, FinishReason, StepMismatch, Update};
pub use rows::{MANY_DECODING, PROMPT_LOGPROB_TOKENS_MAX, Planned, Started};
pub use sequence::{NewSequence, SequenceKey};

use crate::kv::{KvCache, KvConfig, Usage};
use crate::plan::{KV_GROUPS, SlotId};
use crate::runner::STEPS_IN_FLIGHT_MAX;
use admission::Waiting;
use rows::{StepBuilder, StepRecord};
use sequence::{Leaving, Running, Sequence};

/// Limits of a step and of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Shape of the KV cache.
    pub kv: KvConfig,
    /// Sequences that run at once; slots are numbered below it.
    pub max_num_seqs: usize,
    /// Tokens of one step; at least `max_num_seqs`, so that every running sequence can decode.
    pub max_num_batched_tokens: usize,
    /// The same of a step in which `MANY_DECODING` sequences decode, each of which waits for what prompts take of it.
    pub max_num_mixed_tokens: usize,
}

/// What is to be done, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerLoad {
    /// Sequences with a slot.
    pub running: usize,
    /// Sequences without.
    pub waiting: usize,
    /// Of these, those that a request which came now would wait for.
    pub waiting_ahead: usize,
    /// Tokens that wait for prefill or are in the midst of it, without those that were found in the cache on arrival.
    pub prefill_tokens_ahead: usize,
    /// Tokens of running sequences whose KV is held.
    pub running_context_tokens: usize,
}

/// Waiting and running sequences and their blocks. The waiting queue is bounded by whoever calls `add`.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    kv: KvCache,
    waiting: BTreeMap<SequenceKey, Waiting>,
    running: BTreeMap<SequenceKey, Running>,
    free_slots: Vec<SlotId>,
    /// Planned and not yet completed, oldest first.
    in_flight: VecDeque<StepRecord>,
    last_step: u64,
    /// The last that came.
    last_request: u64,
    preemptions: u64,
    violations: u64,
}

impl Scheduler {
    /// Nothing to do yet.
    pub fn new(config: SchedulerConfig) -> Self {
        Self {
            config,
            kv: KvCache::new(config.kv),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            free_slots: (0..config.max_num_seqs as u32).rev().map(SlotId).collect(),
            in_flight: VecDeque::new(),
            last_step: 0,
            last_request: 0,
            preemptions: 0,
            violations: 0,
        }
    }

    /// Queues a sequence that has something to do: output, prompt logprobs or an embedding.
    pub fn add(&mut self, new: NewSequence) {
        self.last_request = self.last_request.max(new.key.request);
        let mut sequence = Sequence::new(new);
        if self.config.kv.prefix_caching {
            sequence.hash_blocks(self.config.kv.block_tokens);
        }
        self.enqueue(sequence);
    }

    /// Ends a sequence, if it is not over. Its blocks are free when its rows in flight are collected.
    pub fn abort(&mut self, key: SequenceKey) {
        self.waiting.remove(&key);
        if let Some(running) = self.running.get_mut(&key) {
            running.leaving = Some(Leaving::Over);
            self.retire_if_done(key);
        }
    }

    /// The next step, or None when nothing can be computed or enough is in flight: first a token for each decoding
    /// sequence, then prompts, then new sequences, within one budget of tokens.
    pub fn plan(&mut self) -> Option<Planned> {
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return None;
        }
        let SchedulerConfig { kv, max_num_batched_tokens, .. } = self.config;
        let named = kv.prefix_caching.then_some(kv.block_tokens);
        let rows = self.running.len();
        let mut step = StepBuilder::new(self.last_step + 1, rows, max_num_batched_tokens, named);
        self.continue_running(&mut step);
        self.admit_waiting(&mut step);
        if step.is_empty() {
            self.check_progress();
            return None;
        }
        let (planned, record) = step.finish();
        self.last_step = record.number;
        for row in record.rows.iter().filter(|row| row.fills_block) {
            if let Some(running) = self.running.get_mut(&row.key) {
                remember(running, &mut self.kv, record.number);
            }
        }
        self.in_flight.push_back(record);
        Some(planned)
    }

    /// Nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// What is to be done.
    pub fn load(&self) -> SchedulerLoad {
        let (mut prefill_tokens_ahead, mut running_context_tokens) = (0, 0);
        for running in self.running.values() {
            // One is decode's.
            let uncomputed = running.uncomputed();
            prefill_tokens_ahead += if uncomputed > 1 { uncomputed } else { 0 };
            running_context_tokens += running.computed;
        }
        prefill_tokens_ahead += self.waiting.values().map(|w| w.uncached).sum::<usize>();
        let waiting_ahead = self.waiting.keys().filter(|key| key.turn() <= self.last_request + 1).count();
        let (running, waiting) = (self.running.len(), self.waiting.len());
        SchedulerLoad { running, waiting, waiting_ahead, prefill_tokens_ahead, running_context_tokens }
    }

    /// Blocks of one group.
    pub fn usage(&self, group: usize) -> Usage {
        self.kv.usage(group)
    }

    /// Changes of what can be matched since the last call, in order.
    pub fn take_kv_events(&mut self) -> Vec<BlockEvent> {
        self.kv.take_events()
    }

    /// The device's memory is lost, and every prefix with it.
    pub fn forget_prefixes(&mut self) {
        self.kv.clear();
    }

    /// Sequences that lost their blocks, since start.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Times that an invariant did not hold, since start.
    pub fn violations(&self) -> u64 {
        self.violations
    }

    /// Marks a sequence to be computed again later; true when its blocks are free at once.
    fn preempt(&mut self, key: SequenceKey) -> bool {
        let Some(running) = self.running.get_mut(&key) else { return false };
        running.leaving = Some(Leaving::Preempted);
        self.preemptions += 1;
        self.retire_if_done(key)
    }

    /// Frees slot and blocks of a leaving sequence without rows in flight; a preempted one waits again.
    fn retire_if_done(&mut self, key: SequenceKey) -> bool {
        if !self.running.get(&key).is_some_and(|r| r.leaving.is_some() && r.rows_in_flight == 0) {
            return false;
        }
        let Some(running) = self.running.remove(&key) else { return false };
        self.kv.release(running.blocks);
        self.free_slots.push(running.slot);
        if running.leaving == Some(Leaving::Preempted) {
            let mut sequence = running.sequence;
            sequence.restart();
            self.enqueue(sequence);
        }
        true
    }

    /// The invariant of a plan without rows, which the start check of the longest sequence is for.
    fn check_progress(&mut self) {
        let something_can_run = self.is_idle() || !self.in_flight.is_empty();
        debug_assert!(something_can_run, "sequences wait, none runs, and none can be admitted");
        self.violations += u64::from(!something_can_run);
    }

    /// The invariants of every step: panic in debug, a count in release.
    fn check_invariants(&mut self) {
        let blocks_add_up = self.kv.adds_up();
        let idle_holds_nothing =
            !self.running.is_empty() || (0..KV_GROUPS).all(|g| self.kv.usage(g).in_use == 0);
        let slots_add_up = self.free_slots.len() + self.running.len() == self.config.max_num_seqs;
        debug_assert!(blocks_add_up, "free + cached + in use blocks are not the total");
        debug_assert!(idle_holds_nothing, "blocks are in use though nothing runs");
        debug_assert!(slots_add_up, "free slots and running sequences are not max_num_seqs");
        self.violations += u64::from(!(blocks_add_up && idle_holds_nothing && slots_add_up));
    }
}

/// Makes those of a sequence's full blocks findable that are not yet; `step` has written them.
fn remember(running: &mut Running, kv: &mut KvCache, step: u64) {
    let KvConfig { block_tokens, prefix_caching, .. } = *kv.config();
    if !prefix_caching || !running.has_new_block(block_tokens) {
        return;
    }
    running.sequence.hash_blocks(block_tokens);
    while running.has_new_block(block_tokens) {
        let logical = running.remembered;
        let tokens = &running.sequence.tokens[logical * block_tokens..][..block_tokens];
        let block = (running.parent, running.sequence.hashes[logical], tokens);
        running.parent = kv.remember(&mut running.blocks, logical, block, step);
        running.remembered += 1;
    }
}
