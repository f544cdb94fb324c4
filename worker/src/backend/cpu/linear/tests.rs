//! Every type on every instruction set against dequantised weights in f64, and every shape of a batch against every other,
//! bitwise.

use half::{bf16, f16};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::checkpoint::Matrix;
use thalweg_model::dequantize::dequantize_row;
use thalweg_model::dtype::DType;

use super::format::BLOCK;
use super::{Activations, Compute, PackedMatrix, matmul};
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::pool::Pool;

const TYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];
const TOKENS: [usize; 10] = [1, 2, 3, 7, 8, 9, 16, 17, 63, 65];
const TOKENS_MAX: usize = 65;
const ROWS: [usize; 2] = [16, 37];

/// K of the models under test, and of one block; K-quants only where they fit.
fn columns(dtype: DType) -> impl Iterator<Item = usize> {
    let all =
        [32_usize, 256, 576, 640, 2048].into_iter().filter(move |k| k.is_multiple_of(dtype.block_elements()));
    all.chain((dtype.block_elements() == 1).then_some(35))
}

/// A matrix of random valid bytes.
struct Stored {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Stored {
    fn random(rng: &mut StdRng, dtype: DType, rows: usize, cols: usize) -> Self {
        let blocks = rows * cols / dtype.block_elements();
        let bytes = (0..blocks).flat_map(|_| random_block(rng, dtype)).collect();
        Self { dtype, rows, cols, bytes }
    }

    fn matrix(&self) -> Matrix<'_> {
        let Self { dtype, rows, cols, ref bytes } = *self;
        Matrix { dtype, rows, cols, data: bytes, interleaved: false }
    }

    fn row(&self, row: usize) -> Vec<f32> {
        let row_bytes = self.bytes.len() / self.rows;
        let mut out = vec![0.0; self.cols];
        dequantize_row(self.dtype, &self.bytes[row * row_bytes..][..row_bytes], &mut out);
        out
    }

    fn pack(&self, pool: &Pool, compute: Compute) -> PackedMatrix {
        PackedMatrix::pack(pool, &[self.matrix()], 2, compute, &|_| {}).unwrap()
    }
}

/// Scales lie where each type has its f16; everything else may be any bits.
fn random_block(rng: &mut StdRng, dtype: DType) -> Vec<u8> {
    let uniform = |rng: &mut StdRng| rng.random_range(-1.0_f32..1.0);
    match dtype {
        DType::F32 => return uniform(rng).to_le_bytes().to_vec(),
        DType::F16 => return f16::from_f32(uniform(rng)).to_le_bytes().to_vec(),
        DType::BF16 => return bf16::from_f32(uniform(rng)).to_le_bytes().to_vec(),
        _ => {}
    }
    let mut block = vec![0; dtype.block_bytes()];
    rng.fill(&mut block[..]);
    let scales_at: &[usize] = match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 => &[0],
        DType::Q6_K => &[208],
        _ => &[0, 2],
    };
    for &at in scales_at {
        block[at..at + 2].copy_from_slice(&f16::from_f32(0.02 * uniform(rng)).to_le_bytes());
    }
    block
}

fn random_input(rng: &mut StdRng, tokens: usize, cols: usize) -> Vec<f32> {
    (0..tokens * cols).map(|i| rng.random_range(-1.0_f32..1.0) * [0.01, 1.0, 30.0][i / BLOCK % 3]).collect()
}

/// Outputs of the first `tokens` rows, all padding poisoned.
fn product(pool: &Pool, w: &PackedMatrix, x: &[f32], tokens: usize) -> Vec<f32> {
    let mut input = Activations::new(tokens, w.cols());
    input.prepare(pool, &x[..tokens * w.cols()], tokens, w.cols(), w.inputs());
    input.poison_padding();
    let guard = 64;
    let mut out = vec![f32::NAN; tokens * w.rows() + guard];
    let end = tokens * w.rows();
    matmul(pool, w, &input, &mut out[..end]);
    assert!(out[end..].iter().all(|x| x.is_nan()), "wrote behind the outputs");
    out.truncate(end);
    out
}

fn assert_same_bits(left: &[f32], right: &[f32], what: &str) {
    assert_eq!(left.len(), right.len(), "{what}");
    let differs = left.iter().zip(right).position(|(a, b)| a.to_bits() != b.to_bits());
    if let Some(at) = differs {
        panic!("{what}: output {at} is {} and {}", left[at], right[at]);
    }
}

/// The quantisation that the kernels promise, in f64 where they have f32: what one block of activations becomes.
fn quantised(values: &[f32]) -> Vec<f64> {
    let largest = values.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let (scale, inverse) = (largest * (1.0 / 127.0), 127.0 / largest);
    values.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale)).collect()
}

/// Against a sum in f64 over dequantised weights. The tolerance is that of a sum in f32 of so many terms: each rounds by at most
/// 2^-24 of the sum of magnitudes.
fn check_values(stored: &Stored, int8: bool, x: &[f32], out: &[f32], what: &str) {
    let terms = if int8 { 4 * stored.cols / BLOCK } else { stored.cols };
    let weights: Vec<Vec<f32>> = (0..stored.rows).map(|row| stored.row(row)).collect();
    for (token, x) in x.chunks_exact(stored.cols).enumerate() {
        let input: Vec<f64> = match int8 {
            true => x.chunks(BLOCK).flat_map(quantised).collect(),
            false => x.iter().copied().map(f64::from).collect(),
        };
        for (row, weights) in weights.iter().enumerate() {
            let products = || weights.iter().zip(&input).map(|(&w, x)| f64::from(w) * x);
            let sum = products().sum::<f64>();
            // Scale and minimum are summed apart and cancel: up to 4 times the weights' own magnitude.
            let tolerance = 4.0 * products().map(f64::abs).sum::<f64>() * terms as f64 * 0.5_f64.powi(24);
            let error = (f64::from(out[token * stored.rows + row]) - sum).abs();
            assert!(
                error <= tolerance,
                "{what}: token {token}, row {row}: {error} off {sum}, not {tolerance}"
            );
        }
    }
}

fn check_type(dtype: DType, compute: Compute) {
    let seed = 0x7a11 + dtype as u64;
    let mut rng = StdRng::seed_from_u64(seed);
    for cols in columns(dtype) {
        for rows in ROWS {
            let stored = Stored::random(&mut rng, dtype, rows, cols);
            let x = random_input(&mut rng, TOKENS_MAX, cols);
            let reference = {
                let pool = Pool::with_isa(1, Isa::Scalar);
                product(&pool, &stored.pack(&pool, compute), &x, TOKENS_MAX)
            };
            let what = format!("{dtype:?} {rows} x {cols} {compute:?}, seed {seed}");
            let int8 = compute == Compute::Int8 && dtype.block_elements() > 1;
            check_values(&stored, int8, &x, &reference, &what);
            for isa in Isa::available() {
                check_shapes(isa, &stored, compute, &x, &reference, &what);
            }
        }
    }
}

/// Any number of tokens, threads and any instruction set: the same bits.
fn check_shapes(isa: Isa, stored: &Stored, compute: Compute, x: &[f32], reference: &[f32], what: &str) {
    for threads in [1, 3] {
        let pool = Pool::with_isa(threads, isa);
        let packed = stored.pack(&pool, compute);
        for tokens in TOKENS {
            let out = product(&pool, &packed, x, tokens);
            let what = format!("{what}: {isa:?}, {threads} threads, {tokens} tokens");
            assert_same_bits(&out, &reference[..tokens * stored.rows], &what);
        }
        // Batch mates and place in the batch: the last token alone.
        let last = product(&pool, &packed, &x[(TOKENS_MAX - 1) * stored.cols..], 1);
        assert_same_bits(
            &last,
            &reference[(TOKENS_MAX - 1) * stored.rows..],
            &format!("{what}: {isa:?}, alone"),
        );
    }
}

#[test]
fn int8_products_of_every_type() {
    TYPES.into_iter().for_each(|dtype| check_type(dtype, Compute::Int8));
}

#[test]
fn f32_products_of_every_type() {
    TYPES.into_iter().for_each(|dtype| check_type(dtype, Compute::F32));
}

#[test]
fn rows_come_back_exactly() {
    let mut rng = StdRng::seed_from_u64(3);
    let pool = Pool::new(2);
    for dtype in TYPES {
        let stored = Stored::random(&mut rng, dtype, 37, 512);
        let packed = stored.pack(&pool, Compute::Int8);
        let mut out = vec![f32::NAN; 512];
        for row in 0..37 {
            packed.row_to_f32(row, &mut out);
            assert_eq!(out, stored.row(row), "{dtype:?} row {row}");
        }
    }
}

#[test]
fn joined_matrices_stand_one_below_the_other() {
    let mut rng = StdRng::seed_from_u64(4);
    let pool = Pool::new(2);
    let parts = [(DType::Q5_0, 40), (DType::Q8_0, 7), (DType::F32, 16), (DType::Q4_K, 33)];
    let parts = parts.map(|(dtype, rows)| Stored::random(&mut rng, dtype, rows, 512));
    let x = random_input(&mut rng, 9, 512);
    for compute in [Compute::Int8, Compute::F32] {
        let matrices: Vec<Matrix<'_>> = parts.iter().map(Stored::matrix).collect();
        let joined = PackedMatrix::pack(&pool, &matrices, 2, compute, &|_| {}).unwrap();
        let out = product(&pool, &joined, &x, 9);
        let mut first = 0;
        for part in &parts {
            let alone = product(&pool, &part.pack(&pool, compute), &x, 9);
            for token in 0..9 {
                let joined = &out[token * joined.rows() + first..][..part.rows];
                assert_same_bits(
                    joined,
                    &alone[token * part.rows..][..part.rows],
                    &format!("{:?}", part.dtype),
                );
            }
            first += part.rows;
        }
    }
}

#[test]
fn interleaved_rows_become_half_split() {
    let mut rng = StdRng::seed_from_u64(5);
    let pool = Pool::new(2);
    // Three heads, and enough rows that packing goes in stripes.
    for (rows, head_dim, cols) in [(3 * 20, 20, 64), (96 * 1024, 64, 256)] {
        let stored = Stored::random(&mut rng, DType::Q8_0, rows, cols);
        let matrix = Matrix { interleaved: true, ..stored.matrix() };
        let packed = PackedMatrix::pack(&pool, &[matrix], head_dim, Compute::Int8, &|_| {}).unwrap();
        let mut out = vec![0.0; cols];
        for stored_row in (0..rows).step_by(7) {
            let (head, within) = (stored_row / head_dim, stored_row % head_dim);
            let row = head * head_dim + within / 2 + within % 2 * (head_dim / 2);
            packed.row_to_f32(row, &mut out);
            assert_eq!(out, stored.row(stored_row), "{rows} rows, stored row {stored_row}");
        }
    }
}

#[test]
fn every_byte_is_released_once_and_in_order() {
    let mut rng = StdRng::seed_from_u64(6);
    let pool = Pool::new(2);
    let stored = Stored::random(&mut rng, DType::Q4_0, 66_000, 1024);
    let matrix = stored.matrix();
    let next = std::sync::Mutex::new((matrix.data.as_ptr() as usize, 0));
    let release = |part: &Matrix<'_>| {
        let mut next = next.lock().unwrap();
        assert_eq!((part.data.as_ptr() as usize, part.cols), (next.0, 1024));
        *next = (next.0 + part.data.len(), next.1 + part.rows);
    };
    PackedMatrix::pack(&pool, &[matrix], 2, Compute::Int8, &release).unwrap();
    let (end, rows) = *next.lock().unwrap();
    assert_eq!((end - matrix.data.as_ptr() as usize, rows), (matrix.data.len(), 66_000));
}

#[test]
fn misfits_are_refused() {
    let pool = Pool::new(1);
    let data = [0; 4096];
    let matrix = |dtype, rows, cols, bytes, interleaved| Matrix {
        dtype,
        rows,
        cols,
        data: &data[..bytes],
        interleaved,
    };
    let check = |parts: &[Matrix<'_>], head_dim, expected: &str| {
        let error = PackedMatrix::pack(&pool, parts, head_dim, Compute::Int8, &|_| {}).unwrap_err();
        assert!(error.to_string().contains(expected), "{error} lacks {expected}");
    };
    check(&[matrix(DType::Q4_0, 1, 33, 18, false)], 2, "1 x 33 weights of Q4_0 do not fit 18 bytes");
    check(&[matrix(DType::F32, 2, 4, 31, false)], 2, "do not fit 31 bytes");
    check(&[matrix(DType::F32, 0, 4, 0, false)], 2, "0 x 4");
    check(
        &[matrix(DType::F32, 2, 4, 32, false), matrix(DType::F32, 1, 8, 32, false)],
        2,
        "8 inputs cannot be joined",
    );
    check(&[matrix(DType::F32, 6, 4, 96, true)], 4, "no whole heads of 4");
    check(&[matrix(DType::F32, 6, 4, 96, true)], 3, "no whole heads of 3");
}

#[test]
fn non_finite_inputs_show() {
    let mut rng = StdRng::seed_from_u64(7);
    for isa in Isa::available() {
        let pool = Pool::with_isa(1, isa);
        for dtype in TYPES {
            let packed = Stored::random(&mut rng, dtype, 16, 256).pack(&pool, Compute::Int8);
            let mut x = random_input(&mut rng, 2, 256);
            x[100] = f32::NAN;
            let out = product(&pool, &packed, &x, 2);
            assert!(out[..16].iter().all(|y| y.is_nan()), "{isa:?} {dtype:?} hides a NaN");
            assert!(out[16..].iter().all(|y| y.is_finite()), "{isa:?} {dtype:?} spreads a NaN");
        }
    }
}

#[test]
fn zeros_give_zeros() {
    let mut rng = StdRng::seed_from_u64(8);
    for isa in Isa::available() {
        let pool = Pool::with_isa(1, isa);
        for dtype in TYPES {
            let packed = Stored::random(&mut rng, dtype, 16, 256).pack(&pool, Compute::Int8);
            for tiny in [0.0, -0.0, 1e-42, 1e-31] {
                let out = product(&pool, &packed, &[tiny; 256], 1);
                assert!(out.iter().all(|y| y.abs() < 1e-28), "{isa:?} {dtype:?} {tiny}");
            }
        }
    }
}
