//! Weights of any type as f32, by f32 activations.

use std::arch::x86_64::*;

use super::super::format::{LANES, TREE_LEVELS};
use super::super::job::PanelJob;
use super::super::kind::{BF16, F16, F32, for_plain};
use super::unpack::halves;
use super::{HALF, join, store};

/// Unquantised panel by f32 activations.
///
/// # Safety
/// The processor has AVX2, FMA and F16C; the job owns its outputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn plain(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise; the panel holds `cols` vectors of its type.
    unsafe { for_plain!(job.geometry.format, plain_tiles(job, job.panel.as_ptr())) }
}

/// A panel whose weights were made f32 by f32 activations.
///
/// # Safety
/// As for `plain`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn widened(job: &PanelJob<'_>, weights: &[f32]) {
    assert_eq!(weights.len(), job.geometry.cols * LANES);
    // SAFETY: as for `plain`.
    unsafe { plain_tiles::<F32>(job, weights.as_ptr().cast()) };
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_tiles<const TYPE: u8>(job: &PanelJob<'_>, weights: *const u8) {
    let mut token = job.tokens.start;
    while token < job.tokens.end {
        // SAFETY: so many tokens from here on are the job's.
        unsafe {
            token += match job.tokens.end - token {
                4.. => plain_tile::<TYPE, 4>(job, weights, token),
                2.. => plain_tile::<TYPE, 2>(job, weights, token),
                _ => plain_tile::<TYPE, 1>(job, weights, token),
            };
        }
    }
}

/// The panel by `T` tokens. Returns `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn plain_tile<const TYPE: u8, const T: usize>(
    job: &PanelJob<'_>,
    weights: *const u8,
    token: usize,
) -> usize {
    let geometry = job.geometry;
    let rows: [*const f32; T] = std::array::from_fn(|t| job.input.row(token + t)[..geometry.cols].as_ptr());
    let per_segment = geometry.cols / geometry.segments;
    let mut pending = [[[_mm256_setzero_ps(); T]; TREE_LEVELS]; 2];
    let mut sums = [[_mm256_setzero_ps(); T]; 2];
    for segment in 0..geometry.segments {
        sums = [[_mm256_setzero_ps(); T]; 2];
        for k in segment * per_segment..(segment + 1) * per_segment {
            // SAFETY: `k` is below `cols`, which the rows and the panel have.
            unsafe {
                let w = [plain_weights::<TYPE>(weights, k, 0), plain_weights::<TYPE>(weights, k, HALF)];
                for t in 0..T {
                    let x = _mm256_set1_ps(*rows[t].add(k));
                    sums[0][t] = _mm256_fmadd_ps(w[0], x, sums[0][t]);
                    sums[1][t] = _mm256_fmadd_ps(w[1], x, sums[1][t]);
                }
            }
        }
        for (pending, sums) in pending.iter_mut().zip(&mut sums) {
            join(pending, sums, segment);
        }
    }
    for (half, sums) in sums.iter().enumerate().take(job.lanes.div_ceil(HALF)) {
        for (t, &sum) in sums.iter().enumerate() {
            store(job, token + t, half, sum);
        }
    }
    T
}

/// Weights at `k` of 8 lanes from `lane` on.
///
/// # Safety
/// The panel at `from` has more than `k` times `LANES` weights.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn plain_weights<const TYPE: u8>(from: *const u8, k: usize, lane: usize) -> __m256 {
    let index = k * LANES + lane;
    // SAFETY: the caller's promise.
    unsafe {
        match TYPE {
            F32 => _mm256_loadu_ps(from.add(4 * index).cast()),
            BF16 => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(2 * index).cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            F16 => halves(from.add(2 * index)),
            _ => unreachable!(),
        }
    }
}
