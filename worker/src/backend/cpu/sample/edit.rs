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
    out.reserve(logits.len());
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for (word, logits) in mask.words().iter().zip(logits.chunks(u32::BITS as usize)) {
        // Nearly all words allow nothing, or all of what they stand for.
        match *word {
            0 => out.resize(out.len() + logits.len(), f32::NEG_INFINITY),
            u32::MAX => out.extend_from_slice(logits),
            word => out.extend(
                logits.iter().zip(0..).map(
                    |(logit, bit)| {
                        if word >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY }
                    },
                ),
            ),
        }
        if *word != 0 {
            let copied = &out[out.len() - logits.len()..];
            for part in copied.chunks(LANES) {
                lanes.iter_mut().zip(part).for_each(|(lane, logit)| {
                    *lane = if *logit > *lane { *logit } else { *lane };
                });
            }
        }
    }
    // Behind the vocabulary's end.
    out.resize(logits.len(), f32::NEG_INFINITY);
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// Maxima that are kept side by side, so that none waits for the one before.
const LANES: usize = 16;

fn penalise(x: f32, count: u32, sampling: &SamplingParams) -> f32 {
    let repetition = sampling.repetition_penalty;
    let x = if x > 0.0 { x / repetition } else { x * repetition };
    let x = x - sampling.frequency_penalty * count as f32;
    if count > 0 { x - sampling.presence_penalty } else { x }
}
