//! Quantised weights made f32.

use std::arch::x86_64::*;

use super::super::format::{BLOCK, GROUPS, Geometry, LANES};
use super::super::kind::{MINIMUM, OFFSET, SUPER_HALVES, SUPER_MINIMUM, for_quants};
use super::HALF;
use super::unpack::{scales, unpack};

/// Weights of a quantised panel, k-major, `LANES` for each of `cols`.
///
/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in super::super) unsafe fn widen(panel: &[u8], geometry: &Geometry, weights: &mut [f32]) {
    assert_eq!(weights.len(), geometry.cols * LANES);
    for (block, weights) in weights.as_chunks_mut::<{ BLOCK * LANES }>().0.iter_mut().enumerate() {
        for half in 0..2 {
            // SAFETY: there are as many blocks of weights as the panel has.
            unsafe { for_quants!(geometry.format, widen_block(panel, geometry, block, half, weights)) };
        }
    }
}

/// Product and minimum are rounded apart, as the reference of the file's format does.
///
/// # Safety
/// `block` is a block of the panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen_block<const BITS: usize, const SCALES: u8>(
    panel: &[u8],
    geometry: &Geometry,
    block: usize,
    half: usize,
    weights: &mut [f32; BLOCK * LANES],
) {
    // SAFETY: the caller's promise.
    let (quants, scales) = unsafe {
        let quants = unpack::<BITS>(panel.as_ptr().add(block * geometry.quant_bytes + 32 * half));
        (quants, scales::<SCALES>(panel, geometry, block, half))
    };
    let shifted = matches!(SCALES, OFFSET | SUPER_HALVES);
    for (index, out) in weights.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let (group, byte) = (index / 4, index % 4);
        // Bytes come as signed numbers from `unpack`: moved to the top and down again they keep their sign.
        let top = _mm256_sll_epi32(quants[group], _mm_cvtsi32_si128(24 - 8 * byte as i32));
        let quant = match BITS {
            8 => _mm256_srai_epi32::<24>(top),
            _ if shifted => {
                _mm256_sub_epi32(_mm256_srli_epi32::<24>(top), _mm256_set1_epi32(1 << (BITS - 1)))
            }
            _ => _mm256_srli_epi32::<24>(top),
        };
        let d = if SCALES == SUPER_HALVES && group >= GROUPS / 2 { scales.1 } else { scales.0 };
        let mut weight = _mm256_mul_ps(d, _mm256_cvtepi32_ps(quant));
        if matches!(SCALES, MINIMUM | SUPER_MINIMUM) {
            weight = _mm256_add_ps(weight, scales.1);
        }
        // SAFETY: `out` has two halves of a vector each.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr().add(HALF * half), weight) };
    }
}
