//! AVX2: a panel in two halves of 8 rows. Products of quants are summed in i16 only as far as they cannot overflow, so that they are
//! as exact as VNNI's.

use std::arch::x86_64::*;

use super::format::{LANES, TREE_LEVELS};
use super::job::PanelJob;

pub(super) use plain::{plain, widened};
pub(super) use quantise::quantise_row;
pub(super) use quants::quants;
pub(super) use widen::widen;

mod plain;
mod quantise;
mod quants;
mod unpack;
mod widen;

/// Rows of half a panel.
const HALF: usize = LANES / 2;

/// Joins a segment's sums with those of the segments before it that complete a subtree.
#[inline]
#[target_feature(enable = "avx2")]
fn join<const T: usize>(pending: &mut [[__m256; T]; TREE_LEVELS], sums: &mut [__m256; T], segment: usize) {
    for (level, pending) in pending.iter_mut().enumerate() {
        if segment >> level & 1 == 0 {
            *pending = *sums;
            return;
        }
        for t in 0..T {
            sums[t] = _mm256_add_ps(pending[t], sums[t]);
        }
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(job: &PanelJob<'_>, token: usize, half: usize, sums: __m256) {
    let mut out = [0.0; HALF];
    // SAFETY: `out` has room for a vector.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), sums) };
    job.store(token, half * HALF, &out[..HALF.min(job.lanes - half * HALF)]);
}
