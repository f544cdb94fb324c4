//! Kernels over single rows, and those that fill and copy.

use half::bf16;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, LogitRow, N_LOGIT_ROWS, N_TOKENS};
use thalweg_worker::backend::cuda::kernels::QkvArgs;

use crate::support::{Array, Bench, KV_DTYPES, close, halves, numbers, stored, wide};

const TOKENS: [usize; 5] = [1, 7, 64, 65, 257];
pub(crate) const EPSILON: f32 = 1e-5;

fn counts(bench: &Bench, tokens: usize, logit_rows: usize) -> Array {
    let mut counts = [0i32; COUNTS];
    (counts[N_TOKENS], counts[N_LOGIT_ROWS]) = (tokens as i32, logit_rows as i32);
    bench.put(&counts)
}

/// A row's norm, in f64.
pub(crate) fn normed(x: &[f32], weight: &[u16]) -> Vec<f64> {
    let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
    x.iter().zip(weight).map(|(x, w)| f64::from(*x) * factor * wide(*w)).collect()
}

fn of_halves(values: Vec<u16>) -> Vec<f64> {
    values.into_iter().map(wide).collect()
}

#[test]
fn norms() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for width in [64, 576, 640, 4096] {
        for tokens in TOKENS {
            let (x, weight) = (numbers(tokens * width, 1), halves(width, 2));
            let counts = counts(&bench, tokens, 0);
            let (on_gpu, on_gpu_weight) = (bench.put(&x), bench.put(&weight));
            let out = bench.poisoned((tokens * width * 2) as u64);
            let addresses = [counts.at(), on_gpu.at(), on_gpu_weight.at(), out.at()];
            // SAFETY: arrays of these shapes, which live until they are read. The grid is larger than the count.
            unsafe { bench.kernels.rms_norm(bench.launcher(), tokens + 9, addresses, EPSILON, width) }
                .unwrap();
            let expected: Vec<f64> = x.chunks(width).flat_map(|row| normed(row, &weight)).collect();
            let got = of_halves(bench.get(&out, tokens * width));
            let tolerance = |index: usize| expected[index].abs() / 200.0 + 1e-4;
            close(&format!("rms_norm {tokens} x {width}"), &got, &expected, tolerance);

            let before = numbers(tokens * width, 3);
            let residual = bench.put(&before);
            let addresses = [counts.at(), on_gpu.at(), on_gpu_weight.at(), residual.at()];
            // SAFETY: as above.
            unsafe { bench.kernels.add_rms_norm(bench.launcher(), tokens + 9, addresses, EPSILON, width) }
                .unwrap();
            let got: Vec<f64> =
                bench.get::<f32>(&residual, tokens * width).into_iter().map(f64::from).collect();
            let sums: Vec<f64> = expected.iter().zip(&before).map(|(y, x)| y + f64::from(*x)).collect();
            close(&format!("add_rms_norm {tokens} x {width}"), &got, &sums, |index| {
                sums[index].abs() * 1e-5 + 1e-5
            });
        }
    }
}

#[test]
fn norms_of_wanted_rows() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (tokens, width) = (30, 576);
    let (x, weight) = (numbers(tokens * width, 1), halves(width, 2));
    let rows: Vec<LogitRow> = [3, 29, 0, 17]
        .map(|token| LogitRow { token, slot: 0, target: -1, top: -1, output_index: -1, mask: -1 })
        .into();
    let counts = counts(&bench, tokens, rows.len());
    let (on_gpu, on_gpu_weight, on_gpu_rows) = (bench.put(&x), bench.put(&weight), bench.put(&rows));
    let out = bench.poisoned((4 * width * 2) as u64);
    let addresses = [counts.at(), on_gpu_rows.at(), on_gpu.at(), on_gpu_weight.at(), out.at()];
    // SAFETY: arrays of these shapes; rows from the second on, one more than there are.
    unsafe { bench.kernels.rms_norm_rows(bench.launcher(), (1, 4), addresses, EPSILON, width) }.unwrap();
    let got: Vec<u16> = bench.get(&out, 4 * width);
    let expected: Vec<f64> =
        [29, 0, 17].iter().flat_map(|t| normed(&x[t * width..][..width], &weight)).collect();
    let tolerance = |index: usize| expected[index].abs() / 200.0 + 1e-4;
    close("rms_norm_rows", &of_halves(got[..3 * width].to_vec()), &expected, tolerance);
    assert!(got[3 * width..].iter().all(|x| *x == 0xffff), "a row beyond the count was written");
}

#[test]
fn embeddings() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (width, vocab) = (640, 50);
    let table = halves(vocab * width, 1);
    // Three ids, and what slots 1 and 0 sampled last.
    let source = [3, 49, 0, -2, -1];
    let last_token = [7, 11];
    let ids = [3, 49, 0, 11, 7];
    let counts = counts(&bench, ids.len(), 0);
    let (table_at, source_at, last_at) = (bench.put(&table), bench.put(&source), bench.put(&last_token));
    let residual = bench.poisoned((8 * width * 4) as u64);
    let addresses = [counts.at(), source_at.at(), last_at.at(), table_at.at(), residual.at()];
    // SAFETY: arrays of these shapes; the grid is larger than the count.
    unsafe { bench.kernels.embed(bench.launcher(), 8, addresses, 2.5, width) }.unwrap();
    let got: Vec<f32> = bench.get(&residual, 8 * width);
    for (token, id) in ids.iter().enumerate() {
        let expected: Vec<f32> = table[id * width..][..width].iter().map(|x| wide(*x) as f32 * 2.5).collect();
        assert_eq!(got[token * width..][..width], expected, "token {token}");
    }
    assert!(got[ids.len() * width..].iter().all(|x| x.is_nan()), "a token beyond the count was written");
}

#[test]
fn gates() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for (activation, mlp) in [(0, 64), (0, 1536), (1, 2048), (1, 14_336)] {
        for tokens in [1, 9, 65] {
            let inputs: Vec<u16> =
                numbers(tokens * 2 * mlp, 5).iter().map(|x| bf16::from_f32(6.0 * x).to_bits()).collect();
            let counts = counts(&bench, tokens, 0);
            let (inputs_at, out) = (bench.put(&inputs), bench.poisoned((tokens * mlp * 2) as u64));
            let addresses = [counts.at(), inputs_at.at(), out.at()];
            // SAFETY: arrays of these shapes; the grid is larger than the count.
            unsafe { bench.kernels.gate_act(bench.launcher(), tokens + 3, addresses, mlp, activation) }
                .unwrap();
            let expected: Vec<f64> = inputs
                .chunks(2 * mlp)
                .flat_map(|row| (0..mlp).map(|i| activate(activation, wide(row[i])) * wide(row[mlp + i])))
                .collect();
            let got = of_halves(bench.get(&out, tokens * mlp));
            let tolerance = |index: usize| expected[index].abs() / 100.0 + 1e-3;
            close(&format!("gate_act {activation} {tokens} x {mlp}"), &got, &expected, tolerance);
        }
    }
}

fn activate(activation: i32, x: f64) -> f64 {
    match activation {
        0 => x / (1.0 + (-x).exp()),
        _ => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
    }
}

/// Bias, norm and rotation of one head.
fn finished(
    head: &[u16],
    bias: Option<&[u16]>,
    norm: Option<&[u16]>,
    angles: Option<&[[f32; 2]]>,
) -> Vec<f64> {
    let mut x: Vec<f64> = head.iter().map(|x| wide(*x)).collect();
    if let Some(bias) = bias {
        x.iter_mut().zip(bias).for_each(|(x, b)| *x += wide(*b));
    }
    if let Some(norm) = norm {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(EPSILON)).sqrt();
        x.iter_mut().zip(norm).for_each(|(x, w)| *x *= factor * wide(*w));
    }
    if let Some(angles) = angles {
        let half = x.len() / 2;
        for (i, [cos, sin]) in angles.iter().enumerate() {
            let (a, b, cos, sin) = (x[i], x[i + half], f64::from(*cos), f64::from(*sin));
            (x[i], x[i + half]) = (a * cos - b * sin, b * cos + a * sin);
        }
    }
    x
}

#[test]
fn heads_are_finished_and_kept() {
    for head_dim in [64, 128, 256] {
        for (q_heads, kv_heads) in [(4, 4), (9, 3), (16, 1)] {
            for dtype in KV_DTYPES {
                for with_norm in [false, true] {
                    check_heads(head_dim, (q_heads, kv_heads), dtype, with_norm);
                }
            }
        }
    }
}

fn check_heads(head_dim: usize, (q_heads, kv_heads): (usize, usize), dtype: KvDtype, with_norm: bool) {
    let bench = Bench::new(head_dim, dtype);
    let (tokens, blocks, positions_max) = (9, 4, 40);
    let heads = q_heads + 2 * kv_heads;
    let width = heads * head_dim;
    let qkv = halves(tokens * width, 1);
    let (bias, q_norm, k_norm) = (halves(width, 2), halves(head_dim, 3), halves(head_dim, 4));
    let rope: Vec<[f32; 2]> = (0..positions_max * head_dim / 2)
        .map(|i| {
            let angle = (i / (head_dim / 2)) as f32 * 0.7f32.powi((i % (head_dim / 2)) as i32 / 8 + 1);
            [angle.cos(), angle.sin()]
        })
        .collect();
    let positions: Vec<i32> = (0..tokens as i32).map(|i| 30 - 3 * i).collect();
    // One token is padding.
    let places = [0, 17, 63, 33, -1, 5, 40, 16, 62];
    let counts = counts(&bench, tokens, 0);
    let [positions_at, places_at] = [bench.put(&positions), bench.put(&places)];
    let [qkv_at, bias_at, q_norm_at, k_norm_at] = [&qkv, &bias, &q_norm, &k_norm].map(|v| bench.put(v));
    let rope_at = bench.put(&rope);
    let cache_bytes = blocks * kv_heads * 16 * head_dim * dtype.bytes();
    let [keys, values] = [(); 2].map(|()| bench.poisoned(cache_bytes as u64));
    let args = QkvArgs {
        counts: counts.at(),
        positions: positions_at.at(),
        places: places_at.at(),
        qkv: qkv_at.at(),
        bias: if with_norm { 0 } else { bias_at.at() },
        q_norm: if with_norm { q_norm_at.at() } else { 0 },
        k_norm: if with_norm { k_norm_at.at() } else { 0 },
        epsilon: EPSILON,
        rope: rope_at.at(),
        q_heads,
        kv_heads,
        keys: keys.at(),
        values: values.at(),
        dtype,
    };
    // SAFETY: arrays of these shapes; the grid is larger than the count.
    unsafe { bench.kernels.qkv_finish(bench.launcher(), tokens + 2, args) }.unwrap();
    let got: Vec<u16> = bench.get(&qkv_at, tokens * width);
    let caches = [bench.get::<u8>(&keys, cache_bytes), bench.get::<u8>(&values, cache_bytes)];
    let what = format!("qkv_finish {head_dim} {q_heads}/{kv_heads} {dtype:?} {with_norm}");
    let (mut results, mut expected) = (Vec::new(), Vec::new());
    let mut written = vec![false; blocks * 16];
    for (token, place) in places.into_iter().enumerate() {
        let angles = &rope[positions[token] as usize * head_dim / 2..][..head_dim / 2];
        for head in 0..heads {
            let (is_q, is_v) = (head < q_heads, head >= q_heads + kv_heads);
            let norm = if is_q { &q_norm } else { &k_norm };
            let at = token * width + head * head_dim;
            let should = finished(
                &qkv[at..][..head_dim],
                (!with_norm).then(|| &bias[head * head_dim..][..head_dim]),
                (with_norm && !is_v).then_some(&norm[..]),
                (!is_v).then_some(angles),
            );
            if is_q {
                results.extend(got[at..][..head_dim].iter().map(|x| wide(*x)));
                expected.extend(should);
            } else if place >= 0 {
                written[place as usize] = true;
                let kv_head = head - q_heads - if is_v { kv_heads } else { 0 };
                let (block, offset) = (place as usize / 16, place as usize % 16);
                let from = ((block * kv_heads + kv_head) * 16 + offset) * head_dim * dtype.bytes();
                let row = &caches[usize::from(is_v)][from..][..head_dim * dtype.bytes()];
                results.extend(row.chunks(dtype.bytes()).map(|bytes| stored(dtype, bytes)));
                expected.extend(should);
            }
        }
    }
    let step = match dtype {
        KvDtype::Fp8E5m2 => 8.0,
        KvDtype::Fp8E4m3 => 16.0,
        _ => 200.0,
    };
    close(&what, &results, &expected, |index| expected[index].abs() / step + 0.01);
    for (place, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        let from = (place / 16 * kv_heads * 16 + place % 16) * head_dim * dtype.bytes();
        assert!(
            caches[0][from..][..head_dim].iter().all(|b| *b == 0xff),
            "{what}: place {place} was written"
        );
    }
}

#[test]
fn fills() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let n = 100_003;
    let out = bench.poisoned(2 * n);
    // SAFETY: so many values.
    unsafe { bench.kernels.fill_random(bench.launcher(), out.at(), n, 7, 0.5) }.unwrap();
    let random = of_halves(bench.get(&out, n as usize));
    let mean = random.iter().sum::<f64>() / n as f64;
    let deviation = (random.iter().map(|x| x * x).sum::<f64>() / n as f64).sqrt();
    assert!(random.iter().all(|x| x.abs() <= 0.5) && mean.abs() < 0.01, "mean {mean}");
    assert!((deviation - 0.5 / 3f64.sqrt()).abs() < 0.01, "deviation {deviation}");
    // SAFETY: as above.
    unsafe { bench.kernels.fill_value(bench.launcher(), out.at(), n, 1.0) }.unwrap();
    assert!(of_halves(bench.get(&out, n as usize)).iter().all(|x| *x == 1.0));
}

#[test]
fn blocks_are_copied_in_order() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (blocks, each) = (6usize, 4096usize);
    let keys: Vec<u16> = (0..blocks * each / 2).map(|i| (i / (each / 2)) as u16).collect();
    let values: Vec<u16> = keys.iter().map(|x| x + 100).collect();
    let (keys_at, values_at) = (bench.put(&keys), bench.put(&values));
    let pairs = bench.put(&[[0, 3], [3, 5], [1, 0]]);
    let addresses = [keys_at.at(), values_at.at(), pairs.at()];
    // SAFETY: six blocks of so many bytes.
    unsafe { bench.kernels.copy_blocks(bench.launcher(), addresses, each as u64, 3) }.unwrap();
    for (array, base) in [(&keys_at, 0), (&values_at, 100)] {
        let got: Vec<u16> = bench.get(array, blocks * each / 2);
        let of_block: Vec<u16> = got.chunks(each / 2).map(|block| block[0] - base).collect();
        assert_eq!(of_block, [1, 1, 2, 0, 4, 0]);
        assert!(got.chunks(each / 2).all(|block| block.iter().all(|x| *x == block[0])));
    }
}
