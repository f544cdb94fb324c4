//! A language model without weights. Its KV cells hold what was written where, and its tokens are a hash of every cell that
//! a token may see, so that they come out right only if all bookkeeping is.

use std::collections::{HashMap, HashSet, VecDeque};

use smallvec::smallvec;
use thalweg_model::grammar::{Grammar, Matcher, TokenMask};
use thalweg_worker::backend::BackendError;
use thalweg_worker::kv::{FULL, KvConfig, SLIDING};
use thalweg_worker::plan::{
    BlockTable, KV_GROUPS, Logprobs, Row, RowInput, RowOutput, SlotId, SlotInit, StepId, StepMasks,
    StepOutput, StepPlan, Want,
};
use thalweg_worker::pooling::Pooling;
use thalweg_worker::runner::{Runner, STEPS_IN_FLIGHT_MAX};
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::FinishReason;

/// Ids are below this.
pub(crate) const VOCAB: u32 = 64;

/// The function that is computed, with KV or without.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HashModel {
    pub(crate) seed: u64,
    pub(crate) has_group: [bool; KV_GROUPS],
    pub(crate) window: Option<usize>,
}

/// What the model draws from besides its context.
struct Drawing<'a> {
    prompt: &'a [u32],
    output: &'a [u32],
    sampling: &'a SamplingParams,
    choice: u32,
    /// None: anything.
    mask: Option<&'a TokenMask>,
}

impl HashModel {
    /// Digest of a prefix whose last token is `token`.
    fn digest(&self, previous: u64, position: usize, token: u32) -> u64 {
        mix(&[self.seed, previous, position as u64, u64::from(token)])
    }

    fn digests(&self, tokens: &[u32]) -> Vec<u64> {
        let mut last = 0;
        let step = |(position, token): (usize, &u32)| {
            last = self.digest(last, position, *token);
            last
        };
        tokens.iter().enumerate().map(step).collect()
    }

    /// First position that a token at `position` sees in a group.
    fn first_seen(&self, group: usize, position: usize) -> usize {
        match self.window {
            Some(window) if group == SLIDING => (position + 1).saturating_sub(window),
            _ => 0,
        }
    }

    /// What a position sees, over all groups.
    fn attend(&self, position: usize, cell: impl Fn(usize, usize) -> u64) -> u64 {
        let groups = (0..KV_GROUPS).filter(|g| self.has_group[*g]);
        groups.fold(0, |sum, group| {
            (self.first_seen(group, position)..=position).fold(sum, |sum, at| mix(&[sum, cell(group, at)]))
        })
    }

    fn draw(&self, seen: u64, from: &Drawing<'_>, output_index: usize) -> Logprobs {
        assert_eq!(output_index, from.output.len(), "output index is the number of outputs");
        let state =
            mix(&[hash_ids(from.prompt), hash_ids(from.output), u64::from(from.choice), from.sampling.seed]);
        let mut token = (mix(&[seen, state]) % u64::from(VOCAB)) as u32;
        let too_early = output_index < from.sampling.min_tokens as usize;
        let may_be = |token: u32| {
            !(too_early && from.sampling.end_ids.contains(&token))
                && from.mask.is_none_or(|mask| mask.allows(token))
        };
        assert!((0..VOCAB).any(may_be), "a mask leaves something to draw");
        while !may_be(token) {
            token = (token + 1) % VOCAB;
        }
        self.logprob(seen, token)
    }

    fn logprob(&self, seen: u64, token: u32) -> Logprobs {
        let noise = mix(&[seen, u64::from(token), 1]);
        Logprobs {
            token,
            logprob: -((noise % 1000) as f32) / 100.0,
            rank: (noise % 7) as u32 + 1,
            top: Vec::new(),
        }
    }

    /// The right answer of one choice, computed alone and without any cache.
    pub(crate) fn answer(
        &self,
        prompt: &[u32],
        output: &[u32],
        sampling: &SamplingParams,
        choice: u32,
        output_max: usize,
    ) -> (Vec<Logprobs>, FinishReason) {
        let mut tokens = [prompt, output].concat();
        let mut answer = Vec::new();
        let mut matcher = sampling.grammar.as_ref().map(Grammar::matcher);
        matcher.iter_mut().for_each(|matcher| matcher.consume(output).unwrap());
        while tokens.len() - prompt.len() < output_max {
            let digests = self.digests(&tokens);
            let seen = self.attend(tokens.len() - 1, |_, at| digests[at]);
            let index = tokens.len() - prompt.len();
            let mask = match &mut matcher {
                None => None,
                Some(matcher) => match may_follow(matcher, sampling, index) {
                    Some(mask) => Some(mask),
                    None => return (answer, FinishReason::Complete),
                },
            };
            let output = &tokens[prompt.len()..];
            let drawn =
                self.draw(seen, &Drawing { prompt, output, sampling, choice, mask: mask.as_ref() }, index);
            tokens.push(drawn.token);
            let stops = sampling.end_ids.contains(&drawn.token);
            answer.push(drawn);
            if stops && index >= sampling.min_tokens as usize {
                return (answer, FinishReason::Stop);
            }
            if let Some(matcher) = &mut matcher {
                matcher.consume(&tokens[tokens.len() - 1..]).unwrap();
                if matcher.is_stopped() {
                    return (answer, FinishReason::Complete);
                }
            }
        }
        (answer, FinishReason::Length)
    }

    /// The prompt's embedding.
    pub(crate) fn embedding(&self, prompt: &[u32], pooling: Pooling) -> Vec<f32> {
        let digests = self.digests(prompt);
        let seen: Vec<u64> = (0..prompt.len()).map(|at| self.attend(at, |_, at| digests[at])).collect();
        vector(match pooling {
            Pooling::Last => seen[prompt.len() - 1],
            Pooling::Mean => pool(0, &seen),
        })
    }

    /// Logprobs of the prompt's second token and on.
    pub(crate) fn prompt_logprobs(&self, prompt: &[u32]) -> Vec<Logprobs> {
        let digests = self.digests(prompt);
        let target = |at: usize| self.logprob(self.attend(at - 1, |_, at| digests[at]), prompt[at]);
        (1..prompt.len()).map(target).collect()
    }
}

/// Takes in what more tokens see; their order matters.
fn pool(pooled: u64, seen: &[u64]) -> u64 {
    seen.iter().fold(pooled, |pooled, seen| mix(&[pooled, *seen]))
}

fn vector(pooled: u64) -> Vec<f32> {
    [pooled >> 42, pooled >> 21, pooled].map(|part| (part & 0x1f_ffff) as f32).to_vec()
}

/// What may be drawn: neither ignored ends nor ends before min_tokens, or nothing at all.
fn may_follow(matcher: &mut Matcher, sampling: &SamplingParams, index: usize) -> Option<TokenMask> {
    let is_end = |id: &u32| sampling.end_ids.contains(id);
    let is_ignored = |id: &u32| matcher.eos_ids().contains(id) && !is_end(id);
    let too_early = index < sampling.min_tokens as usize;
    let ids = matcher.copy().mask(&sampling.end_ids).unwrap().ids();
    let ids: Vec<u32> = ids.into_iter().filter(|id| !(is_ignored(id) || too_early && is_end(id))).collect();
    (!ids.is_empty()).then(|| TokenMask::of(VOCAB as usize, &ids))
}

/// Runs plans over simulated KV memory, which is never cleared: what is stale stays readable, and is found out.
#[derive(Debug)]
pub(crate) struct HashRunner {
    pub(crate) model: HashModel,
    block_tokens: usize,
    token_budget: usize,
    cells: [Vec<Option<Cell>>; KV_GROUPS],
    slots: HashMap<SlotId, Slot>,
    queued: VecDeque<(StepId, StepPlan)>,
    masks: HashMap<StepId, StepMasks>,
    last_step: u64,
    /// Steps after which it fails.
    pub(crate) fails_after: Option<u64>,
    /// Tokens computed per step.
    pub(crate) step_tokens: Vec<usize>,
}

/// Group and cell, and whose row wrote it in this step.
type Written = HashMap<(usize, usize), SlotId>;

#[derive(Clone, Copy, Debug)]
struct Cell {
    position: usize,
    digest: u64,
}

#[derive(Debug)]
struct Slot {
    init: SlotInit,
    output: Vec<u32>,
    sampled: Option<u32>,
    next_position: Option<usize>,
    /// Of the tokens so far, where they are pooled.
    pooled: Option<u64>,
}

impl HashRunner {
    pub(crate) fn new(model: HashModel, kv: &KvConfig, token_budget: usize) -> Self {
        Self {
            model,
            block_tokens: kv.block_tokens,
            token_budget,
            cells: kv.blocks.map(|blocks| vec![None; blocks * kv.block_tokens]),
            slots: HashMap::new(),
            queued: VecDeque::new(),
            masks: HashMap::new(),
            last_step: 0,
            fails_after: None,
            step_tokens: Vec::new(),
        }
    }

    fn run(&mut self, plan: StepPlan, masks: Vec<Option<TokenMask>>) -> StepOutput {
        for init in plan.slots {
            let (output, init) = (init.output.clone(), init);
            let slot = Slot { output, init: init.clone(), sampled: None, next_position: None, pooled: None };
            self.slots.insert(init.slot, slot);
        }
        let mut seen = HashSet::new();
        assert!(plan.rows.iter().all(|row| seen.insert(row.slot)), "one row per slot");
        let tokens: usize = plan.rows.iter().map(|row| row.input.len()).sum();
        assert!(tokens <= self.token_budget, "{tokens} tokens in a step of {}", self.token_budget);
        self.step_tokens.push(tokens);
        let mut written = HashMap::new();
        let rows: Vec<RowOutput> = plan
            .rows
            .iter()
            .enumerate()
            .map(|(at, row)| {
                let mask = plan.constrained.iter().position(|row| *row == at).map(|mask| &masks[mask]);
                // A surplus row's draw is for nobody: it may be anything.
                self.run_row(row, mask.and_then(Option::as_ref), &mut written)
            })
            .collect();
        StepOutput { rows, seconds: 0.001 * tokens as f64 }
    }

    fn run_row(&mut self, row: &Row, mask: Option<&TokenMask>, written: &mut Written) -> RowOutput {
        let slot = self.slots.get_mut(&row.slot).expect("the slot was set");
        let tokens = match &row.input {
            RowInput::Tokens(ids) => ids.clone(),
            RowInput::LastSampled => vec![slot.sampled.expect("the slot has sampled")],
        };
        assert!(!tokens.is_empty(), "a row has tokens");
        let context = row.context as usize;
        assert!(slot.next_position.is_none_or(|next| next == context), "rows of a slot follow each other");
        slot.next_position = Some(context + tokens.len());
        let seen: Vec<u64> = tokens
            .iter()
            .enumerate()
            .map(|(i, token)| {
                self.write(row, context + i, *token, written);
                self.model.attend(context + i, |group, at| {
                    let writer = written.get(&(group, self.cell_of(&row.tables[group], group, at)));
                    assert!(writer.is_none_or(|w| *w == row.slot), "a row of the same step is not read");
                    self.read(&row.tables[group], group, at).digest
                })
            })
            .collect();
        self.yield_row(row, &tokens, &seen, mask)
    }

    fn yield_row(&mut self, row: &Row, tokens: &[u32], seen: &[u64], mask: Option<&TokenMask>) -> RowOutput {
        let last = *seen.last().expect("a row has tokens");
        match row.want {
            Want::Nothing => RowOutput::default(),
            Want::Sample { output_index } => RowOutput {
                sampled: smallvec![self.sample(row.slot, last, output_index, mask)],
                ..RowOutput::default()
            },
            Want::Embedding { pooling, ends } => {
                let slot = self.slots.get_mut(&row.slot).expect("the slot was set");
                let pooled = match pooling {
                    Pooling::Last => last,
                    Pooling::Mean if row.context == 0 => pool(0, seen),
                    Pooling::Mean => pool(slot.pooled.expect("a mean begins with the prompt"), seen),
                };
                slot.pooled = Some(pooled);
                RowOutput { embedding: ends.then(|| vector(pooled)), ..RowOutput::default() }
            }
            Want::PromptLogprobs { next, output_index, .. } => {
                let targets = tokens.iter().skip(1).copied().chain(next);
                let prompt =
                    targets.zip(seen).map(|(target, seen)| self.model.logprob(*seen, target)).collect();
                let sampled =
                    output_index.map(|index| self.sample(row.slot, last, index, mask)).into_iter().collect();
                RowOutput { sampled, prompt, embedding: None }
            }
        }
    }

    fn sample(&mut self, slot: SlotId, seen: u64, output_index: u32, mask: Option<&TokenMask>) -> Logprobs {
        let slot = self.slots.get_mut(&slot).expect("the slot was set");
        let SlotInit { prompt, sampling, choice, .. } = &slot.init;
        let drawing = Drawing { prompt, output: &slot.output, sampling, choice: *choice, mask };
        let drawn = self.model.draw(seen, &drawing, output_index as usize);
        slot.output.push(drawn.token);
        slot.sampled = Some(drawn.token);
        drawn
    }

    fn write(&mut self, row: &Row, position: usize, token: u32, written: &mut Written) {
        let chain = if self.model.has_group[FULL] { FULL } else { SLIDING };
        let previous = match position.checked_sub(1) {
            Some(before) => self.read(&row.tables[chain], chain, before).digest,
            None => 0,
        };
        let digest = self.model.digest(previous, position, token);
        for group in (0..KV_GROUPS).filter(|g| self.model.has_group[*g]) {
            let cell = self.cell_of(&row.tables[group], group, position);
            assert_eq!(written.insert((group, cell), row.slot), None, "no cell is written twice in a step");
            self.cells[group][cell] = Some(Cell { position, digest });
        }
    }

    fn read(&self, table: &BlockTable, group: usize, position: usize) -> Cell {
        let cell =
            self.cells[group][self.cell_of(table, group, position)].expect("a visible cell was written");
        assert_eq!(cell.position, position, "group {group} holds another position's KV");
        cell
    }

    fn cell_of(&self, table: &BlockTable, group: usize, position: usize) -> usize {
        let logical = position / self.block_tokens;
        let at = logical.checked_sub(table.first as usize).filter(|at| *at < table.blocks.len());
        let at =
            at.unwrap_or_else(|| panic!("group {group} has no block for position {position} in {table:?}"));
        table.blocks[at].0 as usize * self.block_tokens + position % self.block_tokens
    }
}

impl Runner for HashRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        assert!(self.queued.len() < STEPS_IN_FLIGHT_MAX, "two steps in flight at most");
        assert!(!plan.rows.is_empty(), "a step has rows");
        self.last_step += 1;
        if self.fails_after.is_some_and(|steps| self.last_step > steps) {
            return Err(BackendError { device: "hash".into(), reason: "told to fail".into() });
        }
        self.queued.push_back((StepId(self.last_step), plan));
        Ok(StepId(self.last_step))
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        assert_eq!(self.queued.front().map(|(step, _)| *step), Some(step), "masks are for the oldest step");
        assert_eq!(self.masks.insert(step, masks), None, "masks come once");
        Ok(())
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        let (oldest, plan) = self.queued.pop_front().expect("a step is in flight");
        assert_eq!(oldest, step, "steps are collected in order");
        let masks = self.masks.remove(&step);
        assert_eq!(masks.is_some(), !plan.constrained.is_empty(), "masks are for constrained rows");
        let masks = masks.map(|masks| masks.0).unwrap_or_default();
        assert_eq!(masks.len(), plan.constrained.len(), "a mask per row");
        Ok(self.run(plan, masks))
    }
}

fn hash_ids(ids: &[u32]) -> u64 {
    ids.iter().fold(ids.len() as u64, |sum, id| mix(&[sum, u64::from(*id)]))
}

/// Mixes words as SplitMix64 does.
fn mix(words: &[u64]) -> u64 {
    words.iter().fold(0x5851_f42d_4c95_7f2d, |state, word| {
        let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}
