//! Products against sums in f64, and against each other to the bit.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, N_TOKENS};
use thalweg_worker::backend::cuda::blas::Blas;
use thalweg_worker::backend::cuda::kernels::{CLUSTER_ROWS, Gemm, SMALL_ROWS, Store};

use crate::support::{Bench, close, halves, libraries, numbers, wide};

/// Whose product.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Small,
    Cluster,
    Tile,
    Blas,
}

/// K, N: one segment and several, columns that fill no block.
const SHAPES: [(usize, usize); 6] = [(32, 8), (576, 960), (640, 100), (1536, 576), (2048, 130), (4096, 1024)];
const ROWS: [usize; 14] = [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257];

/// Results as f64; rows behind the last are NaN before and after.
fn product(
    bench: &Bench,
    blas: &mut Blas,
    way: Way,
    (m, n, k): (usize, usize, usize),
    store: Store,
) -> Option<Vec<f64>> {
    let weights = bench.put(&halves(n * k, 1));
    let mut inputs = halves(m * k, 2);
    // A poisoned row behind the last: it must not matter.
    inputs.extend(std::iter::repeat_n(0x7fc0, k));
    let inputs = bench.put(&inputs);
    let before = numbers(m * n, 3);
    let outputs = match store {
        Store::Bf16 => bench.poisoned((m * n * 2) as u64),
        Store::F32 => bench.poisoned((m * n * 4) as u64),
        Store::AddF32 => bench.put(&before),
        Store::Gated(_) => unreachable!("it has a test of its own"),
    };
    let count = bench.put(&[m as i32]);
    let gemm = Gemm {
        weights: weights.at(),
        inputs: inputs.at(),
        outputs: outputs.at(),
        // The true number of rows stands on the GPU: the grid may be larger.
        m: match way {
            Way::Tile => m + 30,
            Way::Cluster => (m + 1).min(CLUSTER_ROWS),
            Way::Small | Way::Blas => m,
        },
        n,
        k,
        m_at: count.at(),
        store,
    };
    // SAFETY: arrays of these shapes, which live until they are read below.
    let done = unsafe {
        match way {
            Way::Small => bench.kernels.gemm_small(bench.launcher(), gemm).map(|()| true),
            Way::Cluster => bench.kernels.gemm_cluster(bench.launcher(), gemm, None, None).map(|()| true),
            Way::Tile => bench.kernels.gemm_tile(bench.launcher(), gemm).map(|()| true),
            Way::Blas => blas.run(&bench.stream, &gemm),
        }
    };
    let done = done.unwrap_or_else(|error| panic!("{way:?} {m} x {n} x {k} {store:?}: {error}"));
    done.then(|| match store {
        Store::Bf16 => bench.get::<u16>(&outputs, m * n).into_iter().map(wide).collect(),
        _ => bench.get::<f32>(&outputs, m * n).into_iter().map(f64::from).collect(),
    })
}

fn expected((m, n, k): (usize, usize, usize), store: Store) -> (Vec<f64>, Vec<f64>) {
    let weights: Vec<f64> = halves(n * k, 1).into_iter().map(wide).collect();
    let inputs: Vec<f64> = halves(m * k, 2).into_iter().map(wide).collect();
    let before = numbers(m * n, 3);
    let (mut sums, mut tolerances) = (Vec::new(), Vec::new());
    for row in 0..m {
        for column in 0..n {
            let products = inputs[row * k..][..k].iter().zip(&weights[column * k..][..k]).map(|(a, b)| a * b);
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), x| (sum + x, size + f64::abs(x)));
            let base = if store == Store::AddF32 { f64::from(before[row * n + column]) } else { 0.0 };
            let rounding = if store == Store::Bf16 { sum.abs() / 256.0 } else { 0.0 };
            sums.push(sum + base);
            tolerances.push(size * 2f64.powi(-19) + rounding + 1e-6);
        }
    }
    (sums, tolerances)
}

fn check(ways: &[Way], rows: &[usize], shapes: &[(usize, usize)]) {
    let bench = Bench::new(64, KvDtype::Bf16);
    let mut blas = Blas::new(&bench.gpu, libraries().as_deref()).expect("cublasLt");
    for (k, n) in shapes {
        for m in rows {
            for store in [Store::Bf16, Store::F32, Store::AddF32] {
                let shape = (*m, *n, *k);
                let (sums, tolerances) = expected(shape, store);
                for way in ways.iter().filter(|way| **way != Way::Small || *m <= SMALL_ROWS) {
                    let Some(got) = product(&bench, &mut blas, *way, shape, store) else { continue };
                    close(&format!("{way:?} {shape:?} {store:?}"), &got, &sums, |index| tolerances[index]);
                }
            }
        }
    }
}

#[test]
fn small() {
    check(&[Way::Small], &ROWS[..6], &SHAPES);
}

/// Each division of a product among blocks; a last tile that is not full, an odd number of tiles, a last step of K that is not full.
#[test]
fn cluster() {
    check(&[Way::Cluster], &[13, 33, 63, 64], &[(288, 10_256), (1056, 5136), (640, 4096), (1504, 3472)]);
}

#[test]
fn tile() {
    check(&[Way::Tile], &ROWS, &SHAPES);
}

#[test]
fn blas() {
    check(&[Way::Blas], &[1, 16, 32, 64, 256], &SHAPES[1..]);
}

#[test]
fn rows_are_the_same_to_the_bit_whatever_their_number() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let mut blas = Blas::new(&bench.gpu, libraries().as_deref()).expect("cublasLt");
    for (k, n) in SHAPES {
        for store in [Store::Bf16, Store::F32, Store::AddF32] {
            let whole = product(&bench, &mut blas, Way::Tile, (257, n, k), store).unwrap();
            for m in ROWS {
                for way in [Way::Small, Way::Tile] {
                    if way == Way::Small && m > SMALL_ROWS {
                        continue;
                    }
                    let got = product(&bench, &mut blas, way, (m, n, k), store).unwrap();
                    assert!(got == whole[..m * n], "{way:?} {m} x {n} x {k} {store:?}");
                }
            }
        }
    }
}

/// Gates and factors in one product, against a product of both and the activation behind it.
#[test]
fn gated_products_are_those_with_the_gate_behind_them_to_the_bit() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for (k, n) in [(32, 8), (576, 1536), (640, 104), (4096, 1024)] {
        for m in ROWS.into_iter().filter(|m| *m <= SMALL_ROWS) {
            for activation in [0, 1] {
                let (weights, inputs) = (bench.put(&halves(2 * n * k, 1)), bench.put(&halves(m * k, 2)));
                let mut counts = [0i32; COUNTS];
                counts[N_TOKENS] = m as i32;
                let counts = bench.put(&counts);
                let [both, apart, fused] = [2 * n, n, n].map(|n| bench.poisoned((m * n * 2) as u64));
                let gemm = |outputs, n, store| Gemm {
                    weights: weights.at(),
                    inputs: inputs.at(),
                    outputs,
                    m: m.next_multiple_of(8),
                    n,
                    k,
                    m_at: counts.at(),
                    store,
                };
                // SAFETY: arrays of these shapes, which live until they are read below; the true number of rows is counted.
                unsafe {
                    let to = bench.launcher();
                    bench.kernels.gemm_small(to, gemm(both.at(), 2 * n, Store::Bf16)).unwrap();
                    bench
                        .kernels
                        .gate_act(to, m, [counts.at(), both.at(), apart.at()], n, activation)
                        .unwrap();
                    bench.kernels.gemm_small(to, gemm(fused.at(), n, Store::Gated(activation))).unwrap();
                }
                let [apart, fused] = [apart, fused].map(|array| bench.get::<u16>(&array, m * n));
                assert!(apart == fused, "{m} x {n} x {k}, activation {activation}");
            }
        }
    }
}
