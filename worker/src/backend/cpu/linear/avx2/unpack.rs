//! From a panel's bytes to vectors of quants and scales.

use std::arch::x86_64::*;

use super::super::format::{BLOCKS_PER_SUPER, GROUPS, Geometry, LANES};
use super::super::kind::{MINIMUM, OFFSET, SUPER_MINIMUM};
use super::HALF;

/// A block's quants of half a panel, one vector per group; bytes as signed numbers.
///
/// # Safety
/// `from` is the first byte of the half in a whole block of quants.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn unpack<const BITS: usize>(from: *const u8) -> [__m256i; GROUPS] {
    let mut out = [_mm256_setzero_si256(); GROUPS];
    // SAFETY: the caller's promise; a block has BITS vectors of 64 bytes.
    let vector = |index: usize| unsafe { _mm256_loadu_si256(from.add(64 * index).cast()) };
    if BITS == 8 {
        for (group, out) in out.iter_mut().enumerate() {
            *out = _mm256_xor_si256(vector(group), _mm256_set1_epi8(i8::MIN));
        }
        return out;
    }
    let nibble = _mm256_set1_epi8(15);
    for group in 0..GROUPS / 2 {
        let pair = vector(group);
        out[group] = _mm256_and_si256(pair, nibble);
        out[group + GROUPS / 2] = _mm256_and_si256(_mm256_srli_epi16::<4>(pair), nibble);
    }
    if BITS == 5 {
        add_fifth_bits(&mut out, vector(4));
    }
    if BITS == 6 {
        add_bit_pairs(&mut out[..GROUPS / 2], vector(4));
        add_bit_pairs(&mut out[GROUPS / 2..], vector(5));
    }
    out
}

/// Bit j of each byte becomes bit 4 in group j.
#[inline]
#[target_feature(enable = "avx2")]
fn add_fifth_bits(out: &mut [__m256i; GROUPS], bits: __m256i) {
    let fifth = _mm256_set1_epi8(16);
    for (group, out) in out.iter_mut().enumerate() {
        let moved = if group < 4 {
            _mm256_sll_epi16(bits, _mm_cvtsi32_si128(4 - group as i32))
        } else {
            _mm256_srl_epi16(bits, _mm_cvtsi32_si128(group as i32 - 4))
        };
        *out = _mm256_or_si256(*out, _mm256_and_si256(moved, fifth));
    }
}

/// Bits 2j and 2j + 1 of each byte become bits 4 and 5 in group j of four.
#[inline]
#[target_feature(enable = "avx2")]
fn add_bit_pairs(out: &mut [__m256i], bits: __m256i) {
    let pair = _mm256_set1_epi8(48);
    let moved =
        [_mm256_slli_epi16::<4>(bits), _mm256_slli_epi16::<2>(bits), bits, _mm256_srli_epi16::<2>(bits)];
    for (out, moved) in out.iter_mut().zip(moved) {
        *out = _mm256_or_si256(*out, _mm256_and_si256(moved, pair));
    }
}

/// d of the block and its minimum; or d of the block's two halves.
///
/// # Safety
/// `block` is a block of the panel.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn scales<const SCALES: u8>(
    panel: &[u8],
    geometry: &Geometry,
    block: usize,
    half: usize,
) -> (__m256, __m256) {
    // SAFETY: the panel holds the block's scales and those of its 256 weights there.
    unsafe {
        let inner = panel.as_ptr().add(geometry.scales_at + block * geometry.scale_bytes);
        let outer = panel.as_ptr().add(geometry.supers_at + block / BLOCKS_PER_SUPER * geometry.super_bytes);
        let half_floats = |from: *const u8, row: usize| halves(from.add(2 * (row + HALF * half)));
        let bytes = |row: usize| _mm_loadl_epi64(inner.add(row + HALF * half).cast());
        match SCALES {
            OFFSET => (half_floats(inner, 0), _mm256_setzero_ps()),
            MINIMUM => (half_floats(inner, 0), half_floats(inner, LANES)),
            SUPER_MINIMUM => {
                let unsigned = |row| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(row)));
                let minimum = _mm256_mul_ps(half_floats(outer, LANES), unsigned(LANES));
                (
                    _mm256_mul_ps(half_floats(outer, 0), unsigned(0)),
                    _mm256_xor_ps(minimum, _mm256_set1_ps(-0.0)),
                )
            }
            _ => {
                let signed = |row| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(row)));
                let d = half_floats(outer, 0);
                (_mm256_mul_ps(d, signed(0)), _mm256_mul_ps(d, signed(LANES)))
            }
        }
    }
}

/// 8 f16 as f32.
///
/// # Safety
/// 16 bytes lie at `from`.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn halves(from: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(from.cast()) })
}
