//! From logits to tokens and logprobs: one row at a time, each a function of its logits, parameters and output index.
//!
//! A logit that is NaN counts as minus infinity, and plus infinity as the largest finite number. Where no number remains (a
//! broken model, or every token masked) the token is 0 and its logprob NaN: deterministic, and nobody else's step fails.

use parking_lot::Mutex;
use thalweg_model::grammar::TokenMask;

use super::arena::{Slabs, each};
use super::isa::Isa;
use super::pool::Pool;
use super::slots::{Draw, Slots};
use super::step::{LogitRow, Step};
use crate::plan::Logprobs;
use draw::{Buffers, draw, is_greedy};
use edit::Edits;
use philox::uniform;
use vocabulary::{clean, count_above, segment_sums, top_k};

mod draw;
mod edit;
mod philox;
#[cfg(test)]
mod tests;
mod vocabulary;

/// Working memory of the threads.
pub(super) struct Sampler {
    workspaces: Vec<Mutex<Workspace>>,
}

#[derive(Default)]
struct Workspace {
    edits: Edits,
    buffers: Buffers,
    sums: Vec<f32>,
    masked: Vec<f32>,
}

/// What draws depend on besides logits.
pub(super) struct Inputs<'a> {
    pub(super) step: &'a Step,
    pub(super) slots: &'a Slots,
    /// By row of the step; behind the end, and where there is None, anything may be drawn.
    pub(super) masks: &'a [Option<TokenMask>],
}

/// What one wanted position yielded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Yield {
    pub(super) prompt: Option<Logprobs>,
    pub(super) sampled: Option<Logprobs>,
}

impl Sampler {
    pub(super) fn new(threads: usize) -> Self {
        Self { workspaces: (0..threads).map(|_| Mutex::default()).collect() }
    }

    /// Rows of `logits`, one per entry of `rows`, to `out`. The logits are left cleaned and otherwise as they were.
    pub(super) fn run(
        &self,
        pool: &Pool,
        inputs: &Inputs<'_>,
        rows: &[LogitRow],
        logits: &mut [f32],
        out: &mut [Yield],
    ) {
        assert!(rows.len() == out.len() && self.workspaces.len() >= pool.threads());
        let vocab = logits.len() / rows.len().max(1);
        let logits = Slabs::new(logits, vocab.max(1));
        let yields: Vec<Mutex<&mut Yield>> = out.iter_mut().map(Mutex::new).collect();
        each(pool, rows.len(), &|thread, index| {
            let workspace = &mut self.workspaces[thread].lock();
            let row = &rows[index];
            // SAFETY: each row of logits is one task's.
            let logits = unsafe { logits.get(index) };
            let draw = inputs.slots.draw(inputs.step.rows[row.row].slot);
            let mask = inputs.masks.get(row.row).and_then(Option::as_ref);
            **yields[index].lock() =
                sample_row(pool.isa(), row, draw.map(|draw| (draw, mask)), logits, workspace);
        });
    }
}

fn sample_row(
    isa: Isa,
    row: &LogitRow,
    draw: Option<(&Draw, Option<&TokenMask>)>,
    logits: &mut [f32],
    workspace: &mut Workspace,
) -> Yield {
    let largest = clean(isa, logits);
    let raw = Raw { isa, largest };
    let prompt = row.target.map(|(token, top)| raw.logprobs(logits, token, top as usize, workspace));
    let sampled = row.sample.zip(draw).map(|(output_index, (draw, mask))| {
        let token = match mask {
            None => sample_token(&raw, output_index, draw, logits, workspace),
            Some(mask) => sample_masked(&raw, output_index, draw, (logits, mask), workspace),
        };
        match draw.sampling.logprobs {
            Some(top) => raw.logprobs(logits, token, top as usize, workspace),
            None => Logprobs { token, logprob: f32::NAN, rank: 0, top: Vec::new() },
        }
    });
    Yield { prompt, sampled }
}

/// Among the mask's tokens, on a copy: logprobs are those of all.
fn sample_masked(
    raw: &Raw,
    output_index: u32,
    draw_by: &Draw,
    (logits, mask): (&[f32], &TokenMask),
    workspace: &mut Workspace,
) -> u32 {
    let mut masked = std::mem::take(&mut workspace.masked);
    let largest = edit::masked(logits, mask, &mut masked);
    let raw = Raw { isa: raw.isa, largest };
    let token = sample_token(&raw, output_index, draw_by, &mut masked, workspace);
    workspace.masked = masked;
    token
}

fn sample_token(
    raw: &Raw,
    output_index: u32,
    draw_by: &Draw,
    logits: &mut [f32],
    workspace: &mut Workspace,
) -> u32 {
    let Draw { sampling, choice, seen } = draw_by;
    workspace.edits.apply(logits, sampling, output_index, seen.as_ref());
    let largest = if workspace.edits.is_empty() { raw.largest } else { clean(raw.isa, logits) };
    let token = if largest == f32::NEG_INFINITY {
        0
    } else {
        let random = if is_greedy(sampling) { 0.0 } else { uniform(sampling.seed, *choice, output_index) };
        draw(raw.isa, logits, largest, sampling, random, &mut workspace.buffers)
    };
    workspace.edits.undo(logits);
    token
}

/// Cleaned logits before any edit.
struct Raw {
    isa: Isa,
    largest: f32,
}

impl Raw {
    fn logprobs(&self, logits: &[f32], token: u32, top: usize, workspace: &mut Workspace) -> Logprobs {
        let sum = segment_sums(self.isa, logits, self.largest, 1.0, &mut workspace.sums);
        let of = |logit: f32| (f64::from(logit) - f64::from(self.largest) - sum.ln()) as f32;
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let candidates = &mut workspace.buffers.candidates;
        top_k(self.isa, logits, top, candidates);
        let top = candidates.iter().map(|candidate| (candidate.id, of(candidate.logit))).collect();
        Logprobs { token, logprob: of(logit), rank: 1 + count_above(logits, logit) as u32, top }
    }
}
