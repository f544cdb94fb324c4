//! Lanes as two 256-bit registers: lanes 0 to 7, and 8 to 15.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes};

#[derive(Clone, Copy)]
pub(super) struct Avx2;

type V = [__m256; 2];

/// Compiles the kernel for AVX2.
///
/// # Safety
/// The CPU has these features.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: this function's features are the instruction set.
    unsafe { kernel.run::<Avx2>() }
}

/// All bits of lanes `from..to`, by halves.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes(from: usize, to: usize) -> [__m256i; 2] {
    let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let half = |index: __m256i| {
        let below = _mm256_cmpgt_epi32(_mm256_set1_epi32(to as i32), index);
        _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(from as i32), index), below)
    };
    [half(low), half(_mm256_add_epi32(low, _mm256_set1_epi32(8)))]
}

/// Eight 8-bit floats, widened to 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn fp8<const MANTISSA: u32, const BIAS: u32>(bytes: __m256i) -> __m256 {
    let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7f));
    let exponent = _mm256_srlv_epi32(magnitude, _mm256_set1_epi32(MANTISSA as i32));
    let fraction = _mm256_and_si256(magnitude, _mm256_set1_epi32((1 << MANTISSA) - 1));
    let subnormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
    let hidden = _mm256_andnot_si256(subnormal, _mm256_set1_epi32(1 << MANTISSA));
    let integer = _mm256_cvtepi32_ps(_mm256_or_si256(fraction, hidden));
    let power = _mm256_add_epi32(
        _mm256_max_epi32(exponent, _mm256_set1_epi32(1)),
        _mm256_set1_epi32(127 - (BIAS + MANTISSA) as i32),
    );
    let value = _mm256_mul_ps(integer, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(power)));
    let nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
    let value = _mm256_blendv_ps(value, _mm256_set1_ps(f32::NAN), _mm256_castsi256_ps(nan));
    let sign = _mm256_slli_epi32::<24>(_mm256_and_si256(bytes, _mm256_set1_epi32(0x80)));
    _mm256_or_ps(value, _mm256_castsi256_ps(sign))
}

/// Eight rows to eight columns.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    let mut t = r;
    for i in (0..8).step_by(2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    let mut s = t;
    for i in (0..8).step_by(4) {
        s[i] = _mm256_shuffle_ps::<0x44>(t[i], t[i + 2]);
        s[i + 1] = _mm256_shuffle_ps::<0xee>(t[i], t[i + 2]);
        s[i + 2] = _mm256_shuffle_ps::<0x44>(t[i + 1], t[i + 3]);
        s[i + 3] = _mm256_shuffle_ps::<0xee>(t[i + 1], t[i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm256_permute2f128_ps::<0x20>(s[i], s[i + 4]);
        t[i + 4] = _mm256_permute2f128_ps::<0x31>(s[i], s[i + 4]);
    }
    t
}

impl Lanes for Avx2 {
    type V = V;

    const WIDE: bool = false;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn splat(x: f32) -> V {
        [_mm256_set1_ps(x); 2]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller gives 16 elements.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_first(from: *const f32, n: usize) -> V {
        let [low, high] = lanes(0, n);
        // SAFETY: the caller gives n elements; masked lanes are not touched.
        unsafe { [_mm256_maskload_ps(from, low), _mm256_maskload_ps(from.wrapping_add(8), high)] }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(to: *mut f32, v: V) {
        // SAFETY: the caller gives room for 16 elements.
        unsafe {
            _mm256_storeu_ps(to, v[0]);
            _mm256_storeu_ps(to.add(8), v[1]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store_first(to: *mut f32, v: V, n: usize) {
        let [low, high] = lanes(0, n);
        // SAFETY: the caller gives room for n elements; masked lanes are not touched.
        unsafe {
            _mm256_maskstore_ps(to, low, v[0]);
            _mm256_maskstore_ps(to.wrapping_add(8), high, v[1]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_bf16(from: *const u16) -> V {
        // SAFETY: the caller gives 16 elements.
        let halves = unsafe { [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(8).cast())] };
        halves.map(|h| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(h))))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load_fp8<const MANTISSA: u32, const BIAS: u32>(from: *const u8) -> V {
        // SAFETY: the caller gives 16 bytes.
        let bytes = unsafe { _mm_loadu_si128(from.cast()) };
        let high = _mm_srli_si128::<8>(bytes);
        [bytes, high].map(|b| fp8::<MANTISSA, BIAS>(_mm256_cvtepu8_epi32(b)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add(a: V, b: V) -> V {
        [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sub(a: V, b: V) -> V {
        [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn mul(a: V, b: V) -> V {
        [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn div(a: V, b: V) -> V {
        [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn max(a: V, b: V) -> V {
        [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn min(a: V, b: V) -> V {
        [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn if_less(a: V, b: V, then: V, otherwise: V) -> V {
        let half =
            |i: usize| _mm256_blendv_ps(otherwise[i], then[i], _mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i]));
        [half(0), half(1)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn keep(v: V, from: usize, to: usize, other: f32) -> V {
        let inside = lanes(from, to);
        let half = |i: usize| _mm256_blendv_ps(_mm256_set1_ps(other), v[i], _mm256_castsi256_ps(inside[i]));
        [half(0), half(1)]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn exp2_of_rounded(v: V) -> V {
        v.map(|v| {
            let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(v));
            _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(127 << 23)))
        })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn sum(v: V) -> f32 {
        let eight = _mm256_add_ps(v[0], v[1]);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn largest(v: V) -> f32 {
        let eight = _mm256_max_ps(v[0], v[1]);
        let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn prefetch(at: *const u8) {
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transpose(rows: &mut [V; LANES]) {
        let quarter = |first: usize, half: usize| std::array::from_fn(|i| rows[first + i][half]);
        let (a, b) = (transpose8(quarter(0, 0)), transpose8(quarter(0, 1)));
        let (c, d) = (transpose8(quarter(8, 0)), transpose8(quarter(8, 1)));
        for i in 0..8 {
            rows[i] = [a[i], c[i]];
            rows[i + 8] = [b[i], d[i]];
        }
    }
}
