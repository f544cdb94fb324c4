//! Activations to int8.

use std::arch::x86_64::*;

use super::super::activations::{TINY, TileBlock};
use super::super::format::{BLOCK, LANES};

/// Quantises one row into lane `lane` of a tile.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ, VL and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in super::super) unsafe fn quantise_row(row: &[f32], tile: &mut [TileBlock], lane: usize) {
    for (values, block) in row.as_chunks::<BLOCK>().0.iter().zip(tile) {
        // SAFETY: a block has two vectors.
        let x = unsafe { [_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(LANES))] };
        let largest = largest_magnitude(x);
        let (scale, inverse) =
            if largest <= TINY { (0.0, 0.0) } else { (largest * (1.0 / 127.0), 127.0 / largest) };
        let [low, high] = x.map(|x| _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverse))));
        let bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(high), _mm512_cvtepi32_epi8(low));
        // SAFETY: a token has 32 bytes of quants.
        unsafe { _mm256_storeu_si256(block.quants[lane].as_mut_ptr().cast(), bytes) };
        let (first, second) = sums_of_halves(bytes);
        let total = first + second;
        block.scale[lane] = scale;
        block.scaled_sum[lane] = scale * total as f32;
        block.negated_sum[lane] = -total;
        block.negated_first[lane] = -first;
    }
}

/// By their bits, so that a NaN wins and shows in every output.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn largest_magnitude(x: [__m512; 2]) -> f32 {
    let [low, high] = x.map(|x| _mm512_castps_si512(_mm512_abs_ps(x)));
    let sixteen = _mm512_max_epi32(low, high);
    let eight = _mm256_max_epi32(_mm512_castsi512_si256(sixteen), _mm512_extracti64x4_epi64::<1>(sixteen));
    let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
    f32::from_bits(_mm_cvtsi128_si32(one) as u32)
}

/// Sums of the first and the second 16 signed bytes.
#[inline]
#[target_feature(enable = "avx512vl,avx512vnni")]
fn sums_of_halves(bytes: __m256i) -> (i32, i32) {
    let fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    let twos = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b01_00_11_10>(fours));
    let ones = _mm256_add_epi32(twos, _mm256_shuffle_epi32::<0b10_11_00_01>(twos));
    (_mm256_cvtsi256_si32(ones), _mm256_extract_epi32::<4>(ones))
}
