//! One choice of a request while it waits and while it runs.

use std::cmp::Ordering;
use std::sync::Arc;

use smallvec::SmallVec;
use thalweg_proto::block_hash::{self, BlockHash};

use super::admission::PREEMPTIONS_MAX;
use super::constraint::Constraint;
use crate::kv::{Parent, SequenceBlocks};
use crate::plan::{AdapterSlot, Logprobs, SlotId, SlotInit, Want};
use crate::pooling::Pooling;
use crate::sampling::SamplingParams;

/// Order of service: lower priority values first, then who came first; choices behind the first stand where later requests do, one
/// for one, so that a request of many choices takes turns with them. A preempted sequence keeps its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceKey {
    /// Lower runs earlier.
    pub priority: i32,
    /// Ascending in order of arrival.
    pub request: u64,
    /// Choice of the request.
    pub choice: u32,
}

impl SequenceKey {
    /// The request that it came with, or the later one that it stands beside.
    pub(super) fn turn(&self) -> u64 {
        self.request.saturating_add(self.choice.into())
    }
}

impl Ord for SequenceKey {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = |key: &Self| (key.priority, key.turn(), key.request, key.choice);
        order(self).cmp(&order(other))
    }
}

impl PartialOrd for SequenceKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// What the scheduler is given.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Its place in the order; unique.
    pub key: SequenceKey,
    /// At least one token.
    pub prompt: Arc<[u32]>,
    /// Tokens already put out.
    pub output: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Arc<SamplingParams>,
    /// Output tokens at most, `output` included.
    pub output_max: usize,
    /// `h_0`.
    pub root: BlockHash,
    /// What it is computed with; part of `root`.
    pub adapter: AdapterSlot,
    /// Logprobs of the prompt, with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// The prompt's embedding in place of output; `output_max` is 0 then.
    pub pooling: Option<Pooling>,
    /// Sequence of the same prompt that computes it for both: this one waits for its blocks.
    pub leader: Option<SequenceKey>,
}

/// Tokens and what is known of them; the part that outlives a preemption.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) key: SequenceKey,
    pub(super) prompt: Arc<[u32]>,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    pub(super) sampling: Arc<SamplingParams>,
    /// Of `sampling`, here because each token is held against them: a look there waits for memory twice.
    pub(super) end_ids: SmallVec<[u32; 4]>,
    pub(super) min_tokens: usize,
    pub(super) output_max: usize,
    pub(super) root: BlockHash,
    pub(super) adapter: AdapterSlot,
    /// Hashes of the full blocks of `tokens`; empty when prefixes are not reused.
    pub(super) hashes: Vec<BlockHash>,
    // What few have is boxed: every step goes over all that run.
    pub(super) prompt_logprobs: Option<Box<PromptLogprobs>>,
    pub(super) pooling: Option<Pooling>,
    pub(super) leader: Option<SequenceKey>,
    pub(super) preemptions: u32,
    /// Behind every token of the output.
    pub(super) constraint: Option<Box<Constraint>>,
}

/// Logprobs of the prompt, as far as they have come.
#[derive(Debug)]
pub(super) struct PromptLogprobs {
    pub(super) top: u32,
    pub(super) got: Vec<Logprobs>,
    pub(super) complete: bool,
}

impl Sequence {
    pub(super) fn new(new: NewSequence) -> Self {
        let mut tokens = Vec::with_capacity(new.prompt.len() + new.output.len() + 64);
        tokens.extend_from_slice(&new.prompt);
        tokens.extend_from_slice(&new.output);
        let prompt_logprobs =
            new.prompt_logprobs.map(|top| Box::new(PromptLogprobs { top, got: Vec::new(), complete: false }));
        let constraint =
            new.sampling.grammar.as_ref().map(|grammar| Box::new(Constraint::new(grammar, &new.output)));
        Self {
            key: new.key,
            prompt: new.prompt,
            tokens,
            end_ids: SmallVec::from_slice(&new.sampling.end_ids),
            min_tokens: new.sampling.min_tokens as usize,
            sampling: new.sampling,
            output_max: new.output_max,
            root: new.root,
            adapter: new.adapter,
            hashes: Vec::new(),
            prompt_logprobs,
            pooling: new.pooling,
            leader: new.leader,
            preemptions: 0,
            constraint,
        }
    }

    pub(super) fn output_len(&self) -> usize {
        self.tokens.len() - self.prompt.len()
    }

    /// Hashes every full block that has none yet.
    pub(super) fn hash_blocks(&mut self, block_tokens: usize) {
        let hashed = self.hashes.len();
        let mut parent = self.hashes.last().copied().unwrap_or(self.root);
        for block in self.tokens[hashed * block_tokens..].chunks_exact(block_tokens) {
            parent = block_hash::child(parent, block);
            self.hashes.push(parent);
        }
    }

    /// Prompt logprobs are asked for and have not all come.
    pub(super) fn wants_prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.as_ref().is_some_and(|p| !p.complete && p.got.len() + 1 < self.prompt.len())
    }

    /// Every token of the prompt has to be computed, whatever the cache holds.
    pub(super) fn bypasses_cache(&self) -> bool {
        self.wants_prompt_logprobs() || self.pooling == Some(Pooling::Mean)
    }

    /// All prompt logprobs, once, when they have come.
    pub(super) fn take_prompt_logprobs(&mut self) -> Option<Vec<Logprobs>> {
        let wanting = self.wants_prompt_logprobs();
        let logprobs = self.prompt_logprobs.as_mut().filter(|p| !wanting && !p.complete)?;
        logprobs.complete = true;
        Some(std::mem::take(&mut logprobs.got))
    }

    /// It was preempted as often as it may be.
    pub(super) fn keeps_blocks(&self) -> bool {
        self.preemptions >= PREEMPTIONS_MAX
    }

    /// Takes note that its blocks are lost, and with them prompt logprobs of a prefill cut short.
    pub(super) fn restart(&mut self) {
        self.preemptions += 1;
        if let Some(logprobs) = &mut self.prompt_logprobs {
            logprobs.got.clear();
        }
    }
}

/// A sequence with a slot and blocks.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) sequence: Sequence,
    pub(super) slot: SlotId,
    pub(super) blocks: SequenceBlocks,
    /// Tokens whose KV is written or will be by a submitted step.
    pub(super) computed: usize,
    /// Rows in steps not yet collected.
    pub(super) rows_in_flight: usize,
    /// Of these, those that yield a token.
    pub(super) samples_in_flight: usize,
    /// Tokens when the slot was set: later ones were drawn in it.
    slot_tokens: usize,
    /// Full blocks that can be found by others.
    pub(super) remembered: usize,
    /// What the next of them stands behind.
    pub(super) parent: Parent,
    /// Gets no more rows; goes when the last one in flight is collected.
    pub(super) leaving: Option<Leaving>,
}

/// Why a sequence gives its slot and blocks up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leaving {
    /// It has ended or was aborted.
    Over,
    /// Its blocks are needed; it will be computed again.
    Preempted,
}

impl Running {
    pub(super) fn new(
        sequence: Sequence,
        slot: SlotId,
        blocks: SequenceBlocks,
        (cached_blocks, parent): (usize, Parent),
        block_tokens: usize,
    ) -> Self {
        Self {
            slot,
            blocks,
            computed: cached_blocks * block_tokens,
            rows_in_flight: 0,
            samples_in_flight: 0,
            slot_tokens: sequence.tokens.len(),
            remembered: cached_blocks,
            parent,
            leaving: None,
            sequence,
        }
    }

    /// Reads something of everything that a step needs of it.
    pub(super) fn call_up(&self) -> usize {
        let Sequence { tokens, end_ids, output_max, hashes, .. } = &self.sequence;
        let last = tokens.last().map_or(0, |last| *last as usize);
        let numbers = [last, end_ids.len(), *output_max, hashes.len(), self.computed, self.blocks.call_up()];
        numbers.into_iter().fold(0, usize::wrapping_add)
    }

    pub(super) fn slot_init(&self) -> SlotInit {
        let Sequence { prompt, tokens, sampling, key, .. } = &self.sequence;
        SlotInit {
            slot: self.slot,
            sampling: sampling.clone(),
            choice: key.choice,
            prompt: prompt.clone(),
            output: tokens[prompt.len()..].to_vec(),
        }
    }

    /// Tokens, those in flight included, whose KV no submitted step writes.
    pub(super) fn uncomputed(&self) -> usize {
        self.sequence.tokens.len() + self.samples_in_flight - self.computed
    }

    /// A block of known tokens is full that others cannot find yet.
    pub(super) fn has_new_block(&self, block_tokens: usize) -> bool {
        self.remembered < self.computed.min(self.sequence.tokens.len()) / block_tokens
    }

    /// The token behind the computed ones was drawn in this slot, perhaps in a step in flight. What the sequence came
    /// with has then been computed.
    pub(super) fn is_decoding(&self) -> bool {
        self.computed >= self.slot_tokens
    }

    /// Another row would yield something.
    pub(super) fn wants_row(&self) -> bool {
        let yields =
            self.wants_sample() || self.prompt_logprobs_ahead().is_some() || self.pooling_ahead().is_some();
        self.leaving.is_none() && yields
    }

    /// Tokens of the next row when `budget` are allowed, of which `logit_rows` with prompt logprobs.
    pub(super) fn next_len(&self, budget: usize, logit_rows: usize) -> usize {
        let wanted = match self.prompt_logprobs_ahead() {
            Some(_) => (self.sequence.prompt.len() - self.computed).min(logit_rows),
            None => self.uncomputed(),
        };
        wanted.min(budget)
    }

    /// What a row of `len` tokens yields.
    pub(super) fn want(&self, len: usize) -> Want {
        if let Some(pooling) = self.pooling_ahead() {
            let ends = len == self.uncomputed();
            let is_taken_in = ends || pooling == Pooling::Mean;
            return if is_taken_in { Want::Embedding { pooling, ends } } else { Want::Nothing };
        }
        let output_index = (len == self.uncomputed() && self.wants_sample())
            .then(|| (self.sequence.output_len() + self.samples_in_flight) as u32);
        match (self.prompt_logprobs_ahead(), output_index) {
            (Some(top), output_index) => {
                let next = self.sequence.prompt.get(self.computed + len).copied();
                Want::PromptLogprobs { top, next, output_index }
            }
            (None, Some(output_index)) => Want::Sample { output_index },
            (None, None) => Want::Nothing,
        }
    }

    fn wants_sample(&self) -> bool {
        self.sequence.output_len() + self.samples_in_flight < self.sequence.output_max
    }

    /// While prompt tokens of a wanted embedding are not computed.
    fn pooling_ahead(&self) -> Option<Pooling> {
        self.sequence.pooling.filter(|_| self.computed < self.sequence.prompt.len())
    }

    /// Alternatives per token while prompt tokens with wanted logprobs are not computed.
    fn prompt_logprobs_ahead(&self) -> Option<u32> {
        let logprobs = self.sequence.prompt_logprobs.as_ref()?;
        let ahead = self.computed < self.sequence.prompt.len() && self.sequence.wants_prompt_logprobs();
        ahead.then_some(logprobs.top)
    }
}
