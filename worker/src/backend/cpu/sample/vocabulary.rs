//! Passes over one row of logits. Sums go over fixed segments of the vocabulary, upward.

use super::super::isa::Isa;
use super::super::lanes::{Kernel, LANES, Lanes, dispatch};

/// Ids per segment.
pub(super) const SEGMENT: usize = 1024;

/// Makes every logit a number that can be compared: NaN becomes minus infinity, plus infinity the largest finite number. Gives
/// the largest, or minus infinity where there was no number at all.
pub(super) fn clean(isa: Isa, logits: &mut [f32]) -> f32 {
    dispatch(isa, Clean(logits))
}

struct Clean<'a>(&'a mut [f32]);

impl Kernel for Clean<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        let (whole, rest) = self.0.as_chunks_mut::<LANES>();
        // SAFETY: the caller vouches for the instruction set; chunks are whole vectors.
        let mut largest = unsafe {
            let lowest = L::splat(f32::NEG_INFINITY);
            let mut largest = lowest;
            for chunk in whole {
                let v = L::load(chunk.as_ptr());
                let v = L::min(L::if_less(lowest, v, v, lowest), L::splat(f32::MAX));
                L::store(chunk.as_mut_ptr(), v);
                largest = L::max(largest, v);
            }
            L::largest(largest)
        };
        for x in rest {
            *x = if *x > f32::NEG_INFINITY { x.min(f32::MAX) } else { f32::NEG_INFINITY };
            largest = largest.max(*x);
        }
        largest
    }
}

/// Lowest id with exactly this logit.
pub(super) fn first_with(logits: &[f32], value: f32) -> Option<usize> {
    let (whole, _) = logits.as_chunks::<64>();
    // Comparing whole chunks without leaving early is what the compiler turns into vectors.
    let any = |chunk: &[f32; 64]| chunk.iter().fold(false, |any, x| any | (*x == value));
    let start = whole.iter().position(any).unwrap_or(whole.len()) * 64;
    logits[start..].iter().position(|x| *x == value).map(|at| start + at)
}

/// How many logits are larger.
pub(super) fn count_above(logits: &[f32], value: f32) -> usize {
    logits.chunks(SEGMENT).map(|part| part.iter().map(|x| u32::from(*x > value)).sum::<u32>() as usize).sum()
}

/// `out = e^((logit - largest) * scale)`; gives the sum.
pub(super) fn weights(isa: Isa, logits: &[f32], largest: f32, scale: f32, out: &mut [f32]) -> f32 {
    assert_eq!(logits.len(), out.len());
    dispatch(isa, Weights { logits, largest, scale, out: Some(out) })
}

/// Sums of [`weights`] by segment, and of them all.
pub(super) fn segment_sums(isa: Isa, logits: &[f32], largest: f32, scale: f32, sums: &mut Vec<f32>) -> f64 {
    sums.clear();
    sums.extend(
        logits.chunks(SEGMENT).map(|logits| dispatch(isa, Weights { logits, largest, scale, out: None })),
    );
    sums.iter().map(|sum| f64::from(*sum)).sum()
}

struct Weights<'a> {
    logits: &'a [f32],
    largest: f32,
    scale: f32,
    out: Option<&'a mut [f32]>,
}

impl Kernel for Weights<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) -> f32 {
        let n = self.logits.len();
        // SAFETY: the caller vouches for the instruction set; no access passes n, the length of both.
        unsafe {
            let mut sum = L::splat(0.0);
            for at in (0..n).step_by(LANES) {
                let count = LANES.min(n - at);
                let logits = L::load_first(self.logits.as_ptr().add(at), count);
                let weights = L::exp(L::mul(L::sub(logits, L::splat(self.largest)), L::splat(self.scale)));
                sum = L::add(sum, L::keep(weights, 0, count, 0.0));
                if let Some(out) = &mut self.out {
                    L::store_first(out.as_mut_ptr().add(at), weights, count);
                }
            }
            L::sum(sum)
        }
    }
}

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    pub(super) id: u32,
}

impl Candidate {
    /// Most likely first, ties to the lower id.
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// The `k` largest logits, largest first, ties to the lower id; those of minus infinity left out. No sort of the whole.
pub(super) fn top_k(isa: Isa, logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if k > 0 {
        dispatch(isa, Scan { logits, above: f32::NEG_INFINITY, limit: k, out });
        out.sort_unstable_by(Candidate::order);
        out.truncate(k);
    }
}

/// All logits above `above`, largest first, ties to the lower id.
pub(super) fn all_above(isa: Isa, logits: &[f32], above: f32, out: &mut Vec<Candidate>) {
    out.clear();
    dispatch(isa, Scan { logits, above, limit: usize::MAX, out });
    out.sort_unstable_by(Candidate::order);
}

/// Collects what is above a threshold, which rises when twice the limit has come together.
struct Scan<'a> {
    logits: &'a [f32],
    above: f32,
    limit: usize,
    out: &'a mut Vec<Candidate>,
}

impl Kernel for Scan<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(mut self) {
        for (index, chunk) in self.logits.chunks(LANES).enumerate() {
            // SAFETY: the caller vouches for the instruction set; the chunk is a whole vector.
            if chunk.len() == LANES && unsafe { L::largest(L::load(chunk.as_ptr())) } <= self.above {
                continue;
            }
            let ids = (index * LANES) as u32..;
            let above = self.above;
            let found = chunk.iter().zip(ids).filter(|(logit, _)| **logit > above);
            self.out.extend(found.map(|(logit, id)| Candidate { logit: *logit, id }));
            if self.out.len() >= self.limit.saturating_mul(2).max(4 * LANES) && self.out.len() > self.limit {
                self.out.select_nth_unstable_by(self.limit - 1, Candidate::order);
                self.out.truncate(self.limit);
                self.above = self.out[self.limit - 1].logit;
            }
        }
    }
}
