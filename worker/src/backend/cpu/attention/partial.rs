//! Results of chunks, and how they are merged upward.

use super::super::lanes::{Kernel, LANES, Lanes};
use super::tile::TILE_QUERIES;

/// A tile's softmax over some keys, unnormalised. `values` is `[query][head_dim]`.
pub(super) struct PartialMut<'a> {
    /// Largest score; minus infinity where the query has seen nothing.
    pub(super) largest: &'a mut [f32],
    /// Sum of weights relative to the largest.
    pub(super) sum: &'a mut [f32],
    pub(super) values: &'a mut [f32],
}

/// Floats that a partial takes.
pub(super) fn partial_floats(head_dim: usize) -> usize {
    TILE_QUERIES * (2 + head_dim)
}

impl<'a> PartialMut<'a> {
    /// Lays a partial over [`partial_floats`] floats.
    pub(super) fn over(memory: &'a mut [f32]) -> Self {
        let (largest, rest) = memory.split_at_mut(TILE_QUERIES);
        let (sum, values) = rest.split_at_mut(TILE_QUERIES);
        Self { largest, sum, values }
    }

    /// Nothing seen.
    pub(super) fn clear(&mut self) {
        self.largest.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
    }

    fn is_empty(&self, query: usize) -> bool {
        self.sum[query] == 0.0 && self.largest[query] == f32::NEG_INFINITY
    }
}

/// Takes the chunk that follows those seen so far into a state.
pub(super) struct MergeKernel<'a, 'b, 'c> {
    pub(super) state: &'a mut PartialMut<'b>,
    pub(super) next: &'a PartialMut<'c>,
    pub(super) queries: usize,
    pub(super) head_dim: usize,
}

impl Kernel for MergeKernel<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { state, next, queries, head_dim } = self;
        for query in (0..queries).filter(|query| !next.is_empty(*query)) {
            let ours = &mut state.values[query * head_dim..][..head_dim];
            let theirs = &next.values[query * head_dim..][..head_dim];
            let (old, new) = (state.largest[query], next.largest[query]);
            if state.sum[query] == 0.0 && old == f32::NEG_INFINITY {
                (state.largest[query], state.sum[query]) = (new, next.sum[query]);
                ours.copy_from_slice(theirs);
                continue;
            }
            let largest = if new > old { new } else { old };
            // SAFETY: the caller vouches for the instruction set.
            unsafe {
                let (old, new) = (exp::<L>(old - largest), exp::<L>(new - largest));
                state.sum[query] = state.sum[query].mul_add(old, next.sum[query] * new);
                rescale::<L>(ours, old, theirs, new);
            }
            state.largest[query] = largest;
        }
    }
}

/// A query's attention: its values over its sum; zeros where it has seen nothing.
pub(super) struct FinishKernel<'a, 'b> {
    pub(super) state: &'a PartialMut<'b>,
    pub(super) query: usize,
    pub(super) out: &'a mut [f32],
}

impl Kernel for FinishKernel<'_, '_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { state, query, out } = self;
        let values = &state.values[query * out.len()..][..out.len()];
        if state.is_empty(query) {
            return out.fill(0.0);
        }
        for at in (0..out.len()).step_by(LANES) {
            // SAFETY: the caller vouches for the instruction set; a head is whole vectors.
            unsafe {
                let value = L::load(values.as_ptr().add(at));
                L::store(out.as_mut_ptr().add(at), L::div(value, L::splat(state.sum[query])));
            }
        }
    }
}

#[inline(always)]
unsafe fn exp<L: Lanes>(x: f32) -> f32 {
    // SAFETY: the caller vouches for the instruction set.
    unsafe { L::largest(L::exp(L::splat(x))) }
}

/// `a = a * of_a + b * of_b`.
#[inline(always)]
unsafe fn rescale<L: Lanes>(a: &mut [f32], of_a: f32, b: &[f32], of_b: f32) {
    assert!(a.len() == b.len() && a.len().is_multiple_of(LANES));
    for at in (0..a.len()).step_by(LANES) {
        // SAFETY: the caller vouches for the instruction set; whole vectors of both.
        unsafe {
            let place = a.as_mut_ptr().add(at);
            let theirs = L::mul(L::load(b.as_ptr().add(at)), L::splat(of_b));
            L::store(place, L::fma(L::load(place), L::splat(of_a), theirs));
        }
    }
}
