//! Drawing one token from edited logits.

use super::super::isa::Isa;
use super::vocabulary::{Candidate, SEGMENT, all_above, first_with, segment_sums, top_k, weights};
use crate::sampling::SamplingParams;

/// Temperatures below this are greedy: dividing by them would overflow.
const GREEDY_BELOW: f32 = 1e-5;
/// Keeps rounding from dropping a candidate that the exact rule keeps.
const SLACK: f64 = 1.0 - 1e-5;

/// Buffers of one thread.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) candidates: Vec<Candidate>,
    logits: Vec<f32>,
    weights: Vec<f32>,
    sums: Vec<f32>,
}

/// A token of cleaned logits whose largest is `largest`, which is a number; `random` is uniform in [0, 1).
pub(super) fn draw(
    isa: Isa,
    logits: &[f32],
    largest: f32,
    sampling: &SamplingParams,
    random: f64,
    buffers: &mut Buffers,
) -> u32 {
    if is_greedy(sampling) {
        return first_with(logits, largest).unwrap_or(0) as u32;
    }
    let scale = 1.0 / sampling.temperature;
    let filtered = sampling.top_k > 0 || sampling.top_p < 1.0 || sampling.min_p > 0.0;
    if filtered {
        from_candidates(isa, logits, largest, sampling, random, buffers)
    } else {
        from_all(isa, logits, largest, scale, random, buffers)
    }
}

/// No random number is needed.
pub(super) fn is_greedy(sampling: &SamplingParams) -> bool {
    sampling.temperature < GREEDY_BELOW
}

/// Inverse of the distribution function: the segment first, then the token in it.
fn from_all(isa: Isa, logits: &[f32], largest: f32, scale: f32, random: f64, buffers: &mut Buffers) -> u32 {
    let total = segment_sums(isa, logits, largest, scale, &mut buffers.sums);
    let mut target = random * total;
    let mut segment = 0;
    for (index, sum) in buffers.sums.iter().enumerate().filter(|(_, sum)| **sum > 0.0) {
        segment = index;
        if target < f64::from(*sum) {
            break;
        }
        target -= f64::from(*sum);
    }
    let first = segment * SEGMENT;
    let logits = &logits[first..logits.len().min(first + SEGMENT)];
    buffers.weights.resize(logits.len(), 0.0);
    weights(isa, logits, largest, scale, &mut buffers.weights);
    (first + pick(&buffers.weights, target)) as u32
}

/// Top-k, then top-p of what is left, then min-p.
fn from_candidates(
    isa: Isa,
    logits: &[f32],
    largest: f32,
    sampling: &SamplingParams,
    random: f64,
    buffers: &mut Buffers,
) -> u32 {
    let scale = 1.0 / sampling.temperature;
    let mut total = None;
    if sampling.top_k > 0 {
        top_k(isa, logits, sampling.top_k as usize, &mut buffers.candidates);
    } else {
        let all = segment_sums(isa, logits, largest, scale, &mut buffers.sums);
        // Tokens that weigh less than this make up less than 1 - top_p together, so that top_p never reaches them.
        let tail = (1.0 - f64::from(sampling.top_p)).max(0.0) * all / logits.len() as f64;
        let lightest = tail.max(f64::from(sampling.min_p)) * SLACK;
        let above = f64::from(largest) + f64::from(sampling.temperature) * lightest.ln();
        all_above(isa, logits, (above as f32).next_down(), &mut buffers.candidates);
        total = Some(all);
    }
    let Buffers { candidates, logits, weights: out, .. } = buffers;
    logits.clear();
    logits.extend(candidates.iter().map(|candidate| candidate.logit));
    out.resize(logits.len(), 0.0);
    weights(isa, logits, largest, scale, out);
    let total = total.unwrap_or_else(|| out.iter().map(|w| f64::from(*w)).sum());
    let kept = top_p_count(out, f64::from(sampling.top_p) * total);
    let heaviest = out.first().copied().unwrap_or(0.0);
    let kept = out[..kept].partition_point(|w| *w >= sampling.min_p * heaviest).max(1);
    out.truncate(kept);
    let target = random * out.iter().map(|w| f64::from(*w)).sum::<f64>();
    candidates.get(pick(out, target)).map_or(0, |candidate| candidate.id)
}

/// The shortest prefix that weighs at least `wanted`.
fn top_p_count(weights: &[f32], wanted: f64) -> usize {
    let mut sum = 0.0;
    let before = weights.iter().take_while(|w| {
        let short = sum < wanted;
        sum += f64::from(**w);
        short
    });
    before.count().max(1).min(weights.len())
}

/// Index at which the running sum passes `target`; rounding may leave it short, and then it is the last that weighs anything.
fn pick(weights: &[f32], mut target: f64) -> usize {
    let mut last = 0;
    for (index, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
        last = index;
        if target < f64::from(*weight) {
            break;
        }
        target -= f64::from(*weight);
    }
    last
}
