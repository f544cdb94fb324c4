//! Quantised weights made f32.

use std::arch::x86_64::*;

use super::super::format::{BLOCK, GROUPS, Geometry, LANES};
use super::super::kind::{MINIMUM, OFFSET, SUPER_HALVES, SUPER_MINIMUM, for_quants};
use super::unpack::{outer_scales, scales, unpack};

/// Weights of a quantised panel, k-major, `LANES` for each of `cols`.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ, VL and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(in super::super) unsafe fn widen(panel: &[u8], geometry: &Geometry, weights: &mut [f32]) {
    assert_eq!(weights.len(), geometry.cols * LANES);
    for (block, weights) in weights.as_chunks_mut::<{ BLOCK * LANES }>().0.iter_mut().enumerate() {
        // SAFETY: there are as many blocks of weights as the panel has.
        unsafe { for_quants!(geometry.format, widen_block(panel, geometry, block, weights)) };
    }
}

/// Product and minimum are rounded apart, as the reference of the file's format does.
///
/// # Safety
/// `block` is a block of the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn widen_block<const BITS: usize, const SCALES: u8>(
    panel: &[u8],
    geometry: &Geometry,
    block: usize,
    weights: &mut [f32; BLOCK * LANES],
) {
    // SAFETY: the caller's promise.
    let (quants, scales) = unsafe {
        let outer = outer_scales::<SCALES>(panel, geometry, block);
        let quants = unpack::<BITS>(panel.as_ptr().add(block * geometry.quant_bytes));
        (quants, scales::<SCALES>(panel, geometry, block, outer))
    };
    let offset = if matches!(SCALES, OFFSET | SUPER_HALVES) { 1 << (BITS - 1) } else { 0 };
    for (index, out) in weights.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
        let (group, byte) = (index / 4, index % 4);
        let moved = _mm512_srl_epi32(quants[group], _mm_cvtsi32_si128(8 * byte as i32));
        let quant = _mm512_and_si512(moved, _mm512_set1_epi32(255));
        let quant = _mm512_cvtepi32_ps(_mm512_sub_epi32(quant, _mm512_set1_epi32(offset)));
        let d = if SCALES == SUPER_HALVES && group >= GROUPS / 2 { scales.1 } else { scales.0 };
        let mut weight = _mm512_mul_ps(d, quant);
        if matches!(SCALES, MINIMUM | SUPER_MINIMUM) {
            weight = _mm512_add_ps(weight, scales.1);
        }
        // SAFETY: `out` is a vector long.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), weight) };
    }
}
