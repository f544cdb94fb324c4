//! Lanes without any instruction set: arrays. Slow, right, and the reference of the others.

use super::super::float8::to_f32;
use super::{LANES, Lanes};

#[derive(Clone, Copy)]
pub(super) struct Portable;

type V = [f32; LANES];

fn zip(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

impl Lanes for Portable {
    type V = V;

    const WIDE: bool = false;

    unsafe fn splat(x: f32) -> V {
        [x; LANES]
    }

    unsafe fn load(from: *const f32) -> V {
        // SAFETY: the caller gives 16 elements.
        unsafe { from.cast::<V>().read_unaligned() }
    }

    unsafe fn load_first(from: *const f32, n: usize) -> V {
        // SAFETY: the caller gives n elements.
        std::array::from_fn(|i| if i < n { unsafe { *from.add(i) } } else { 0.0 })
    }

    unsafe fn store(to: *mut f32, v: V) {
        // SAFETY: the caller gives room for 16 elements.
        unsafe { to.cast::<V>().write_unaligned(v) }
    }

    unsafe fn store_first(to: *mut f32, v: V, n: usize) {
        for (i, x) in v.iter().enumerate().take(n) {
            // SAFETY: the caller gives room for n elements.
            unsafe { *to.add(i) = *x }
        }
    }

    unsafe fn load_bf16(from: *const u16) -> V {
        // SAFETY: the caller gives 16 elements.
        std::array::from_fn(|i| f32::from_bits(u32::from(unsafe { *from.add(i) }) << 16))
    }

    unsafe fn load_fp8<const MANTISSA: u32, const BIAS: u32>(from: *const u8) -> V {
        // SAFETY: the caller gives 16 elements.
        std::array::from_fn(|i| to_f32::<MANTISSA, BIAS>(unsafe { *from.add(i) }))
    }

    unsafe fn add(a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }

    unsafe fn sub(a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }

    unsafe fn mul(a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }

    unsafe fn div(a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }

    unsafe fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    unsafe fn max(a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    unsafe fn min(a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    unsafe fn if_less(a: V, b: V, then: V, otherwise: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { then[i] } else { otherwise[i] })
    }

    unsafe fn keep(v: V, from: usize, to: usize, other: f32) -> V {
        std::array::from_fn(|i| if (from..to).contains(&i) { v[i] } else { other })
    }

    unsafe fn exp2_of_rounded(v: V) -> V {
        v.map(|x| f32::from_bits((x.to_bits() << 23).wrapping_add(127 << 23)))
    }

    unsafe fn sum(mut v: V) -> f32 {
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                v[i] += v[i + width];
            }
        }
        v[0]
    }

    unsafe fn largest(v: V) -> f32 {
        let mut v = v;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                v[i] = if v[i] > v[i + width] { v[i] } else { v[i + width] };
            }
        }
        v[0]
    }

    unsafe fn prefetch(_at: *const u8) {}

    unsafe fn transpose(rows: &mut [V; LANES]) {
        *rows = std::array::from_fn(|i| std::array::from_fn(|j| rows[j][i]));
    }
}
