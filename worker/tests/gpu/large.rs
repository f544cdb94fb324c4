//! Gates and factors of more than 64 rows, against sums in f64.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::kernels::{Gemm, Store};

use crate::support::{Bench, close, gated, halves, sums, wide};

/// Rows behind the last for which there is a place in the grid.
const SPARE: usize = 3;

fn check(bench: &Bench, (m, n, k): (usize, usize, usize), activation: i32) {
    assert!(bench.kernels.has_large(m, n), "this card has no such kernel");
    let mut rows = halves(m * k, 2);
    rows.resize((m + SPARE) * k, 0x7fc0);
    let (weights, inputs) = (bench.put(&halves(2 * n * k, 1)), bench.put(&rows));
    let (outputs, count) = (bench.poisoned((m * n * 2) as u64), bench.put(&[m as i32]));
    let gemm = Gemm {
        weights: weights.at(),
        inputs: inputs.at(),
        outputs: outputs.at(),
        m: m + SPARE,
        n,
        k,
        m_at: count.at(),
        store: Store::Gated(activation),
    };
    // SAFETY: arrays of these shapes, which live until they are read below.
    unsafe { bench.kernels.gemm_large(bench.launcher(), gemm) }.unwrap();
    let got: Vec<f64> = bench.get::<u16>(&outputs, m * n).into_iter().map(wide).collect();
    let sums = sums((m, 2 * n, k), (2, 1));
    let expected: Vec<f64> = (0..m * n)
        .map(|i| gated(activation, sums[i / n * 2 * n + i % n], sums[i / n * 2 * n + n + i % n]))
        .collect();
    close(&format!("{m} x {n} x {k}, activation {activation}"), &got, &expected, |i| {
        expected[i].abs() / 128.0 + 1e-3
    });
}

#[test]
fn gates_of_many_rows_meet_their_factors() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for m in [65, 127, 128, 129, 255, 256, 257, 510] {
        for (n, k) in [(8, 32), (112, 64), (232, 352), (336, 1056)] {
            check(&bench, (m, n, k), 0);
            check(&bench, (m, n, k), 1);
        }
    }
}

/// More tiles than run at once, of rows in pairs and of one too many, and more rows than are abreast.
#[test]
fn blocks_take_tiles_until_none_is_left() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for (m, n) in [(130, 8000), (300, 5000), (2170, 680), (4340, 344)] {
        check(&bench, (m, n, 224), 0);
    }
}

/// Sums far from zero: an activation that is next to nothing, one that is its gate, and none that is not a number.
#[test]
fn activations_at_their_ends_are_numbers() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (m, n, k) = (66, 16, 32);
    // All gates of a column are 32 times its weight, all factors 32.
    let gates =
        [0.0f32, -0.0, 1.0, -1.0, 3.0, -3.0, 1e3, -1e3, 1e12, -1e12, 1e30, -1e30, 1e34, -1e34, 2e-3, -2e-3];
    let of = |x: f32| half::bf16::from_f32(x).to_bits();
    let rows: Vec<u16> = gates.iter().flat_map(|gate| [of(*gate); 32]).chain([of(1.0); 16 * 32]).collect();
    for activation in [0, 1] {
        let (weights, inputs) = (bench.put(&rows), bench.put(&vec![of(1.0); m * k]));
        let outputs = bench.poisoned((m * n * 2) as u64);
        let (weights, inputs, store) = (weights.at(), inputs.at(), Store::Gated(activation));
        let gemm = Gemm { weights, inputs, outputs: outputs.at(), m, n, k, m_at: 0, store };
        // SAFETY: arrays of these shapes, which live until they are read below.
        unsafe { bench.kernels.gemm_large(bench.launcher(), gemm) }.unwrap();
        let got: Vec<f64> = bench.get::<u16>(&outputs, m * n).into_iter().map(wide).collect();
        let expected: Vec<f64> = (0..m * n)
            .map(|i| gated(activation, 32.0 * f64::from(half::bf16::from_f32(gates[i % n]).to_f32()), 32.0))
            .collect();
        close(&format!("activation {activation}"), &got, &expected, |i| expected[i].abs() / 128.0 + 1e-3);
    }
}
