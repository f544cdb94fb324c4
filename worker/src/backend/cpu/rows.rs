//! Kernels over single rows of activations: norms, gates, sums. Each is a fixed order of operations on a row, so a token's
//! result knows nothing of the others.

use thalweg_model::config::Activation;

use super::isa::Isa;
use super::lanes::{Kernel, LANES, Lanes, dispatch};

/// Accumulators of a sum over a row: enough to hide the latency of an addition.
const CHAINS: usize = 4;

/// `out = x / sqrt(mean(x^2) + epsilon) * weight`.
pub(super) fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "norm of {} values", x.len());
    let (x, out) = (x.as_ptr(), out.as_mut_ptr());
    dispatch(isa, RmsNorm { x, weight, epsilon, out, add: false });
}

/// As [`rms_norm`], in place.
pub(super) fn rms_norm_in_place(isa: Isa, x: &mut [f32], weight: &[f32], epsilon: f32) {
    assert_eq!(x.len(), weight.len(), "norm of {} values", x.len());
    let out = x.as_mut_ptr();
    dispatch(isa, RmsNorm { x: out, weight, epsilon, out, add: false });
}

/// `out += rms_norm(x)`.
pub(super) fn add_rms_norm(isa: Isa, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len(), "norm of {} values", x.len());
    let (x, out) = (x.as_ptr(), out.as_mut_ptr());
    dispatch(isa, RmsNorm { x, weight, epsilon, out, add: true });
}

/// `x` and `out` hold as many values as `weight`, and may be the same.
struct RmsNorm<'a> {
    x: *const f32,
    weight: &'a [f32],
    epsilon: f32,
    out: *mut f32,
    add: bool,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.weight.len();
        // SAFETY: the caller vouches for the instruction set; every access stays below n, which is the length of all three.
        unsafe {
            let mut squares = [L::splat(0.0); CHAINS];
            for begin in (0..n).step_by(CHAINS * LANES) {
                for (chain, square) in squares.iter_mut().enumerate() {
                    let at = begin + chain * LANES;
                    if at < n {
                        let x = load::<L>(self.x.add(at), n - at);
                        *square = L::fma(x, x, *square);
                    }
                }
            }
            let sum = L::sum(L::add(L::add(squares[0], squares[1]), L::add(squares[2], squares[3])));
            let scale = L::splat(1.0 / (sum / n as f32 + self.epsilon).sqrt());
            for at in (0..n).step_by(LANES) {
                let weight = load::<L>(self.weight.as_ptr().add(at), n - at);
                let y = L::mul(L::mul(load::<L>(self.x.add(at), n - at), scale), weight);
                let y = if self.add { L::add(load::<L>(self.out.add(at), n - at), y) } else { y };
                store::<L>(self.out.add(at), y, n - at);
            }
        }
    }
}

/// `out += x`.
pub(super) fn add(isa: Isa, x: &[f32], out: &mut [f32]) {
    assert_eq!(x.len(), out.len());
    dispatch(isa, Add { x, out });
}

struct Add<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.x.len();
        for at in (0..n).step_by(LANES) {
            // SAFETY: the caller vouches for the instruction set; at < n, the length of both.
            unsafe {
                let out = self.out.as_mut_ptr().add(at);
                let sum = L::add(load::<L>(out, n - at), load::<L>(self.x.as_ptr().add(at), n - at));
                store::<L>(out, sum, n - at);
            }
        }
    }
}

/// `out = activation(gate) * up`.
pub(super) fn gate(isa: Isa, activation: Activation, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == out.len(), "gate of {} values", gate.len());
    dispatch(isa, Gate { activation, gate, up, out });
}

struct Gate<'a> {
    activation: Activation,
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

/// 2 * sqrt(2 / pi): GELU's tanh form is `x * sigmoid(2 * sqrt(2/pi) * (x + 0.044715 x^3))`.
const GELU_SCALE: f32 = 1.595_769_2;
const GELU_CUBE: f32 = 0.044_715;

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.gate.len();
        for at in (0..n).step_by(LANES) {
            // SAFETY: the caller vouches for the instruction set; at < n, the length of all three.
            unsafe {
                let x = load::<L>(self.gate.as_ptr().add(at), n - at);
                let logit = match self.activation {
                    Activation::Silu => x,
                    Activation::GeluTanh => {
                        let cubic = L::fma(L::mul(x, x), L::splat(GELU_CUBE), L::splat(1.0));
                        L::mul(L::mul(x, cubic), L::splat(GELU_SCALE))
                    }
                };
                let decay = L::exp(L::sub(L::splat(0.0), logit));
                let activated = L::div(x, L::add(L::splat(1.0), decay));
                let y = L::mul(activated, load::<L>(self.up.as_ptr().add(at), n - at));
                store::<L>(self.out.as_mut_ptr().add(at), y, n - at);
            }
        }
    }
}

/// `x *= scale`.
pub(super) fn scale(x: &mut [f32], scale: f32) {
    x.iter_mut().for_each(|x| *x *= scale);
}

/// Rotates a head in place: dimension i with i + n/2 by the angle of `cos[i]` and `sin[i]`.
pub(super) fn rotate(isa: Isa, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    assert!(head.len() == 2 * cos.len() && cos.len() == sin.len(), "head of {} values", head.len());
    dispatch(isa, Rotate { head, cos, sin });
}

struct Rotate<'a> {
    head: &'a mut [f32],
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let half = self.cos.len();
        for at in (0..half).step_by(LANES) {
            let n = half - at;
            // SAFETY: the caller vouches for the instruction set; at < half, and a head holds two halves.
            unsafe {
                let (low, high) = (self.head.as_mut_ptr().add(at), self.head.as_mut_ptr().add(half + at));
                let (a, b) = (load::<L>(low, n), load::<L>(high, n));
                let (cos, sin) =
                    (load::<L>(self.cos.as_ptr().add(at), n), load::<L>(self.sin.as_ptr().add(at), n));
                store::<L>(low, L::sub(L::mul(a, cos), L::mul(b, sin)), n);
                store::<L>(high, L::add(L::mul(b, cos), L::mul(a, sin)), n);
            }
        }
    }
}

/// A vector of the next values, of which `left` remain.
#[inline(always)]
unsafe fn load<L: Lanes>(from: *const f32, left: usize) -> L::V {
    // SAFETY: the caller's promises are these.
    unsafe { if left >= LANES { L::load(from) } else { L::load_first(from, left) } }
}

/// Stores to the next values, of which `left` remain.
#[inline(always)]
unsafe fn store<L: Lanes>(to: *mut f32, v: L::V, left: usize) {
    // SAFETY: the caller's promises are these.
    unsafe { if left >= LANES { L::store(to, v) } else { L::store_first(to, v, left) } }
}
