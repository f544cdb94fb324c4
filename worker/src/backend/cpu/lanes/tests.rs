//! Every instruction set against arrays, bit for bit; e^x against f64.

use super::portable::Portable;
use super::*;

/// Every operation on lanes, as one list of numbers.
struct Everything<'a> {
    a: &'a [f32; LANES],
    b: &'a [f32; LANES],
    bytes: &'a [u8; 2 * LANES],
}

impl Kernel for Everything<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> Vec<f32> {
        // SAFETY: dispatched for this instruction set; all memory is as long as the operations read.
        unsafe {
            let (a, b) = (L::load(self.a.as_ptr()), L::load(self.b.as_ptr()));
            let halves: Vec<u16> =
                (self.bytes.chunks(2)).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
            let mut vectors = vec![
                L::add(a, b),
                L::sub(a, b),
                L::mul(a, b),
                L::div(a, b),
                L::fma(a, b, a),
                L::max(a, b),
                L::min(a, b),
                L::if_less(a, b, a, L::splat(3.0)),
                L::exp(a),
                L::exp(L::mul(b, L::splat(40.0))),
                L::load_bf16(halves.as_ptr()),
                L::load_fp8::<3, 7>(self.bytes.as_ptr()),
                L::load_fp8::<2, 15>(self.bytes.as_ptr().add(LANES)),
            ];
            for (from, to) in [(0, 0), (0, 16), (3, 9), (8, 8), (7, 16), (0, 1)] {
                vectors.push(L::keep(a, from, to, -7.0));
            }
            vectors.extend((0..=LANES).map(|n| L::load_first(self.a.as_ptr(), n)));
            let mut square: [L::V; LANES] = std::array::from_fn(|i| L::add(a, L::splat(i as f32)));
            L::transpose(&mut square);
            vectors.extend(square);
            let mut out = vec![L::sum(a), L::largest(a), L::sum(b), L::largest(b)];
            for v in vectors {
                let mut lanes = [0.0; LANES];
                L::store(lanes.as_mut_ptr(), v);
                out.extend(lanes);
            }
            for n in 0..=LANES {
                let mut lanes = [9.0; LANES];
                L::store_first(lanes.as_mut_ptr(), a, n);
                out.extend(lanes);
            }
            out
        }
    }
}

#[test]
fn all_instruction_sets_give_the_same_bits() {
    let special = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40, -88.0, 100.0];
    for seed in 0..200u32 {
        let number = |i: usize, salt: u32| {
            let bits = (seed * 97 + salt + i as u32).wrapping_mul(2_654_435_761);
            let special = special.get(bits as usize % 40).copied();
            special.unwrap_or((bits >> 8) as f32 / 65536.0 - 128.0)
        };
        let a = std::array::from_fn(|i| number(i, 1));
        let b = std::array::from_fn(|i| number(i, 1000));
        let bytes = std::array::from_fn(|i| (number(i, 77).to_bits() >> 11) as u8);
        let input = || Everything { a: &a, b: &b, bytes: &bytes };
        // SAFETY: needs no instruction set.
        let expected = unsafe { input().run::<Portable>() };
        for isa in Isa::available() {
            let got = dispatch(isa, input());
            for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
                assert!(same, "{isa:?}, seed {seed}, number {index}: {got} for {expected}");
            }
        }
    }
}

struct Exp(f32);

impl Kernel for Exp {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        // SAFETY: dispatched for this instruction set.
        unsafe { L::largest(L::exp(L::splat(self.0))) }
    }
}

#[test]
fn exp_is_exact_to_two_units() {
    let mut worst = 0f64;
    for step in -87_000..=88_000 {
        let x = step as f32 * 1e-3 + 0.000_37;
        let exact = f64::from(x).exp();
        worst = worst.max((f64::from(dispatch(Isa::best(), Exp(x))) / exact - 1.0).abs());
    }
    assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst:e}");
}

#[test]
fn exp_at_the_ends() {
    let check = |x: f32, expected: f32| assert_eq!(dispatch(Isa::best(), Exp(x)), expected, "{x}");
    check(0.0, 1.0);
    check(-0.0, 1.0);
    check(-88.0, 0.0);
    check(f32::NEG_INFINITY, 0.0);
    assert!(dispatch(Isa::best(), Exp(f32::INFINITY)).is_finite());
    assert!(dispatch(Isa::best(), Exp(f32::NAN)).is_nan());
}
