//! Who leaves the queue. First come, first served within a priority, with two exceptions, both bounded: who fits may
//! overtake who does not, and a choice waits for the blocks of its request's first one.

use std::ops::Bound;

use super::rows::{Started, StepBuilder, give_row};
use super::sequence::{Running, Sequence};
use super::{Scheduler, SequenceKey};
use crate::kv::{FULL, KvConfig, PrefixHit, SLIDING, blocks_per_sequence};
use crate::plan::KV_GROUPS;

/// A waiting sequence is overtaken at most this often; then nobody is admitted before it. A preempted one never is.
pub const OVERTAKEN_MAX: u32 = 32;

/// A sequence loses its blocks at most this often. It then waits until all that it may come to need can be set aside, and keeps it.
pub const PREEMPTIONS_MAX: u32 = 4;

/// Sequences that do not fit are looked past up to this many, so that a long queue costs a step little.
const BLOCKED_MAX: usize = 8;

/// Part of the blocks kept free at admission, for those that run to grow into.
const WATERMARK_DIVISOR: usize = 100;

/// A sequence in the queue.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) sequence: Sequence,
    /// Tokens to compute, as far as was known when it came.
    pub(super) uncached: usize,
    overtaken: u32,
}

impl Scheduler {
    /// Puts a sequence into the queue.
    pub(super) fn enqueue(&mut self, sequence: Sequence) {
        let cached = match sequence.leader {
            Some(_) if self.config.kv.prefix_caching => self.shareable_blocks(&sequence),
            _ => self.find(&sequence).blocks,
        };
        let uncached = sequence.tokens.len() - cached * self.config.kv.block_tokens;
        self.waiting.insert(sequence.key, Waiting { sequence, uncached, overtaken: 0 });
    }

    /// Gives slots, blocks and first rows to those who wait, while there are any left.
    pub(super) fn admit_waiting(&mut self, step: &mut StepBuilder) {
        let mut blocked: Vec<SequenceKey> = Vec::new();
        let mut last = None;
        while step.prefill_left > 0 && !step.short_of_blocks && !self.free_slots.is_empty() {
            let Some(key) = self.next_waiting(last) else { return };
            last = Some(key);
            let Some(waiting) = self.waiting.get(&key).filter(|w| self.is_ready(&w.sequence, step)) else {
                continue;
            };
            let (hit, fits) = self.fit(&waiting.sequence, step);
            let waits_for_others = waiting.sequence.keeps_blocks() && !self.can_set_aside(&waiting.sequence);
            if fits && !waits_for_others {
                self.admit(key, &hit, step);
                blocked.iter().for_each(|key| self.note_overtaken(*key));
                continue;
            }
            let was_passed_over = waiting.sequence.preemptions > 0 || waiting.overtaken >= OVERTAKEN_MAX;
            // One that waits for others which keep their blocks loses nothing to those that do not.
            let holds_the_queue = was_passed_over && !waits_for_others;
            blocked.push(key);
            if holds_the_queue || blocked.len() == BLOCKED_MAX {
                return;
            }
        }
    }

    fn next_waiting(&self, last: Option<SequenceKey>) -> Option<SequenceKey> {
        let after = last.map_or(Bound::Unbounded, Bound::Excluded);
        self.waiting.range((after, Bound::Unbounded)).next().map(|(key, _)| *key)
    }

    fn note_overtaken(&mut self, key: SequenceKey) {
        if let Some(waiting) = self.waiting.get_mut(&key) {
            waiting.overtaken += 1;
        }
    }

    /// Not held back by its leader, nor by the step's bound on prompt logprobs.
    fn is_ready(&self, sequence: &Sequence, step: &StepBuilder) -> bool {
        if sequence.wants_prompt_logprobs() && step.logit_rows_left == 0 {
            return false;
        }
        let Some(leader) = sequence.leader else { return true };
        let shared = if self.config.kv.prefix_caching { self.shareable_blocks(sequence) } else { 0 };
        match self.running.get(&leader) {
            Some(leader) => leader.remembered >= shared && !leader.sequence.wants_prompt_logprobs(),
            None => !self.waiting.contains_key(&leader),
        }
    }

    /// The prompt's blocks that a leader computes for its followers: all that a hit can be made of.
    fn shareable_blocks(&self, sequence: &Sequence) -> usize {
        (sequence.prompt.len() - 1) / self.config.kv.block_tokens
    }

    /// The cached prefix; at least one token is left to compute.
    fn find(&self, sequence: &Sequence) -> PrefixHit {
        if !self.config.kv.prefix_caching || sequence.bypasses_cache() {
            return PrefixHit::none(sequence.root);
        }
        let blocks_max = (sequence.tokens.len() - 1) / self.config.kv.block_tokens;
        self.kv.find(sequence.root, &sequence.hashes, &sequence.tokens, blocks_max)
    }

    /// Whether all its tokens and one block more fit above the watermark. Alone, it only needs its own: the start check
    /// has seen to it that the longest sequence fits.
    fn fit(&self, sequence: &Sequence, step: &StepBuilder) -> (PrefixHit, bool) {
        let block_tokens = self.config.kv.block_tokens;
        let hit = self.find(sequence);
        let full = sequence.tokens.len().div_ceil(block_tokens) - hit.blocks;
        let first_row = (sequence.tokens.len() - hit.blocks * block_tokens).min(step.prefill_left);
        let sliding = first_row.div_ceil(block_tokens).min(self.config.kv.window_blocks() + 1);
        let fits = if self.running.is_empty() {
            self.kv.fits(&hit, FULL, full) && self.kv.fits(&hit, SLIDING, 1)
        } else {
            self.kv.fits(&hit, FULL, full + self.spare(sequence, FULL))
                && self.kv.fits(&hit, SLIDING, sliding + self.spare(sequence, SLIDING))
        };
        (hit, fits)
    }

    /// Whether all that it may come to need fits beside what is set aside for others: then one of them runs short only for blocks of
    /// those that may be preempted, or for a chunk of a prompt, until that has slid on.
    fn can_set_aside(&self, sequence: &Sequence) -> bool {
        let all = self.running.values().map(|running| &running.sequence).filter(|other| other.keeps_blocks());
        let needs = all.chain([sequence]).map(|sequence| self.blocks_needed_at_most(sequence));
        let sum =
            needs.fold([0; KV_GROUPS], |sum, needs| std::array::from_fn(|group| sum[group] + needs[group]));
        let KvConfig { blocks, has_group, .. } = self.config.kv;
        (0..KV_GROUPS).all(|group| !has_group[group] || sum[group] <= blocks[group])
    }

    fn blocks_needed_at_most(&self, sequence: &Sequence) -> [usize; KV_GROUPS] {
        let KvConfig { block_tokens, sliding_window, .. } = self.config.kv;
        let tokens = sequence.prompt.len() + sequence.output_max.max(sequence.output_len());
        blocks_per_sequence(tokens, block_tokens, sliding_window)
    }

    /// Blocks that must stay available behind an admission: one, the watermark, and for a sequence that was preempted a
    /// headroom that grows fourfold each time, so that it is not preempted over and over.
    fn spare(&self, sequence: &Sequence, group: usize) -> usize {
        let total = self.config.kv.blocks[group];
        let headroom = match sequence.preemptions {
            0 => 0,
            times => (self.running.len() + 1) << (2 * (times - 1)).min(20),
        };
        1 + total / WATERMARK_DIVISOR + headroom.min(total / 2)
    }

    fn admit(&mut self, key: SequenceKey, hit: &PrefixHit, step: &mut StepBuilder) {
        let Some(Waiting { sequence, .. }) = self.waiting.remove(&key) else { return };
        let Some(slot) = self.free_slots.pop() else { return };
        let (tokens, block_tokens) = (sequence.tokens.len(), self.config.kv.block_tokens);
        let bypassed = !self.config.kv.prefix_caching || sequence.bypasses_cache();
        let started = Started {
            key,
            again: sequence.preemptions > 0,
            cached_tokens: hit.blocks * block_tokens,
            looked_up_tokens: if bypassed { 0 } else { tokens },
        };
        let mut blocks = self.kv.acquire(hit);
        self.kv.reserve(&mut blocks, FULL, tokens);
        let mut running = Running::new(sequence, slot, blocks, (hit.blocks, hit.parent), block_tokens);
        step.start(&running, started);
        let has_row = give_row(&mut self.kv, &mut running, step);
        self.running.insert(key, running);
        debug_assert!(has_row, "an admitted sequence has blocks for its first row");
    }
}
