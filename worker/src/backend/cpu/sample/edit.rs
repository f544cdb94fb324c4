//! What a request changes about logits before a token is drawn, in vLLM's order; kept so that it can be undone.

use thalweg_model::grammar::TokenMask;

use super::super::slots::Seen;
use crate::sampling::SamplingParams;

/// Edits made to a row, to be undone in reverse.
#[derive(Default)]
pub(super) struct Edits(Vec<(u32, f32)>);

impl Edits {
    /// Bias; end tokens masked until min_tokens are out; repetition, frequency and presence penalties.
    pub(super) fn apply(
        &mut self,
        logits: &mut [f32],
        sampling: &SamplingParams,
        output_index: u32,
        seen: Option<&Seen>,
    ) {
        for (id, bias) in &sampling.logit_bias {
            self.edit(logits, *id, |x| x + bias);
        }
        if output_index < sampling.min_tokens {
            for id in &sampling.end_ids {
                self.edit(logits, *id, |_| f32::NEG_INFINITY);
            }
        }
        for (id, count) in seen.into_iter().flat_map(|seen| &seen.counts) {
            self.edit(logits, *id, |x| penalise(x, *count, sampling));
        }
    }

    fn edit(&mut self, logits: &mut [f32], id: u32, change: impl Fn(f32) -> f32) {
        if let Some(logit) = logits.get_mut(id as usize) {
            self.0.push((id, *logit));
            *logit = change(*logit);
        }
    }

    /// Nothing was changed.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Restores the row.
    pub(super) fn undo(&mut self, logits: &mut [f32]) {
        for (id, logit) in self.0.drain(..).rev() {
            logits[id as usize] = logit;
        }
    }
}

/// Copies cleaned logits; those of tokens that may not be drawn become minus infinity. Returns the largest.
pub(super) fn masked(logits: &[f32], mask: &TokenMask, out: &mut Vec<f32>) -> f32 {
    out.clear();
    out.resize(logits.len(), f32::NEG_INFINITY);
    let mut largest = f32::NEG_INFINITY;
    for (word, at) in mask.words().iter().zip((0..).step_by(32)) {
        let mut left = *word;
        while left != 0 {
            let id = at + left.trailing_zeros() as usize;
            left &= left - 1;
            if let (Some(from), Some(to)) = (logits.get(id), out.get_mut(id)) {
                *to = *from;
                largest = largest.max(*from);
            }
        }
    }
    largest
}

fn penalise(x: f32, count: u32, sampling: &SamplingParams) -> f32 {
    let repetition = sampling.repetition_penalty;
    let x = if x > 0.0 { x / repetition } else { x * repetition };
    let x = x - sampling.frequency_penalty * count as f32;
    if count > 0 { x - sampling.presence_penalty } else { x }
}
