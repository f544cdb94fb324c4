//! Attention against softmax in f64, over ragged lengths, windows, groups and stored types; what nobody may read is NaN.

use super::super::config::CpuBackendConfig;
use super::super::isa::Isa;
use super::super::kv::KvCache;
use super::super::kv_dtype::KvDtype;
use super::super::slots::Slots;
use super::super::step::Limits;
use super::super::testing::{config, numbers, slot};
use super::*;
use crate::plan::{AdapterSlot, BlockId, BlockTable, Row, RowInput, SlotId, StepPlan, Want};
use crate::sampling::SamplingParams;

/// A sequence: tokens in the cache before the step, and in it.
type Lengths = (usize, usize);

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    dtype: KvDtype,
}

const BLOCKS: usize = 64;
/// Of values between -1 and 1.
const TOLERANCE: f64 = 2e-6;

/// Everything that a step's attention needs, with a cache of which only the written tokens are numbers.
struct World {
    case: Case,
    lengths: Vec<Lengths>,
    kv: KvCache,
    step: Step,
    qkv: Vec<f32>,
    /// Keys and values as stored, `[sequence][position][kv head]`.
    stored: Vec<Vec<(Vec<f32>, Vec<f32>)>>,
}

impl World {
    fn new(case: Case, lengths: &[Lengths]) -> Self {
        let model = config(case.heads, case.kv_heads, case.head_dim, case.window);
        let sizes = CpuBackendConfig {
            threads: 1,
            kv_blocks: [BLOCKS * lengths.len(); 2],
            kv_dtype: case.dtype,
            max_slots: lengths.len(),
            max_tokens_per_step: 4096,
        };
        let mut kv = KvCache::new(&model, &sizes).expect("memory");
        kv.fill(0xff);
        let step = load(&case, lengths);
        let width = case.kv_heads * case.head_dim;
        let writer = kv.writer(1);
        let mut stored = Vec::new();
        for (sequence, (context, len)) in lengths.iter().enumerate() {
            let of =
                |position: usize, salt: u64| numbers(width, (sequence * 10_000 + position) as u64 * 2 + salt);
            let pairs: Vec<_> =
                (0..context + len).map(|position| (of(position, 1), of(position, 2))).collect();
            for (position, (keys, values)) in pairs.iter().enumerate() {
                if position / 16 < first_block(&case, *context) {
                    continue;
                }
                let block = step.block(sequence, 1, position / 16);
                // SAFETY: nobody else uses the cache.
                unsafe { writer.write(block, position % 16, keys, values) };
            }
            stored.push(pairs.iter().map(|(k, v)| (round(case.dtype, k), round(case.dtype, v))).collect());
        }
        let tokens = step.tokens.len();
        let qkv = numbers(tokens * (case.heads + 2 * case.kv_heads) * case.head_dim, 99);
        Self { case, lengths: lengths.to_vec(), kv, step, qkv, stored }
    }

    fn run(&self, pool: &Pool) -> Vec<f32> {
        let Case { heads, kv_heads, head_dim, window, .. } = self.case;
        let mut memory = Memory::new(pool.threads(), head_dim).expect("memory");
        let mut out = vec![f32::NAN; self.step.tokens.len() * heads * head_dim];
        let group = heads / kv_heads;
        let shape = Shape { kv_heads, group, head_dim, scale: 0.3, window, kv_group: 1 };
        let stride = (heads + 2 * kv_heads) * head_dim;
        let mut x = Activations { qkv: &self.qkv, stride, out: &mut out };
        attention(pool, shape, &self.step, self.kv.layer(1), &mut memory, &mut x);
        out
    }

    fn expected(&self) -> Vec<f64> {
        let Case { heads, kv_heads, head_dim, .. } = self.case;
        let stride = (heads + 2 * kv_heads) * head_dim;
        let mut out = Vec::new();
        for token in 0..self.step.tokens.len() {
            for head in 0..heads {
                let q = &self.qkv[token * stride + head * head_dim..][..head_dim];
                out.extend(self.reference(token, head / (heads / kv_heads), q));
            }
        }
        out
    }

    fn reference(&self, token: usize, kv_head: usize, q: &[f32]) -> Vec<f64> {
        let position = self.step.positions[token] as usize;
        let from = self.case.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let head_dim = self.case.head_dim;
        let part = kv_head * head_dim..(kv_head + 1) * head_dim;
        let seen = &self.stored[self.step.token_rows[token] as usize][from..=position];
        let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
        let scores: Vec<f64> = seen.iter().map(|(k, _)| 0.3 * dot(&k[part.clone()])).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let value = |d: usize| {
            let sum: f64 = weights.iter().zip(seen).map(|(w, (_, v))| w * f64::from(v[part.start + d])).sum();
            sum / total
        };
        (0..head_dim).map(value).collect()
    }
}

/// First block that layers with this window still hold.
fn first_block(case: &Case, context: usize) -> usize {
    case.window.map_or(0, |window| (context + 1).saturating_sub(window) / 16)
}

fn load(case: &Case, lengths: &[Lengths]) -> Step {
    let mut slots = Slots::new(lengths.len());
    let mut plan = StepPlan::default();
    for (index, (context, len)) in lengths.iter().enumerate() {
        slots.init(&slot(index as u32, SamplingParams::greedy())).expect("a slot");
        let first = first_block(case, *context);
        let physical = (first..BLOCKS).map(|block| BlockId((block * lengths.len() + index) as u32)).collect();
        let table = BlockTable { first: first as u32, blocks: physical };
        plan.rows.push(Row {
            slot: SlotId(index as u32),
            adapter: AdapterSlot::BASE,
            input: RowInput::Tokens(vec![0; *len]),
            context: *context as u32,
            tables: [BlockTable::default(), table],
            want: Want::Nothing,
        });
    }
    let limits = Limits {
        max_tokens: 4096,
        vocab: 100,
        blocks: [0, BLOCKS * lengths.len()],
        windows: [None, case.window],
        used: [false, true],
        adapters: 0,
    };
    let mut step = Step::with_capacity(8, 4096);
    step.load(&plan, &slots, &limits).expect("a valid plan");
    step
}

/// What comes back from storage: written and read by the portable lanes.
fn round(dtype: KvDtype, x: &[f32]) -> Vec<f32> {
    let round = |x: &f32| match dtype {
        KvDtype::F32 => *x,
        KvDtype::Bf16 => half::bf16::from_f32(*x).to_f32(),
        KvDtype::Fp8E4m3 => super::super::float8::to_f32::<3, 7>(super::super::float8::from_f32::<3, 7>(*x)),
        KvDtype::Fp8E5m2 => {
            super::super::float8::to_f32::<2, 15>(super::super::float8::from_f32::<2, 15>(*x))
        }
    };
    x.iter().map(round).collect()
}

fn check(case: Case, lengths: &[Lengths]) {
    let world = World::new(case, lengths);
    let expected = world.expected();
    let alone = world.run(&Pool::with_isa(1, Isa::Scalar));
    for (index, (got, expected)) in alone.iter().zip(&expected).enumerate() {
        assert!((f64::from(*got) - expected).abs() < TOLERANCE, "{case:?} {index}: {got} for {expected}");
    }
    for isa in Isa::available() {
        for threads in [1, 2, 3] {
            let got = world.run(&Pool::with_isa(threads, isa));
            let same = got.iter().zip(&alone).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{case:?} {:?}: {isa:?} with {threads} threads differs", world.lengths);
        }
    }
}

const PLAIN: Case = Case { heads: 6, kv_heads: 2, head_dim: 64, window: None, dtype: KvDtype::F32 };

#[test]
fn ragged_lengths() {
    for lengths in [
        &[(0, 1)][..],
        &[(0, 15), (0, 16), (0, 17)],
        &[(14, 1), (15, 1), (16, 1), (17, 3)],
        &[(254, 1), (255, 1), (256, 1), (257, 1)],
        &[(0, 300)],
        &[(250, 20), (0, 1), (511, 2), (600, 1)],
    ] {
        check(PLAIN, lengths);
    }
}

#[test]
fn windows() {
    for window in [1, 8, 16, 100, 256, 300] {
        let case = Case { window: Some(window), ..PLAIN };
        check(case, &[(0, 40), (257, 1), (500, 30), (900, 1)]);
    }
}

#[test]
fn groups_and_heads() {
    for (heads, kv_heads, head_dim) in
        [(1, 1, 64), (3, 1, 128), (8, 2, 256), (16, 1, 64), (7, 7, 16), (5, 1, 80)]
    {
        check(Case { heads, kv_heads, head_dim, ..PLAIN }, &[(0, 70), (300, 1)]);
    }
}

#[test]
fn stored_types() {
    for dtype in KvDtype::ALL {
        check(Case { dtype, ..PLAIN }, &[(0, 33), (270, 2)]);
    }
}

/// One token at a time, in pieces, and all at once.
#[test]
fn a_rows_bits_do_not_depend_on_its_chunking() {
    for window in [None, Some(100)] {
        let case = Case { window, ..PLAIN };
        let whole = World::new(case, &[(0, 530)]);
        let pool = Pool::new(2);
        let expected = whole.run(&pool);
        let (row, q_row) = (case.heads * case.head_dim, (case.heads + 2 * case.kv_heads) * case.head_dim);
        for piece in [1, 7, 100] {
            for start in (0..530).step_by(if piece == 1 { 37 } else { piece }) {
                let len = piece.min(530 - start);
                let mut part = World::new(case, &[(start, len)]);
                part.qkv.copy_from_slice(&whole.qkv[start * q_row..][..len * q_row]);
                let got = part.run(&pool);
                let same = got.iter().zip(&expected[start * row..]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "window {window:?}, tokens {start}..{}", start + len);
            }
        }
    }
}
