//! Weights of any type as f32, by f32 activations.

use std::arch::x86_64::*;

use super::super::format::{LANES, TREE_LEVELS};
use super::super::job::PanelJob;
use super::super::kind::{BF16, F16, F32, for_plain};
use super::unpack::halves;
use super::{join, store};

/// Unquantised panel by f32 activations.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and VL; the job owns its outputs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) unsafe fn plain(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise; the panel holds `cols` vectors of its type.
    unsafe { for_plain!(job.geometry.format, plain_tiles(job, job.panel.as_ptr())) }
}

/// A panel whose weights were made f32 by f32 activations.
///
/// # Safety
/// As for `plain`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(in super::super) unsafe fn widened(job: &PanelJob<'_>, weights: &[f32]) {
    assert_eq!(weights.len(), job.geometry.cols * LANES);
    // SAFETY: as for `plain`.
    unsafe { plain_tiles::<F32>(job, weights.as_ptr().cast()) };
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn plain_tiles<const TYPE: u8>(job: &PanelJob<'_>, weights: *const u8) {
    let mut token = job.tokens.start;
    while token < job.tokens.end {
        // SAFETY: so many tokens from here on are the job's.
        unsafe {
            token += match job.tokens.end - token {
                8.. => plain_tile::<TYPE, 8>(job, weights, token),
                4.. => plain_tile::<TYPE, 4>(job, weights, token),
                2.. => plain_tile::<TYPE, 2>(job, weights, token),
                _ => plain_tile::<TYPE, 1>(job, weights, token),
            };
        }
    }
}

/// The panel by `T` tokens. Returns `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn plain_tile<const TYPE: u8, const T: usize>(
    job: &PanelJob<'_>,
    weights: *const u8,
    token: usize,
) -> usize {
    let geometry = job.geometry;
    let rows: [*const f32; T] = std::array::from_fn(|t| job.input.row(token + t)[..geometry.cols].as_ptr());
    let per_segment = geometry.cols / geometry.segments;
    let mut pending = [[_mm512_setzero_ps(); T]; TREE_LEVELS];
    let mut sums = [_mm512_setzero_ps(); T];
    for segment in 0..geometry.segments {
        sums = [_mm512_setzero_ps(); T];
        for k in segment * per_segment..(segment + 1) * per_segment {
            // SAFETY: `k` is below `cols`, which the rows and the panel have.
            unsafe {
                let w = plain_weights::<TYPE>(weights, k);
                for t in 0..T {
                    sums[t] = _mm512_fmadd_ps(w, _mm512_set1_ps(*rows[t].add(k)), sums[t]);
                }
            }
        }
        join(&mut pending, &mut sums, segment);
    }
    for (t, sum) in sums.into_iter().enumerate() {
        // SAFETY: the token and the panel's lanes are the job's.
        unsafe { store(job, token + t, sum) };
    }
    T
}

/// Weights of all lanes at `k`.
///
/// # Safety
/// The panel at `from` has more than `k` vectors.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn plain_weights<const TYPE: u8>(from: *const u8, k: usize) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        match TYPE {
            F32 => _mm512_loadu_ps(from.add(4 * LANES * k).cast()),
            BF16 => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(2 * LANES * k).cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            F16 => halves(from.add(2 * LANES * k)),
            _ => unreachable!(),
        }
    }
}
