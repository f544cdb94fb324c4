//! Quantised weights by int8 activations.

use std::arch::x86_64::*;

use super::super::activations::{TILE, TileBlock};
use super::super::format::{GROUPS, TREE_LEVELS};
use super::super::job::PanelJob;
use super::super::kind::{OFFSET, SUPER_HALVES, for_quants};
use super::unpack::{scales, unpack};
use super::{HALF, join, store};

/// Quantised panel by int8 activations.
///
/// # Safety
/// The processor has AVX2, FMA and F16C; the job owns its outputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn quants(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise.
    unsafe { for_quants!(job.geometry.format, quant_tiles(job)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_tiles<const BITS: usize, const SCALES: u8>(job: &PanelJob<'_>) {
    for half in 0..job.lanes.div_ceil(HALF) {
        let mut token = job.tokens.start;
        while token < job.tokens.end {
            // SAFETY: so many tokens from here on are the job's and lie in one tile.
            unsafe {
                token += match (job.tokens.end - token).min(TILE - token % TILE) {
                    4.. => quant_tile::<BITS, SCALES, 4>(job, token, half),
                    2.. => quant_tile::<BITS, SCALES, 2>(job, token, half),
                    _ => quant_tile::<BITS, SCALES, 1>(job, token, half),
                };
            }
        }
    }
}

/// Half of the panel by `T` tokens of one tile. Returns `T`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quant_tile<const BITS: usize, const SCALES: u8, const T: usize>(
    job: &PanelJob<'_>,
    token: usize,
    half: usize,
) -> usize {
    let geometry = job.geometry;
    let input = &job.input.tile(token)[..geometry.blocks()];
    let per_segment = geometry.blocks() / geometry.segments;
    let mut pending = [[_mm256_setzero_ps(); T]; TREE_LEVELS];
    let mut sums = [_mm256_setzero_ps(); T];
    for segment in 0..geometry.segments {
        sums = [_mm256_setzero_ps(); T];
        let range = segment * per_segment..(segment + 1) * per_segment;
        for (block, input) in range.clone().zip(&input[range]) {
            // SAFETY: all blocks up to `geometry.blocks()` lie in the panel.
            let (quants, scales) = unsafe {
                let from = job.panel.as_ptr().add(block * geometry.quant_bytes + 32 * half);
                (unpack::<BITS>(from), scales::<SCALES>(job.panel, geometry, block, half))
            };
            add_block::<BITS, SCALES, T>(&mut sums, &quants, scales, input, token % TILE);
        }
        join(&mut pending, &mut sums, segment);
    }
    for (t, sum) in sums.into_iter().enumerate() {
        store(job, token + t, half, sum);
    }
    T
}

/// Adds a block's products to the sums of `T` tokens.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_block<const BITS: usize, const SCALES: u8, const T: usize>(
    sums: &mut [__m256; T],
    quants: &[__m256i; GROUPS],
    scales: (__m256, __m256),
    input: &TileBlock,
    lane: usize,
) {
    for (t, sum) in sums.iter_mut().enumerate() {
        let fours = &input.quants[lane + t];
        let scale = _mm256_set1_ps(input.scale[lane + t]);
        let mut add = |dot: __m256i, d: __m256| {
            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(d, scale), *sum);
        };
        if SCALES == SUPER_HALVES {
            let (middle, first) = (GROUPS / 2, input.negated_first[lane + t]);
            let second = input.negated_sum[lane + t] - first;
            add(multiply::<BITS>(minus_offset::<BITS>(first), &quants[..middle], &fours[..middle]), scales.0);
            add(
                multiply::<BITS>(minus_offset::<BITS>(second), &quants[middle..], &fours[middle..]),
                scales.1,
            );
            continue;
        }
        let start = match SCALES {
            OFFSET => minus_offset::<BITS>(input.negated_sum[lane + t]),
            _ => _mm256_setzero_si256(),
        };
        add(multiply::<BITS>(start, quants, fours), scales.0);
        if SCALES != OFFSET {
            *sum = _mm256_fmadd_ps(scales.1, _mm256_set1_ps(input.scaled_sum[lane + t]), *sum);
        }
    }
}

/// What the products of shifted quants have too much, from minus the sum of the inputs. Bytes are multiplied as signed numbers,
/// without shift.
#[inline]
#[target_feature(enable = "avx2")]
fn minus_offset<const BITS: usize>(negated_sum: i32) -> __m256i {
    match BITS {
        8 => _mm256_setzero_si256(),
        _ => _mm256_set1_epi32(negated_sum << (BITS - 1)),
    }
}

/// `start` plus the products of some groups.
#[inline]
#[target_feature(enable = "avx2")]
fn multiply<const BITS: usize>(start: __m256i, quants: &[__m256i], fours: &[i32]) -> __m256i {
    // Largest sums of products of two: 15, 31, 63 or (of magnitudes) 128, times 128, twice. So many fit an i16.
    let groups_at_once = match BITS {
        4 => 8,
        5 => 4,
        6 => 2,
        _ => 1,
    };
    let mut dot = start;
    for (quants, fours) in quants.chunks(groups_at_once).zip(fours.chunks(groups_at_once)) {
        let mut pairs = _mm256_setzero_si256();
        for (&quants, &four) in quants.iter().zip(fours) {
            let four = _mm256_set1_epi32(four);
            let products = match BITS {
                8 => _mm256_maddubs_epi16(_mm256_abs_epi8(quants), _mm256_sign_epi8(four, quants)),
                _ => _mm256_maddubs_epi16(quants, four),
            };
            pairs = _mm256_add_epi16(pairs, products);
        }
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    dot
}
