//! Quantised weights by int8 activations.

use std::arch::x86_64::*;

use super::super::activations::{TILE, TileBlock};
use super::super::format::{BLOCKS_PER_SUPER, GROUPS, Geometry, TREE_LEVELS};
use super::super::job::PanelJob;
use super::super::kind::{OFFSET, SUPER_HALVES, SUPER_MINIMUM, for_quants};
use super::unpack::{outer_scales, scales, unpack};
use super::{join, store};

/// Quantised panel by int8 activations.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ, VL and VNNI; the job owns its outputs.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in super::super) unsafe fn quants(job: &PanelJob<'_>) {
    // SAFETY: the caller's promise.
    unsafe { for_quants!(job.geometry.format, quant_tiles(job)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn quant_tiles<const BITS: usize, const SCALES: u8>(job: &PanelJob<'_>) {
    let mut token = job.tokens.start;
    while token < job.tokens.end {
        // SAFETY: so many tokens from here on are the job's and lie in one tile.
        unsafe {
            token += match (job.tokens.end - token).min(TILE - token % TILE) {
                8.. => quant_tile::<BITS, SCALES, 8>(job, token),
                4.. => quant_tile::<BITS, SCALES, 4>(job, token),
                2.. => quant_tile::<BITS, SCALES, 2>(job, token),
                _ => quant_tile::<BITS, SCALES, 1>(job, token),
            };
        }
    }
}

/// The panel by `T` tokens of one tile. Returns `T`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn quant_tile<const BITS: usize, const SCALES: u8, const T: usize>(
    job: &PanelJob<'_>,
    token: usize,
) -> usize {
    let geometry = job.geometry;
    let input = &job.input.tile(token)[..geometry.blocks()];
    let lane = if T == TILE { 0 } else { token % TILE };
    let per_segment = geometry.blocks() / geometry.segments;
    let step = if SCALES >= SUPER_MINIMUM { BLOCKS_PER_SUPER } else { per_segment };
    let mut pending = [[_mm512_setzero_ps(); T]; TREE_LEVELS];
    let mut sums = [_mm512_setzero_ps(); T];
    for segment in 0..geometry.segments {
        sums = [_mm512_setzero_ps(); T];
        let segment_start = segment * per_segment;
        for start in (segment_start..segment_start + per_segment).step_by(step) {
            // SAFETY: all blocks up to `geometry.blocks()` lie in the panel and in the tile, whose lanes from this token's on
            // are at least `T`.
            unsafe {
                let outer = outer_scales::<SCALES>(job.panel, geometry, start);
                for block in start..start + step {
                    if token == job.tokens.start {
                        prefetch_next_panel(job.panel, geometry, block);
                    }
                    let quants = unpack::<BITS>(job.panel.as_ptr().add(block * geometry.quant_bytes));
                    let scales = scales::<SCALES>(job.panel, geometry, block, outer);
                    let input = Lanes::<T>::of(input.get_unchecked(block), lane);
                    add_block::<BITS, SCALES, T>(&mut sums, &quants, scales, &input);
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

/// `T` neighbouring tokens of a tile's block.
struct Lanes<'a, const T: usize> {
    quants: &'a [[i32; GROUPS]; T],
    scale: &'a [f32; T],
    scaled_sum: &'a [f32; T],
    negated_sum: &'a [i32; T],
    negated_first: &'a [i32; T],
}

impl<'a, const T: usize> Lanes<'a, T> {
    /// # Safety
    /// `lane + T` is at most `TILE`.
    #[inline(always)]
    unsafe fn of(block: &'a TileBlock, lane: usize) -> Self {
        // SAFETY: each array has `TILE` elements.
        unsafe {
            Self {
                quants: &*block.quants.as_ptr().add(lane).cast(),
                scale: &*block.scale.as_ptr().add(lane).cast(),
                scaled_sum: &*block.scaled_sum.as_ptr().add(lane).cast(),
                negated_sum: &*block.negated_sum.as_ptr().add(lane).cast(),
                negated_first: &*block.negated_first.as_ptr().add(lane).cast(),
            }
        }
    }
}

/// Adds a block's products to the sums of `T` tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn add_block<const BITS: usize, const SCALES: u8, const T: usize>(
    sums: &mut [__m512; T],
    quants: &[__m512i; GROUPS],
    scales: (__m512, __m512),
    input: &Lanes<'_, T>,
) {
    let mut dots = [_mm512_setzero_si512(); T];
    if SCALES == SUPER_HALVES {
        for (dot, first) in dots.iter_mut().zip(input.negated_first) {
            *dot = minus_offset::<BITS>(*first);
        }
        multiply(&mut dots, &quants[..GROUPS / 2], input, 0);
        scale_and_add(sums, &dots, scales.0, input);
        for (dot, (sum, first)) in dots.iter_mut().zip(input.negated_sum.iter().zip(input.negated_first)) {
            *dot = minus_offset::<BITS>(sum - first);
        }
        multiply(&mut dots, &quants[GROUPS / 2..], input, GROUPS / 2);
        scale_and_add(sums, &dots, scales.1, input);
        return;
    }
    if SCALES == OFFSET {
        for (dot, sum) in dots.iter_mut().zip(input.negated_sum) {
            *dot = minus_offset::<BITS>(*sum);
        }
    }
    multiply(&mut dots, quants, input, 0);
    scale_and_add(sums, &dots, scales.0, input);
    if SCALES != OFFSET {
        for (sum, scaled) in sums.iter_mut().zip(input.scaled_sum) {
            *sum = _mm512_fmadd_ps(scales.1, _mm512_set1_ps(*scaled), *sum);
        }
    }
}

/// What the products of shifted quants have too much, from minus the sum of the inputs.
#[inline]
#[target_feature(enable = "avx512f")]
fn minus_offset<const BITS: usize>(negated_sum: i32) -> __m512i {
    _mm512_set1_epi32(negated_sum << (BITS - 1))
}

#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn multiply<const T: usize>(
    dots: &mut [__m512i; T],
    quants: &[__m512i],
    input: &Lanes<'_, T>,
    first_group: usize,
) {
    for (group, &quants) in quants.iter().enumerate() {
        for (dot, fours) in dots.iter_mut().zip(input.quants) {
            *dot = _mm512_dpbusd_epi32(*dot, quants, _mm512_set1_epi32(fours[first_group + group]));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn scale_and_add<const T: usize>(
    sums: &mut [__m512; T],
    dots: &[__m512i; T],
    d: __m512,
    input: &Lanes<'_, T>,
) {
    for t in 0..T {
        let scale = _mm512_mul_ps(d, _mm512_set1_ps(input.scale[t]));
        sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, sums[t]);
    }
}

/// Brings the block's share of the panel behind this one closer.
#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch_next_panel(panel: &[u8], geometry: &Geometry, block: usize) {
    let bytes = geometry.quant_bytes + geometry.scale_bytes;
    let from = panel.as_ptr().wrapping_add(panel.len() + block * bytes);
    for at in (0..bytes).step_by(64) {
        _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast());
    }
}
