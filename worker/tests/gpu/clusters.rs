//! Products of 13 to 64 rows that take norms, gates and heads along, against sums in f64 and kernels of their own.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, N_TOKENS};
use thalweg_worker::backend::cuda::kernels::{
    Behind, CLUSTER_ROWS, CLUSTER_ROWS_MIN, CLUSTER_TILE, Factors, Gemm, QkvArgs, Store,
};

use crate::support::{Array, Bench, close, gated, halves, numbers, stored, sums, wide};

const EPSILON: f32 = 1e-5;
const ROWS: [usize; 6] = [13, 17, 33, 48, 63, 64];

/// `m` rows of bf16, and rows of NaN behind them up to all that a kernel could read.
fn poisoned_rows(bench: &Bench, m: usize, k: usize, seed: u64) -> Array {
    let mut rows = halves(m * k, seed);
    rows.resize(CLUSTER_ROWS * k, 0x7fc0);
    bench.put(&rows)
}

/// Sums of squares in parts, and the factor of each row that they come to.
fn factors(m: usize, parts: usize, width: usize) -> (Vec<f32>, Vec<f64>) {
    let mut squares: Vec<f32> = numbers(m * parts, 9).iter().map(|x| x.abs() * 50.0).collect();
    let of_row = |row: &[f32]| row.iter().map(|x| f64::from(*x)).sum::<f64>();
    let factor = |row| 1.0 / (of_row(row) / width as f64 + f64::from(EPSILON)).sqrt();
    let factors = squares.chunks(parts).map(factor).collect();
    squares.resize(CLUSTER_ROWS * parts, f32::NAN);
    (squares, factors)
}

#[test]
fn gates_meet_their_factors_behind_the_norm_of_each_row() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (k, parts) = (352, 3);
    // One with a last tile that is not full, and one whose tiles fill no last cluster.
    for (n, activation) in [(5128, 0), (5184, 1)] {
        assert!(
            bench.kernels.has_clusters(CLUSTER_ROWS_MIN, n, Store::Gated(activation)),
            "this card has no such kernel"
        );
        let weights = bench.put(&halves(2 * n * k, 1));
        for m in [13, 40, 64] {
            let (squares, factors) = factors(m, parts, k);
            let (inputs, squares) = (poisoned_rows(&bench, m, k, 2), bench.put(&squares));
            let (outputs, count) = (bench.poisoned((m * n * 2) as u64), bench.put(&[m as i32]));
            let gemm = Gemm {
                weights: weights.at(),
                inputs: inputs.at(),
                outputs: outputs.at(),
                m: CLUSTER_ROWS,
                n,
                k,
                m_at: count.at(),
                store: Store::Gated(activation),
            };
            let scale = Factors { squares: squares.at(), parts, epsilon: EPSILON };
            // SAFETY: arrays of these shapes, which live until they are read below.
            unsafe { bench.kernels.gemm_cluster(bench.launcher(), gemm, Some(scale), None) }.unwrap();
            let got: Vec<f64> = bench.get::<u16>(&outputs, m * n).into_iter().map(wide).collect();
            let sums = sums((m, 2 * n, k), (2, 1));
            let expected: Vec<f64> = (0..m * n)
                .map(|i| {
                    let (row, column, factor) = (i / n, i % n, factors[i / n]);
                    let of = |column: usize| sums[row * 2 * n + column] * factor;
                    gated(activation, of(column), of(n + column))
                })
                .collect();
            close(&format!("{m} x {n}"), &got, &expected, |i| expected[i].abs() / 64.0 + 2e-3);
        }
    }
}

#[test]
fn sums_leave_the_norm_behind_them_half_done() {
    let bench = Bench::new(64, KvDtype::Bf16);
    // Two and three parts of K, the last tile not full.
    for (n, k) in [(5136, 1056), (3472, 1504), (4096, 640)] {
        assert!(bench.kernels.leaves_norm(CLUSTER_ROWS_MIN, n), "{n}");
        let (weights, norm) = (bench.put(&halves(n * k, 1)), bench.put(&halves(n, 3)));
        let norm_weight: Vec<f64> = halves(n, 3).into_iter().map(wide).collect();
        for m in ROWS {
            let inputs = poisoned_rows(&bench, m, k, 2);
            let (outputs, count) = (bench.put(&numbers(m * n, 4)), bench.put(&[m as i32]));
            let parts = n.div_ceil(CLUSTER_TILE);
            let [rows, squares] = [m * n * 2, m * parts * 4].map(|bytes| bench.poisoned(bytes as u64));
            let gemm = Gemm {
                weights: weights.at(),
                inputs: inputs.at(),
                outputs: outputs.at(),
                m: (m + 3).min(CLUSTER_ROWS),
                n,
                k,
                m_at: count.at(),
                store: Store::AddF32,
            };
            let behind = Behind { weight: norm.at(), rows: rows.at(), squares: squares.at() };
            // SAFETY: arrays of these shapes, which live until they are read below.
            unsafe { bench.kernels.gemm_cluster(bench.launcher(), gemm, None, Some(behind)) }.unwrap();
            let got: Vec<f64> = bench.get::<f32>(&outputs, m * n).into_iter().map(f64::from).collect();
            let before = numbers(m * n, 4);
            let sums = sums((m, n, k), (2, 1));
            let expected: Vec<f64> = sums.iter().zip(&before).map(|(x, y)| x + f64::from(*y)).collect();
            let what = format!("{m} x {n} x {k}");
            close(&what, &got, &expected, |_| 2e-3);
            let rows: Vec<f64> = bench.get::<u16>(&rows, m * n).into_iter().map(wide).collect();
            let normed: Vec<f64> = got.iter().enumerate().map(|(i, x)| x * norm_weight[i % n]).collect();
            close(&format!("{what}, rows"), &rows, &normed, |i| normed[i].abs() / 255.0 + 1e-6);
            let squares: Vec<f64> =
                bench.get::<f32>(&squares, m * parts).into_iter().map(f64::from).collect();
            let of_tile = |tile: &[f64]| tile.iter().map(|x| x * x).sum::<f64>();
            let expected: Vec<f64> =
                got.chunks(n).flat_map(|row| row.chunks(CLUSTER_TILE).map(of_tile)).collect();
            close(&format!("{what}, squares"), &squares, &expected, |i| expected[i] * 1e-5);
        }
    }
}

#[test]
fn heads_of_13_to_64_rows_are_those_of_the_kernel() {
    // All divisions, each width of heads, tiles of half a head and of two.
    let shapes = [(128, (24, 4)), (128, (32, 8)), (128, (32, 32)), (64, (56, 4)), (256, (16, 2))];
    for (head_dim, heads) in shapes {
        for dtype in [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Fp8E5m2] {
            for rows in [0, 13, 41, 64] {
                check_heads(head_dim, heads, dtype, rows);
            }
        }
    }
}

fn check_heads(head_dim: usize, (q_heads, kv_heads): (usize, usize), dtype: KvDtype, rows: usize) {
    let bench = Bench::new(head_dim, dtype);
    let (k, n, blocks, positions_max) = (288, (q_heads + 2 * kv_heads) * head_dim, 24, 300);
    assert!(bench.kernels.has_clusters(CLUSTER_ROWS_MIN, n, Store::Bf16), "{head_dim} {q_heads} {kv_heads}");
    let (weights, bias) = (bench.put(&halves(n * k, 1)), bench.put(&halves(n, 3)));
    let inputs = poisoned_rows(&bench, rows, k, 2);
    let rope = bench.put(&numbers(positions_max * head_dim, 5));
    // Numbers of rows that are not there must not be used.
    let own = |of: &dyn Fn(i32) -> i32| -> Vec<i32> {
        (0..CLUSTER_ROWS as i32).map(|row| if row < rows as i32 { of(row) } else { i32::MAX }).collect()
    };
    // One row of several is padding.
    let places = own(&|row| if row == 1 { -1 } else { 379 - 5 * row });
    let (positions, places) = (bench.put(&own(&|row| 3 * row + 1)), bench.put(&places));
    let mut counts = [0i32; COUNTS];
    counts[N_TOKENS] = rows as i32;
    let counts = bench.put(&counts);
    let cache_bytes = blocks * kv_heads * 16 * head_dim * dtype.bytes();
    let run = |in_clusters: bool| {
        let qkv = bench.poisoned((CLUSTER_ROWS * n * 2) as u64);
        let [keys, values] = [(); 2].map(|()| bench.put(&vec![0u8; cache_bytes]));
        let args = QkvArgs {
            counts: counts.at(),
            positions: positions.at(),
            places: places.at(),
            qkv: qkv.at(),
            bias: bias.at(),
            q_norm: 0,
            k_norm: 0,
            epsilon: EPSILON,
            rope: rope.at(),
            q_heads,
            kv_heads,
            keys: keys.at(),
            values: values.at(),
            dtype,
        };
        let gemm = Gemm {
            weights: weights.at(),
            inputs: inputs.at(),
            outputs: qkv.at(),
            m: CLUSTER_ROWS,
            n,
            k,
            m_at: counts.at(),
            store: Store::Bf16,
        };
        // SAFETY: arrays of these shapes, which live until they are read below.
        unsafe {
            if in_clusters {
                bench.kernels.gemm_cluster_qkv(bench.launcher(), gemm, None, args).unwrap();
            } else {
                bench.kernels.gemm_tile(bench.launcher(), gemm).unwrap();
                bench.kernels.qkv_finish(bench.launcher(), CLUSTER_ROWS, args).unwrap();
            }
        }
        let all: Vec<u16> = bench.get(&qkv, CLUSTER_ROWS * n);
        let queries = all.chunks(n).take(rows).flat_map(|row| &row[..q_heads * head_dim]);
        let queries: Vec<f64> = queries.map(|bits| wide(*bits)).collect();
        let cache = |array: &Array| -> Vec<f64> {
            let bytes: Vec<u8> = bench.get(array, cache_bytes);
            bytes.chunks(dtype.bytes()).map(|value| stored(dtype, value)).collect()
        };
        [queries, cache(&keys), cache(&values)]
    };
    // What is rounded before rope and bias there is rounded once here; a number of fp8 can come to lie on the other side of a middle.
    let (of_value, least) = match dtype {
        KvDtype::Bf16 => (64.0, 0.15),
        _ => (4.0, 0.3),
    };
    let (apart, within) = (run(false), run(true));
    for (part, (apart, within)) in apart.iter().zip(&within).enumerate() {
        let what = format!("{rows} rows, {q_heads}/{kv_heads} heads of {head_dim}, {dtype:?}, part {part}");
        let (of_value, least) = if part == 0 { (64.0, 0.15) } else { (of_value, least) };
        close(&what, within, apart, |i| apart[i].abs() / of_value + least);
    }
}
