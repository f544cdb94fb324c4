//! What stays per running sequence: most of it on the GPU, here only what plans are checked against.

use super::abi::{BIAS_MAX, Bias, END_IDS_MAX, SlotParams, SlotStart};
use crate::plan::{SlotId, SlotInit};
use crate::sampling::SamplingParams;

/// The host's part of a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotState {
    /// A sequence has it.
    pub(super) is_set: bool,
    /// It has a last token, which may still be on its way.
    pub(super) has_last: bool,
    /// Alternatives that its sampled tokens come with; None: no logprobs.
    pub(super) logprobs: Option<u32>,
}

/// New slots as the GPU takes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct SlotArrays {
    pub(super) starts: Vec<SlotStart>,
    /// Prompt, then output, of those with penalties.
    pub(super) tokens: Vec<i32>,
    pub(super) bias: Vec<Bias>,
    pub(super) ends: Vec<i32>,
}

/// Position of a slot, if there is such a one.
pub(super) fn index_of(slot: SlotId, count: usize) -> Result<usize, String> {
    let index = slot.0 as usize;
    if index < count { Ok(index) } else { Err(format!("slot {index} of {count}")) }
}

/// Refuses what a slot has no room for.
pub(super) fn check(init: &SlotInit) -> Result<(), String> {
    let (bias, ends) = (init.sampling.logit_bias.len(), init.sampling.end_ids.len());
    if bias <= BIAS_MAX && ends <= END_IDS_MAX {
        return Ok(());
    }
    Err(format!("{bias} biases and {ends} end ids, room for {BIAS_MAX} and {END_IDS_MAX}"))
}

/// Tokens that a new slot brings along.
pub(super) fn start_tokens(init: &SlotInit) -> usize {
    if has_penalty(&init.sampling) { init.prompt.len() + init.output.len() } else { 0 }
}

impl SlotArrays {
    /// Adds a slot. Ids beyond the vocabulary mean nothing and are left out.
    pub(super) fn push(&mut self, init: &SlotInit, vocab: usize) {
        let sampling = &init.sampling;
        let (tokens_offset, bias_offset, end_offset) = (self.tokens.len(), self.bias.len(), self.ends.len());
        let known = |id: &&u32| (**id as usize) < vocab;
        let ids = |ids: &[u32]| ids.iter().filter(known).map(|id| *id as i32).collect::<Vec<_>>();
        let (mut n_prompt, mut n_output) = (0, 0);
        if has_penalty(sampling) {
            let (prompt, output) = (ids(&init.prompt), ids(&init.output));
            (n_prompt, n_output) = (prompt.len(), output.len());
            self.tokens.extend(prompt);
            self.tokens.extend(output);
        }
        let bias = sampling.logit_bias.iter().filter(|(id, _)| (*id as usize) < vocab);
        self.bias.extend(bias.map(|(id, value)| Bias { id: *id as i32, value: *value }));
        self.ends.extend(ids(&sampling.end_ids));
        let (n_bias, n_end) = (self.bias.len() - bias_offset, self.ends.len() - end_offset);
        self.starts.push(SlotStart {
            slot: init.slot.0 as i32,
            last_token: init.output.last().map_or(-1, |id| *id as i32),
            tokens_offset: tokens_offset as i32,
            n_prompt: n_prompt as i32,
            n_output: n_output as i32,
            bias_offset: bias_offset as i32,
            end_offset: end_offset as i32,
            reserved: 0,
            params: params(init, n_bias, n_end),
        });
    }
}

fn params(init: &SlotInit, n_bias: usize, n_end: usize) -> SlotParams {
    let sampling = &init.sampling;
    SlotParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k.min(i32::MAX as u32) as i32,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        presence: sampling.presence_penalty,
        frequency: sampling.frequency_penalty,
        repetition: sampling.repetition_penalty,
        choice: init.choice as i32,
        seed: sampling.seed,
        min_tokens: sampling.min_tokens.min(i32::MAX as u32) as i32,
        n_bias: n_bias as i32,
        n_end: n_end as i32,
        has_penalty: i32::from(has_penalty(sampling)),
        reserved: [0; 2],
    }
}

fn has_penalty(sampling: &SamplingParams) -> bool {
    sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
        || sampling.repetition_penalty != 1.0
}
