//! From a panel's bytes to vectors of quants and scales.

use std::arch::x86_64::*;

use super::super::format::{BLOCKS_PER_SUPER, GROUPS, Geometry, LANES};
use super::super::kind::{MINIMUM, OFFSET, SUPER_HALVES, SUPER_MINIMUM};

/// A block's quants, one vector per group.
///
/// # Safety
/// A whole block of quants lies at `from`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn unpack<const BITS: usize>(from: *const u8) -> [__m512i; GROUPS] {
    let mut out = [_mm512_setzero_si512(); GROUPS];
    // SAFETY: the caller's promise; a block has BITS / 8 * 8 vectors.
    let vector = |index: usize| unsafe { _mm512_loadu_si512(from.add(64 * index).cast()) };
    if BITS == 8 {
        for (group, out) in out.iter_mut().enumerate() {
            *out = vector(group);
        }
        return out;
    }
    let nibble = _mm512_set1_epi8(15);
    for group in 0..GROUPS / 2 {
        let pair = vector(group);
        out[group] = _mm512_and_si512(pair, nibble);
        out[group + GROUPS / 2] = _mm512_and_si512(_mm512_srli_epi16::<4>(pair), nibble);
    }
    if BITS == 5 {
        add_fifth_bits(&mut out, vector(4));
    }
    if BITS == 6 {
        add_bit_pairs(&mut out, vector(4), 0);
        add_bit_pairs(&mut out, vector(5), GROUPS / 2);
    }
    out
}

/// Bit j of each byte becomes bit 4 in group j.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn add_fifth_bits(out: &mut [__m512i; GROUPS], bits: __m512i) {
    let fifth = _mm512_set1_epi8(16);
    out[0] = or_masked(out[0], _mm512_slli_epi16::<4>(bits), fifth);
    out[1] = or_masked(out[1], _mm512_slli_epi16::<3>(bits), fifth);
    out[2] = or_masked(out[2], _mm512_slli_epi16::<2>(bits), fifth);
    out[3] = or_masked(out[3], _mm512_slli_epi16::<1>(bits), fifth);
    out[4] = or_masked(out[4], bits, fifth);
    out[5] = or_masked(out[5], _mm512_srli_epi16::<1>(bits), fifth);
    out[6] = or_masked(out[6], _mm512_srli_epi16::<2>(bits), fifth);
    out[7] = or_masked(out[7], _mm512_srli_epi16::<3>(bits), fifth);
}

/// Bits 2j and 2j + 1 of each byte become bits 4 and 5 in group `first + j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn add_bit_pairs(out: &mut [__m512i; GROUPS], bits: __m512i, first: usize) {
    let pair = _mm512_set1_epi8(48);
    out[first] = or_masked(out[first], _mm512_slli_epi16::<4>(bits), pair);
    out[first + 1] = or_masked(out[first + 1], _mm512_slli_epi16::<2>(bits), pair);
    out[first + 2] = or_masked(out[first + 2], bits, pair);
    out[first + 3] = or_masked(out[first + 3], _mm512_srli_epi16::<2>(bits), pair);
}

/// `low | (high & mask)`.
#[inline]
#[target_feature(enable = "avx512f")]
fn or_masked(low: __m512i, high: __m512i, mask: __m512i) -> __m512i {
    _mm512_ternarylogic_epi32::<0b1111_1000>(low, high, mask)
}

/// d and e of the 256 weights that begin at `block`.
///
/// # Safety
/// `block` is a block of the panel.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn outer_scales<const SCALES: u8>(
    panel: &[u8],
    geometry: &Geometry,
    block: usize,
) -> (__m512, __m512) {
    // SAFETY: the panel holds its outer scales there.
    unsafe {
        let from = panel.as_ptr().add(geometry.supers_at + block / BLOCKS_PER_SUPER * geometry.super_bytes);
        match SCALES {
            SUPER_MINIMUM => (halves(from), halves(from.add(2 * LANES))),
            SUPER_HALVES => (halves(from), _mm512_setzero_ps()),
            _ => (_mm512_setzero_ps(), _mm512_setzero_ps()),
        }
    }
}

/// d of the block and its minimum; or d of the block's two halves.
///
/// # Safety
/// `block` is a block of the panel.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn scales<const SCALES: u8>(
    panel: &[u8],
    geometry: &Geometry,
    block: usize,
    outer: (__m512, __m512),
) -> (__m512, __m512) {
    // SAFETY: the panel holds the block's scales there.
    unsafe {
        let from = panel.as_ptr().add(geometry.scales_at + block * geometry.scale_bytes);
        let second = from.add(LANES);
        match SCALES {
            OFFSET => (halves(from), _mm512_setzero_ps()),
            MINIMUM => (halves(from), halves(from.add(2 * LANES))),
            SUPER_MINIMUM => {
                let d = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())));
                let e = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(second.cast())));
                let minimum = _mm512_mul_ps(outer.1, e);
                (_mm512_mul_ps(outer.0, d), _mm512_sub_ps(_mm512_set1_ps(-0.0), minimum))
            }
            _ => {
                let d = |at: *const u8| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())));
                (_mm512_mul_ps(outer.0, d(from)), _mm512_mul_ps(outer.0, d(second)))
            }
        }
    }
}

/// 16 f16 as f32.
///
/// # Safety
/// 32 bytes lie at `from`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn halves(from: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(from.cast()) })
}
