//! Lanes as one 512-bit register.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes};

#[derive(Clone, Copy)]
pub(super) struct Avx512;

/// Compiles the kernel for AVX-512.
///
/// # Safety
/// The CPU has these features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's features are the instruction set.
    unsafe { kernel.run::<Avx512>() }
}

fn first(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

impl Lanes for Avx512 {
    type V = __m512;

    const WIDE: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: the caller gives 16 elements.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load_first(from: *const f32, n: usize) -> __m512 {
        // SAFETY: the caller gives n elements; masked lanes are not touched.
        unsafe { _mm512_maskz_loadu_ps(first(n), from) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store(to: *mut f32, v: __m512) {
        // SAFETY: the caller gives room for 16 elements.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn store_first(to: *mut f32, v: __m512, n: usize) {
        // SAFETY: the caller gives room for n elements; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, first(n), v) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        // SAFETY: the caller gives 16 elements, 32 bytes.
        let halves = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn load_fp8<const MANTISSA: u32, const BIAS: u32>(from: *const u8) -> __m512 {
        // SAFETY: the caller gives 16 bytes.
        let bytes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(from.cast()) });
        let magnitude = _mm512_and_si512(bytes, _mm512_set1_epi32(0x7f));
        let shift = _mm512_set1_epi32(MANTISSA as i32);
        let exponent = _mm512_srlv_epi32(magnitude, shift);
        let fraction = _mm512_and_si512(magnitude, _mm512_set1_epi32((1 << MANTISSA) - 1));
        let normal = _mm512_test_epi32_mask(exponent, exponent);
        let integer = _mm512_mask_or_epi32(fraction, normal, fraction, _mm512_set1_epi32(1 << MANTISSA));
        let power = _mm512_add_epi32(
            _mm512_max_epi32(exponent, _mm512_set1_epi32(1)),
            _mm512_set1_epi32(127 - (BIAS + MANTISSA) as i32),
        );
        let scale = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(power));
        let value = _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(integer), scale));
        let nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
        let value = _mm512_mask_mov_epi32(value, nan, _mm512_set1_epi32(0x7fc0_0000));
        let sign = _mm512_slli_epi32::<24>(_mm512_and_si512(bytes, _mm512_set1_epi32(0x80)));
        _mm512_castsi512_ps(_mm512_or_si512(value, sign))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn if_less(a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), otherwise, then)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn keep(v: __m512, from: usize, to: usize, other: f32) -> __m512 {
        _mm512_mask_blend_ps(first(to) & !first(from), _mm512_set1_ps(other), v)
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn exp2_of_rounded(v: __m512) -> __m512 {
        let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(v));
        _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(127 << 23)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx2")]
    unsafe fn sum(v: __m512) -> f32 {
        let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,avx2")]
    unsafe fn largest(v: __m512) -> f32 {
        let eight = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose(r: &mut [__m512; LANES]) {
        let mut t = *r;
        for i in (0..LANES).step_by(2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for i in (0..LANES).step_by(4) {
            let double = |k: usize| _mm512_castps_pd(t[i + k]);
            r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(double(0), double(2)));
            r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(double(0), double(2)));
            r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(double(1), double(3)));
            r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(double(1), double(3)));
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_f32x4::<0x88>(r[i], r[i + 4]);
            t[i + 4] = _mm512_shuffle_f32x4::<0xdd>(r[i], r[i + 4]);
            t[i + 8] = _mm512_shuffle_f32x4::<0x88>(r[i + 8], r[i + 12]);
            t[i + 12] = _mm512_shuffle_f32x4::<0xdd>(r[i + 8], r[i + 12]);
        }
        for i in 0..4 {
            r[i] = _mm512_shuffle_f32x4::<0x88>(t[i], t[i + 8]);
            r[i + 8] = _mm512_shuffle_f32x4::<0xdd>(t[i], t[i + 8]);
            r[i + 4] = _mm512_shuffle_f32x4::<0x88>(t[i + 4], t[i + 12]);
            r[i + 12] = _mm512_shuffle_f32x4::<0xdd>(t[i + 4], t[i + 12]);
        }
    }
}
