//! AVX-512: a vector lane per row of the panel, quants by VNNI, up to 8 tokens in registers at once.

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

/// Joins a segment's sums with those of the segments before it that complete a subtree.
#[inline]
#[target_feature(enable = "avx512f")]
fn join<const T: usize>(pending: &mut [[__m512; T]; TREE_LEVELS], sums: &mut [__m512; T], segment: usize) {
    for (level, pending) in pending.iter_mut().enumerate() {
        if segment >> level & 1 == 0 {
            *pending = *sums;
            return;
        }
        for t in 0..T {
            sums[t] = _mm512_add_ps(pending[t], sums[t]);
        }
    }
}

/// # Safety
/// The token and the panel's lanes are the job's.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(job: &PanelJob<'_>, token: usize, sums: __m512) {
    let mask = u16::MAX >> (LANES - job.lanes);
    // SAFETY: masked-off lanes are not touched; the others are the caller's promise.
    unsafe { _mm512_mask_storeu_ps(job.out.add(token * job.stride), mask, sums) };
}
