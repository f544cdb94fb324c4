//! Blocks of keys and values on their way into a tile, and the softmax of its scores.

use super::super::config::BLOCK_TOKENS;
use super::super::kv_dtype::KvElement;
use super::super::lanes::{LANES, Lanes};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Turns scores into weights, in place: e^(score - largest) for keys `from..to`, 0 for the others of their blocks. Gives the
/// largest score and the sum of the weights; minus infinity and 0 where the range is empty.
#[inline(always)]
pub(super) unsafe fn softmax<L: Lanes>(scores: &mut [f32], from: usize, to: usize) -> (f32, f32) {
    if from >= to {
        return (f32::NEG_INFINITY, 0.0);
    }
    assert!(to <= scores.len());
    let blocks = (from / LANES * LANES..to).step_by(LANES);
    // SAFETY: the caller vouches for the instruction set; `at` is a multiple of 16 below `to`, within a row of CHUNK scores.
    unsafe {
        let seen = |v: L::V, at: usize, other: f32| match at >= from && at + LANES <= to {
            true => v,
            false => L::keep(v, from.max(at) - at, to.min(at + LANES) - at, other),
        };
        let mut largest = L::splat(f32::NEG_INFINITY);
        for at in blocks.clone() {
            largest = L::max(largest, seen(L::load(scores.as_ptr().add(at)), at, f32::NEG_INFINITY));
        }
        let largest = L::largest(largest);
        let mut sum = L::splat(0.0);
        for at in blocks {
            let place = scores.as_mut_ptr().add(at);
            let weights = seen(L::exp(L::sub(L::load(place), L::splat(largest))), at, 0.0);
            L::store(place, weights);
            sum = L::add(sum, weights);
        }
        (largest, L::sum(sum))
    }
}

/// Asks for a block's cache lines.
#[inline(always)]
pub(super) unsafe fn fetch<L: Lanes>(block: &[u8]) {
    for at in (0..block.len()).step_by(LINE) {
        // SAFETY: the caller vouches for the instruction set; a prefetch reads nothing.
        unsafe { L::prefetch(block.as_ptr().add(at)) };
    }
}

/// `[16][head_dim]` as stored to `[head_dim][16]` in f32. Rows that were never written fill lanes that nobody looks at.
#[inline(always)]
pub(super) unsafe fn transpose_block<L: Lanes, E: KvElement>(keys: &[u8], head_dim: usize, out: &mut [f32]) {
    assert!(keys.len() == BLOCK_TOKENS * head_dim * E::BYTES && out.len() == head_dim * LANES);
    for at in (0..head_dim).step_by(LANES) {
        // SAFETY: the caller vouches for the instruction set; row i has 16 elements from `at` on, out 16 rows.
        unsafe {
            let mut rows: [L::V; LANES] =
                std::array::from_fn(|i| E::load::<L>(keys.as_ptr().add((i * head_dim + at) * E::BYTES)));
            L::transpose(&mut rows);
            for (i, row) in rows.into_iter().enumerate() {
                L::store(out.as_mut_ptr().add((at + i) * LANES), row);
            }
        }
    }
}

/// Rows `low..high` of `[16][head_dim]` as stored, in f32.
#[inline(always)]
pub(super) unsafe fn widen_rows<L: Lanes, E: KvElement>(
    values: &[u8],
    head_dim: usize,
    low: usize,
    high: usize,
    out: &mut [f32],
) {
    assert!(values.len() == BLOCK_TOKENS * head_dim * E::BYTES && out.len() >= high * head_dim);
    for at in (low * head_dim..high * head_dim).step_by(LANES) {
        // SAFETY: the caller vouches for the instruction set; head_dim is a multiple of 16, so that `at + 16` is in both.
        unsafe { L::store(out.as_mut_ptr().add(at), E::load::<L>(values.as_ptr().add(at * E::BYTES))) };
    }
}
