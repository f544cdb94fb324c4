//! Products of few rows that take along what stands before or behind them, against kernels of their own, to the bit.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, LogitRow, N_LOGIT_ROWS, N_TOKENS};
use thalweg_worker::backend::cuda::kernels::{Gemm, NORMED_INPUTS_MAX, QkvArgs, Store};

use crate::support::{Array, Bench, halves, numbers, wide};

const EPSILON: f32 = 1e-5;
/// Widths of rows: one round of the ring and less, several, the most.
const WIDTHS: [usize; 6] = [32, 576, 1024, 2080, 3072, NORMED_INPUTS_MAX];

fn counts(bench: &Bench, tokens: usize, logit_rows: usize) -> Array {
    let mut counts = [0i32; COUNTS];
    (counts[N_TOKENS], counts[N_LOGIT_ROWS]) = (tokens as i32, logit_rows as i32);
    bench.put(&counts)
}

#[test]
fn a_product_of_one_row_makes_its_norm_to_the_bit() {
    let bench = Bench::new(64, KvDtype::Bf16);
    assert!(bench.kernels.has_normed(), "this card has no such kernel");
    for k in WIDTHS {
        for (n, store) in
            [(8, Store::Bf16), (1000, Store::Bf16), (72, Store::Gated(0)), (1536, Store::Gated(1))]
        {
            let rows = if matches!(store, Store::Gated(_)) { 2 * n } else { n };
            let (weights, norm) = (bench.put(&halves(rows * k, 1)), bench.put(&halves(k, 2)));
            let (row, counts) = (bench.put(&numbers(k, 3)), counts(&bench, 1, 0));
            let [normed, apart, within] = [k, n, n].map(|n| bench.poisoned((n * 2) as u64));
            let gemm = |inputs, outputs| Gemm {
                weights: weights.at(),
                inputs,
                outputs,
                m: 1,
                n,
                k,
                m_at: counts.at(),
                store,
            };
            // SAFETY: arrays of these shapes, which live until they are read below.
            unsafe {
                let to = bench.launcher();
                let addresses = [counts.at(), row.at(), norm.at(), normed.at()];
                bench.kernels.rms_norm(to, 1, addresses, EPSILON, k).unwrap();
                bench.kernels.gemm_small(to, gemm(normed.at(), apart.at())).unwrap();
                bench.kernels.gemm_normed(to, gemm(row.at(), within.at()), (norm.at(), EPSILON)).unwrap();
            }
            let [apart, within] = [apart, within].map(|array| bench.get::<u16>(&array, n));
            assert!(apart == within, "{n} x {k} {store:?}");
        }
    }
}

#[test]
fn heads_that_a_product_finishes_are_those_of_the_kernel_to_the_bit() {
    for head_dim in [64, 128, 256] {
        for heads in [(4, 4), (9, 3), (16, 1)] {
            for dtype in [KvDtype::Bf16, KvDtype::Fp8E4m3, KvDtype::Fp8E5m2] {
                for rows in [0, 1, 2, 8, 9, 16] {
                    check_heads(head_dim, heads, dtype, rows);
                }
            }
        }
    }
}

fn check_heads(head_dim: usize, (q_heads, kv_heads): (usize, usize), dtype: KvDtype, rows: usize) {
    let bench = Bench::new(head_dim, dtype);
    let (k, n, blocks, positions_max) = (576, (q_heads + 2 * kv_heads) * head_dim, 5, 60);
    let room = rows.max(1);
    let (weights, norm, bias) =
        (bench.put(&halves(n * k, 1)), bench.put(&halves(k, 2)), bench.put(&halves(n, 3)));
    let residual = bench.put(&numbers(room * k, 4));
    let rope = numbers(positions_max * head_dim, 5);
    let rope = bench.put(&rope);
    let positions: Vec<i32> = (0..room as i32).map(|row| 3 * row + 1).collect();
    // One row of several is padding.
    let places: Vec<i32> = (0..room as i32).map(|row| if row == 1 { -1 } else { 79 - 5 * row }).collect();
    let (positions, places) = (bench.put(&positions), bench.put(&places));
    let counts = counts(&bench, rows, 0);
    let normed = bench.poisoned((room * k * 2) as u64);
    let cache_bytes = blocks * kv_heads * 16 * head_dim * dtype.bytes();
    let run = |is_apart: bool, norm_within: bool| {
        let qkv = bench.poisoned((room * n * 2) as u64);
        let [keys, values] = [(); 2].map(|()| bench.poisoned(cache_bytes as u64));
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
            inputs: if norm_within { residual.at() } else { normed.at() },
            outputs: qkv.at(),
            m: room,
            n,
            k,
            m_at: counts.at(),
            store: Store::Bf16,
        };
        // SAFETY: arrays of these shapes, which live until they are read below.
        unsafe {
            let to = bench.launcher();
            let addresses = [counts.at(), residual.at(), norm.at(), normed.at()];
            bench.kernels.rms_norm(to, room, addresses, EPSILON, k).unwrap();
            if is_apart {
                bench.kernels.gemm_small(to, gemm).unwrap();
                bench.kernels.qkv_finish(to, room, args).unwrap();
            } else {
                let norm = norm_within.then_some((norm.at(), EPSILON));
                bench.kernels.gemm_qkv(to, gemm, norm, args).unwrap();
            }
        }
        let all: Vec<u16> = bench.get(&qkv, room * n);
        let queries: Vec<u16> =
            all.chunks(n).take(rows).flat_map(|row| row[..q_heads * head_dim].to_vec()).collect();
        [queries, bench.get(&keys, cache_bytes / 2), bench.get(&values, cache_bytes / 2)]
    };
    let apart = run(true, false);
    let what = format!("{rows} rows, {q_heads}/{kv_heads} heads of {head_dim}, {dtype:?}");
    same(&what, &apart, &run(false, false));
    if rows <= 1 {
        same(&format!("{what}, norm within"), &apart, &run(false, true));
    }
}

/// Queries, keys and values.
fn same(what: &str, apart: &[Vec<u16>; 3], within: &[Vec<u16>; 3]) {
    for (part, (apart, within)) in apart.iter().zip(within).enumerate() {
        let differ: Vec<usize> = (0..apart.len()).filter(|i| apart[*i] != within[*i]).collect();
        let first = differ.first().map(|i| (*i, wide(apart[*i]), wide(within[*i])));
        assert!(differ.is_empty(), "{what}, part {part}: {} differ, the first {first:?}", differ.len());
    }
}

#[test]
fn rows_whose_logits_are_wanted_are_brought_together() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for (query, hidden) in [(64, 32), (576, 576), (2048, 1152)] {
        let tokens = [0, 1, 7, 40, 299];
        let (attended, residual) = (halves(300 * query, 1), numbers(300 * hidden, 2));
        let rows = tokens.map(|token| LogitRow { token, ..LogitRow::default() });
        let (counts, rows) = (counts(&bench, 300, tokens.len()), bench.put(&rows));
        let (attended_at, residual_at) = (bench.put(&attended), bench.put(&residual));
        let [attended_out, residual_out] =
            [query * 2, hidden * 4].map(|bytes| bench.poisoned((tokens.len() * bytes) as u64));
        let addresses = [&counts, &rows, &attended_at, &residual_at, &attended_out, &residual_out];
        // SAFETY: arrays of these shapes; the grid is larger than the count.
        unsafe {
            let widths = (query, hidden);
            bench.kernels.narrow(bench.launcher(), 9, addresses.map(Array::at), widths).unwrap();
        }
        let kept = tokens.map(|token| token as usize);
        let attended: Vec<u16> =
            kept.iter().flat_map(|row| &attended[row * query..][..query]).copied().collect();
        let residual: Vec<f32> =
            kept.iter().flat_map(|row| &residual[row * hidden..][..hidden]).copied().collect();
        assert!(bench.get::<u16>(&attended_out, attended.len()) == attended, "{query}");
        assert!(bench.get::<f32>(&residual_out, residual.len()) == residual, "{hidden}");
    }
}
