//! Row kernels against the formulas in f64, at lengths around a vector, on every instruction set.

use thalweg_model::config::Activation;

use super::isa::Isa;
use super::rows::*;

const LENGTHS: [usize; 9] = [1, 8, 15, 16, 17, 63, 64, 100, 640];

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let at = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed * 40_503) >> 8;
    (0..n).map(|i| at(i) as f32 / 8_388_608.0 * 4.0 - 4.0).collect()
}

/// Runs on every instruction set, holds their bits against each other and their numbers against the formula.
fn check(what: &str, expected: &[f64], kernel: impl Fn(Isa) -> Vec<f32>) {
    let scalar = kernel(Isa::Scalar);
    for isa in Isa::available() {
        let got = kernel(isa);
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&scalar), "{what} of {} on {isa:?}", expected.len());
    }
    for (got, expected) in scalar.iter().zip(expected) {
        assert!(
            (f64::from(*got) - expected).abs() <= 4e-6 * (1.0 + expected.abs()),
            "{what}: {got} for {expected}"
        );
    }
}

#[test]
fn norms() {
    for n in LENGTHS {
        let (x, weight, old) = (numbers(n, 1), numbers(n, 2), numbers(n, 3));
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
        let normed: Vec<f64> = (x.iter().zip(&weight))
            .map(|(x, w)| f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*w))
            .collect();
        check("norm", &normed, |isa| {
            let mut out = vec![0.0; n];
            rms_norm(isa, &x, &weight, 1e-5, &mut out);
            out
        });
        check("norm in place", &normed, |isa| {
            let mut out = x.clone();
            rms_norm_in_place(isa, &mut out, &weight, 1e-5);
            out
        });
        let added: Vec<f64> = normed.iter().zip(&old).map(|(y, old)| y + f64::from(*old)).collect();
        check("added norm", &added, |isa| {
            let mut out = old.clone();
            add_rms_norm(isa, &x, &weight, 1e-5, &mut out);
            out
        });
    }
}

#[test]
fn sums() {
    for n in LENGTHS {
        let (x, y) = (numbers(n, 4), numbers(n, 5));
        let sum: Vec<f64> = x.iter().zip(&y).map(|(x, y)| f64::from(*x) + f64::from(*y)).collect();
        check("sum", &sum, |isa| {
            let mut out = y.clone();
            add(isa, &x, &mut out);
            out
        });
    }
}

#[test]
fn gates() {
    for n in LENGTHS {
        let (x, up) = (numbers(n, 6), numbers(n, 7));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gelu = |x: f64| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        };
        for (activation, formula) in
            [(Activation::Silu, &silu as &dyn Fn(f64) -> f64), (Activation::GeluTanh, &gelu)]
        {
            let expected: Vec<f64> =
                x.iter().zip(&up).map(|(x, up)| formula(f64::from(*x)) * f64::from(*up)).collect();
            check("gate", &expected, |isa| {
                let mut out = vec![0.0; n];
                gate(isa, activation, &x, &up, &mut out);
                out
            });
        }
    }
}

#[test]
fn large_gates_stay_finite() {
    let x = [-1e30, -200.0, -88.0, 88.0, 200.0, 1e30];
    for activation in [Activation::Silu, Activation::GeluTanh] {
        let mut out = [0.0; 6];
        gate(Isa::best(), activation, &x, &[1.0; 6], &mut out);
        assert_eq!(&out[3..], &x[3..], "{activation:?}");
        assert!(out[..3].iter().all(|y| y.abs() < 1e-8), "{activation:?}: {out:?}");
    }
}

#[test]
fn rotations() {
    for half in [8, 16, 20, 32, 64, 128] {
        let x = numbers(2 * half, 8);
        let (sin, cos): (Vec<f32>, Vec<f32>) = (0..half).map(|i| (i as f32 * 0.3).sin_cos()).unzip();
        let angle = |i: usize| (f64::from(sin[i % half]), f64::from(cos[i % half]));
        let expected: Vec<f64> = (0..2 * half)
            .map(|i| {
                let ((sin, cos), other) = (angle(i), f64::from(x[(i + half) % (2 * half)]));
                f64::from(x[i]) * cos + if i < half { -other * sin } else { other * sin }
            })
            .collect();
        check("rotation", &expected, |isa| {
            let mut out = x.clone();
            rotate(isa, &mut out, &cos, &sin);
            out
        });
    }
}
