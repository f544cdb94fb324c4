//! Activations to int8.

use std::arch::x86_64::*;

use super::super::activations::{TINY, TileBlock};
use super::super::format::BLOCK;

/// Quantises one row into lane `lane` of a tile.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn quantise_row(row: &[f32], tile: &mut [TileBlock], lane: usize) {
    for (values, block) in row.as_chunks::<BLOCK>().0.iter().zip(tile) {
        // SAFETY: a block has four vectors.
        let x: [__m256; 4] = std::array::from_fn(|i| unsafe { _mm256_loadu_ps(values.as_ptr().add(8 * i)) });
        let largest = largest_magnitude(&x);
        let (scale, inverse) =
            if largest <= TINY { (0.0, 0.0) } else { (largest * (1.0 / 127.0), 127.0 / largest) };
        let quants = x.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, _mm256_set1_ps(inverse))));
        let words = [_mm256_packs_epi32(quants[0], quants[1]), _mm256_packs_epi32(quants[2], quants[3])];
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
        // SAFETY: a token has 32 bytes of quants.
        unsafe { _mm256_storeu_si256(block.quants[lane].as_mut_ptr().cast(), bytes) };
        let fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes), _mm256_set1_epi16(1));
        let first = sum(_mm256_castsi256_si128(fours));
        let total = first + sum(_mm256_extracti128_si256::<1>(fours));
        block.scale[lane] = scale;
        block.scaled_sum[lane] = scale * total as f32;
        block.negated_sum[lane] = -total;
        block.negated_first[lane] = -first;
    }
}

/// By their bits, so that a NaN wins and shows in every output.
#[inline]
#[target_feature(enable = "avx2")]
fn largest_magnitude(x: &[__m256; 4]) -> f32 {
    let magnitudes = x.map(|x| _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), x)));
    let four = _mm256_max_epi32(
        _mm256_max_epi32(magnitudes[0], magnitudes[1]),
        _mm256_max_epi32(magnitudes[2], magnitudes[3]),
    );
    let two = _mm_max_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four));
    let two = _mm_max_epi32(two, _mm_shuffle_epi32::<0b01_00_11_10>(two));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
    f32::from_bits(_mm_cvtsi128_si32(one) as u32)
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum(x: __m128i) -> i32 {
    let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
    _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
}
