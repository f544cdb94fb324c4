//! Sums of hidden states, against sums in f64 and against themselves in pieces.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{COUNTS, N_POOLED, N_TOKENS, PooledRow};
use thalweg_worker::backend::cuda::kernels::PoolArgs;

use crate::rows::{EPSILON, normed};
use crate::support::{Array, Bench, close, halves, numbers};

const LENGTHS: [usize; 10] = [1, 7, 8, 9, 63, 64, 65, 255, 256, 257];
/// Tokens of other rows between two.
const GAP: usize = 3;
/// Rows and tokens that grids have room for beyond what there is.
const BEYOND: usize = 3;

/// Arrays that one step's sums are made of.
struct Step<'a> {
    bench: &'a Bench,
    width: usize,
    weight: Array,
    sums: Array,
    vectors: Array,
}

impl<'a> Step<'a> {
    /// What slots keep; vectors are poisoned.
    fn new(bench: &'a Bench, weight: &[u16], sums: &[f32]) -> Self {
        let bytes = size_of_val(sums) as u64;
        let (weight_at, sums_at, vectors) = (bench.put(weight), bench.put(sums), bench.poisoned(bytes));
        Self { bench, width: weight.len(), weight: weight_at, sums: sums_at, vectors }
    }

    fn run(&self, rows: &[PooledRow], residual: &[f32]) {
        let (bench, tokens) = (self.bench, residual.len() / self.width);
        let mut counts = [0i32; COUNTS];
        (counts[N_TOKENS], counts[N_POOLED]) = (tokens as i32, rows.len() as i32);
        let (counts, rows_at, residual) = (bench.put(&counts), bench.put(rows), bench.put(residual));
        let scales = bench.poisoned(4 * (tokens + BEYOND) as u64);
        let args = PoolArgs {
            counts: counts.at(),
            rows: rows_at.at(),
            residual: residual.at(),
            weight: self.weight.at(),
            epsilon: EPSILON,
            scales: scales.at(),
            sums: self.sums.at(),
            vectors: self.vectors.at(),
            hidden: self.width,
        };
        let grid = (tokens + BEYOND, rows.len() + BEYOND);
        // SAFETY: arrays of these shapes, which live until they are read. The grids are larger than the counts.
        unsafe { bench.kernels.pool(bench.launcher(), grid, args) }.unwrap();
        let scales: Vec<f32> = bench.get(&scales, tokens + BEYOND);
        assert!(scales[tokens..].iter().all(|x| x.is_nan()), "a token beyond the count was written");
    }
}

#[test]
fn states_are_normed_and_added_up() {
    let bench = Bench::new(64, KvDtype::Bf16);
    for width in [64, 576, 640, 4096] {
        check(&bench, width);
    }
}

/// Row i is in slot i. Every second one goes on from what its slot keeps, every third one keeps its sum there; the others become
/// vectors, in order. All that no row may read is NaN.
fn check(bench: &Bench, width: usize) {
    let weight = halves(width, 1);
    let goes_on = |row: usize| row % 2 == 1;
    let tokens = LENGTHS.iter().map(|len| len + GAP).sum::<usize>();
    let (mut residual, mut before) = (vec![f32::NAN; tokens * width], vec![f32::NAN; LENGTHS.len() * width]);
    let (mut rows, mut expected, mut start, mut vectors) = (Vec::new(), Vec::new(), GAP, 0);
    for (slot, len) in LENGTHS.into_iter().enumerate() {
        let states = numbers(len * width, 2 + slot as u64);
        residual[start * width..][..states.len()].copy_from_slice(&states);
        let kept = &mut before[slot * width..][..width];
        if goes_on(slot) {
            kept.copy_from_slice(&numbers(width, 50 + slot as u64));
        }
        let mut sum = vec![0f64; width];
        if goes_on(slot) {
            sum.iter_mut().zip(&*kept).for_each(|(sum, x)| *sum = f64::from(*x));
        }
        for state in states.chunks(width) {
            sum.iter_mut().zip(normed(state, &weight)).for_each(|(sum, x)| *sum += x);
        }
        let vector = if slot % 3 == 0 { -1 } else { vectors };
        vectors += i32::from(vector >= 0);
        let [start_at, len, slot] = [start, len, slot].map(|x| x as i32);
        rows.push(PooledRow { start: start_at, len, slot, goes_on: slot % 2, vector });
        expected.push(sum);
        start += len as usize + GAP;
    }
    let step = Step::new(bench, &weight, &before);
    step.run(&rows, &residual[..(start - GAP) * width]);
    let kept: Vec<f32> = bench.get(&step.sums, before.len());
    let found: Vec<f32> = bench.get(&step.vectors, before.len());
    for (row, expected) in rows.iter().zip(&expected) {
        let own = row.slot as usize * width..(row.slot as usize + 1) * width;
        let got = match row.vector {
            -1 => &kept[own],
            vector => {
                let (kept, before) = (&kept[own.clone()], &before[own]);
                let same = kept.iter().zip(before).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{row:?}: what its slot keeps has changed");
                &found[vector as usize * width..][..width]
            }
        };
        let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
        // Each addition rounds a sum that grows about as the root of its terms.
        let tolerance = |index: usize| 1e-6 * f64::from(row.len) + 1e-5 * expected[index].abs();
        close(&format!("pool {width}, {row:?}"), &got, expected, tolerance);
    }
    assert!(found[vectors as usize * width..].iter().all(|x| x.is_nan()), "a vector that nobody wants");
}

#[test]
fn sums_in_pieces_are_the_same_to_the_bit() {
    let bench = Bench::new(64, KvDtype::Bf16);
    let (width, len) = (576, 257);
    let (weight, residual) = (halves(width, 1), numbers(len * width, 2));
    let sum = |piece: usize| {
        let step = Step::new(&bench, &weight, &vec![f32::NAN; width]);
        for (index, states) in residual.chunks(piece * width).enumerate() {
            let tokens = states.len() / width;
            let ends = index * piece + tokens == len;
            // Behind a token of somebody else.
            let states = [&vec![f32::NAN; width][..], states].concat();
            let (goes_on, vector) = (i32::from(index > 0), if ends { 0 } else { -1 });
            step.run(&[PooledRow { start: 1, len: tokens as i32, slot: 0, goes_on, vector }], &states);
        }
        bench.get::<u32>(&step.vectors, width)
    };
    let whole = sum(len);
    assert!(whole.iter().all(|bits| f32::from_bits(*bits).is_finite()));
    for piece in [1, 7, 15, 16, 17, 64, 255, 256] {
        assert!(sum(piece) == whole, "pieces of {piece}");
    }
}
