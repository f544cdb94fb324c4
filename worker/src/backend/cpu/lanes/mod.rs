//! Sixteen f32 lanes on every instruction set: kernels outside the matrix products are written once over [`Lanes`] and
//! compiled per set. The lane count is fixed, and so is the order of every reduction: a kernel's bits depend neither on
//! the width of the registers nor on where in a buffer a value stands.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::isa::Isa;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Operations on sixteen f32 lanes.
///
/// # Safety
/// Every method needs a CPU with the implementing type's instruction set, which [`dispatch`] has checked; those that take
/// pointers need as many readable or writable elements there as they name.
pub(crate) trait Lanes: Copy {
    /// A vector.
    type V: Copy;

    /// There are registers for a tile of sixteen accumulators.
    const WIDE: bool;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(from: *const f32) -> Self::V;
    /// The first `n` elements, zeros behind them.
    unsafe fn load_first(from: *const f32, n: usize) -> Self::V;
    unsafe fn store(to: *mut f32, v: Self::V);
    /// Writes the first `n` lanes only.
    unsafe fn store_first(to: *mut f32, v: Self::V, n: usize);
    /// Sixteen bfloat16 numbers.
    unsafe fn load_bf16(from: *const u16) -> Self::V;
    /// Sixteen 8-bit floats of `MANTISSA` bits and the given exponent bias; all ones but the sign is NaN.
    unsafe fn load_fp8<const MANTISSA: u32, const BIAS: u32>(from: *const u8) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// Lanes of `then` where `a < b`, of `otherwise` elsewhere.
    unsafe fn if_less(a: Self::V, b: Self::V, then: Self::V, otherwise: Self::V) -> Self::V;
    /// Lanes `from..to` of `v`, `other` elsewhere.
    unsafe fn keep(v: Self::V, from: usize, to: usize, other: f32) -> Self::V;
    /// 2^n of a number that was rounded to the integer n by adding [`ROUNDER`].
    unsafe fn exp2_of_rounded(v: Self::V) -> Self::V;
    /// Sum over lanes by halves: 8 apart, 4, 2, 1.
    unsafe fn sum(v: Self::V) -> f32;
    /// Largest lane.
    unsafe fn largest(v: Self::V) -> f32;
    /// Asks for the cache line that holds this address, which need not be readable.
    unsafe fn prefetch(at: *const u8);
    /// Sixteen rows to sixteen columns.
    unsafe fn transpose(rows: &mut [Self::V; LANES]);

    /// e^x to about one unit in the last place, by one polynomial on every instruction set; below -87.3 it is 0, above 88.3
    /// it stays at its largest finite value, NaN stays NaN.
    #[inline(always)]
    unsafe fn exp(x: Self::V) -> Self::V {
        // SAFETY: the caller vouches for the instruction set.
        unsafe {
            let clamped = Self::min(Self::splat(EXP_HIGHEST), Self::max(Self::splat(EXP_LOWEST), x));
            let shifted = Self::fma(clamped, Self::splat(std::f32::consts::LOG2_E), Self::splat(ROUNDER));
            let n = Self::sub(shifted, Self::splat(ROUNDER));
            let r = Self::fma(n, Self::splat(-LN2_HIGH), clamped);
            let r = Self::fma(n, Self::splat(-LN2_LOW), r);
            let mut p = Self::splat(EXP_POLYNOMIAL[0]);
            for c in &EXP_POLYNOMIAL[1..] {
                p = Self::fma(p, r, Self::splat(*c));
            }
            let y = Self::mul(p, Self::exp2_of_rounded(shifted));
            Self::if_less(x, Self::splat(EXP_LOWEST), Self::splat(0.0), y)
        }
    }
}

/// Added to a number of magnitude below 2^22, rounds it to an integer that then stands in the low bits.
pub(crate) const ROUNDER: f32 = 12_582_912.0;
const EXP_LOWEST: f32 = -87.336_54;
const EXP_HIGHEST: f32 = 88.376_26;
/// ln 2 in two parts, the first with so few bits that n times it is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1/n! from n = 7 down: Taylor's polynomial of e^r, exact to 5e-9 on |r| <= ln(2)/2.
const EXP_POLYNOMIAL: [f32; 8] =
    [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// A kernel over [`Lanes`].
pub(crate) trait Kernel {
    type Output;

    /// # Safety
    /// The CPU has the instruction set of `L`. Implementations are `#[inline(always)]`, so that they are compiled for it.
    unsafe fn run<L: Lanes>(self) -> Self::Output;
}

/// Runs a kernel with the lanes of an instruction set.
pub(crate) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an Isa is only made by detection on this CPU.
        Isa::Avx512 => unsafe { avx512::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { avx2::run(kernel) },
        // SAFETY: needs no instruction set.
        _ => unsafe { kernel.run::<portable::Portable>() },
    }
}

#[cfg(test)]
mod tests;
