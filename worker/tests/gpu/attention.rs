//! Attention over paged KV against a softmax in f64, split over chunks and whole.

use half::bf16;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{
    AttnItem, CHUNK_TOKENS, COUNTS, DecodeItem, MergeItem, N_DECODE, N_MERGE, N_SPLIT, N_TOKENS, N_WHOLE,
    RowMeta, SPLIT_ROWS,
};
use thalweg_worker::backend::cuda::kernels::{AttentionArgs, AttentionBlocks, PREFILL_ROWS, whole_tile_rows};

use crate::support::{Bench, KV_DTYPES, close, numbers, stored, wide};

/// One layer's work.
#[derive(Clone, Debug)]
struct Case {
    head_dim: usize,
    heads: (usize, usize),
    window: usize,
    /// Scores are that many times as far apart as they usually are.
    sharpness: f64,
    dtype: KvDtype,
    /// Context and new tokens of each row.
    rows: Vec<(usize, usize)>,
    few: Few,
    many: Many,
}

/// What rows of few queries go through.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Few {
    /// As the others.
    Whole,
    /// Chunks of 256 keys, merged.
    Split,
    /// Runs of so many keys.
    Decode(usize),
}

/// What the others go through.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Many {
    Whole,
    Prefill,
}

/// Everything that goes to the GPU but q, k and v.
#[derive(Default)]
struct Work {
    rows: Vec<RowMeta>,
    tables: Vec<i32>,
    split: Vec<AttnItem>,
    merge: Vec<MergeItem>,
    whole: Vec<AttnItem>,
    decode: Vec<DecodeItem>,
    partials: usize,
    blocks: usize,
}

const GROUP: usize = 1;

fn work(case: &Case) -> Work {
    let mut work = Work::default();
    let group = case.heads.0 / case.heads.1;
    let tile_rows =
        if case.many == Many::Prefill { PREFILL_ROWS } else { whole_tile_rows(case.head_dim).unwrap() };
    let tile = tile_rows / group;
    let mut start = 0;
    for (row, (context, len)) in case.rows.iter().copied().enumerate() {
        let row = row as i32;
        let from = |first: usize| if case.window == 0 { 0 } else { (first + 1).saturating_sub(case.window) };
        let chunks = |first: usize, last: usize| (from(first) / CHUNK_TOKENS, last / CHUNK_TOKENS + 1);
        let first_block = from(context) / 16;
        let count = (context + len).div_ceil(16) - first_block;
        work.rows.push(RowMeta {
            start: start as i32,
            len: len as i32,
            context: context as i32,
            slot: row,
            table_offset: [-1_000_000, work.tables.len() as i32],
            table_first: [-1_000_000, first_block as i32],
        });
        // Backwards with gaps, so that nothing hangs on their order.
        let base = work.blocks;
        work.tables.extend((0..count).rev().map(|i| (base + 2 * i + 1) as i32));
        work.blocks += 2 * count + 1;
        let is_few = len * group <= SPLIT_ROWS;
        if let Few::Decode(run) = case.few
            && is_few
        {
            let (begin, end) = (from(context) / 16 * 16, context + len);
            let (count, first) = ((end - begin).div_ceil(run), work.partials);
            work.decode.extend((0..count).map(|index| DecodeItem {
                row,
                q_start: 0,
                key_begin: (begin + index * run) as i32,
                key_end: (begin + (index + 1) * run).min(end) as i32,
                partial: if count == 1 { -1 } else { (first + index) as i32 },
                partial_first: first as i32,
                n_partials: count as i32,
                ticket: row,
            }));
            work.partials += if count == 1 { 0 } else { count };
        } else if case.few == Few::Split && is_few {
            let (begin, end) = chunks(context, context + len - 1);
            let item =
                |chunk: usize, partial: i32| AttnItem { row, q_start: 0, chunk: chunk as i32, partial };
            if end - begin == 1 {
                work.split.push(item(begin, -1));
            } else {
                let first = work.partials;
                work.split.extend((begin..end).map(|chunk| item(chunk, (first + chunk - begin) as i32)));
                let (partial_first, n_partials) = (first as i32, (end - begin) as i32);
                work.merge.push(MergeItem { row, q_start: 0, partial_first, n_partials });
                work.partials += end - begin;
            }
        } else {
            for q_start in (0..len).step_by(tile) {
                let last = (q_start + tile).min(len) - 1;
                let (begin, end) = chunks(context + q_start, context + last);
                work.whole.push(AttnItem {
                    row,
                    q_start: q_start as i32,
                    chunk: begin as i32,
                    partial: end as i32,
                });
            }
        }
        start += len;
    }
    work
}

/// Elements of a pool whose every block is NaN but for positions that rows have.
fn pool(case: &Case, work: &Work, seed: u64) -> Vec<u8> {
    let (kv_heads, each) = (case.heads.1, case.head_dim * case.dtype.bytes());
    let mut pool = vec![0xffu8; work.blocks.max(1) * kv_heads * 16 * each];
    for (index, (row, (context, len))) in work.rows.iter().zip(&case.rows).enumerate() {
        let first = row.table_first[GROUP] as usize * 16;
        for position in first..context + len {
            for head in 0..kv_heads {
                let seed = seed + (index as u64 * 1_000_003 + position as u64) * 64 + head as u64;
                let values = numbers(case.head_dim, seed);
                let at = place(case, work, row, position, head);
                for (out, value) in pool[at..][..each].chunks_mut(case.dtype.bytes()).zip(values) {
                    encode(case.dtype, value, out);
                }
            }
        }
    }
    pool
}

/// Byte offset of a position's head.
fn place(case: &Case, work: &Work, row: &RowMeta, position: usize, head: usize) -> usize {
    let logical = position / 16 - row.table_first[GROUP] as usize;
    let block = work.tables[row.table_offset[GROUP] as usize + logical] as usize;
    ((block * case.heads.1 + head) * 16 + position % 16) * case.head_dim * case.dtype.bytes()
}

/// Any bits near the value: what they stand for is read back.
fn encode(dtype: KvDtype, value: f32, out: &mut [u8]) {
    let sign = if value < 0.0 { 0x80 } else { 0 };
    let nearest = || {
        let small = (0..0x78u8).map(|byte| (f64::from(value.abs()) - stored(dtype, &[byte])).abs());
        small.enumerate().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0 as u8
    };
    match dtype {
        KvDtype::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        _ => out[0] = sign | nearest(),
    }
}

fn expected(case: &Case, work: &Work, qkv: &[u16], pools: &[Vec<u8>; 2]) -> Vec<f64> {
    let (q_heads, kv_heads) = case.heads;
    let (dim, bytes) = (case.head_dim, case.dtype.bytes());
    let stride = (q_heads + 2 * kv_heads) * dim;
    let scale = case.sharpness / (dim as f64).sqrt();
    let mut out = Vec::new();
    for (row, (context, len)) in work.rows.iter().zip(&case.rows) {
        for token in 0..*len {
            let position = context + token;
            let from = if case.window == 0 { 0 } else { (position + 1).saturating_sub(case.window) };
            for head in 0..q_heads {
                let q = &qkv[(row.start as usize + token) * stride + head * dim..][..dim];
                let read = |side: usize, position: usize| {
                    let at = place(case, work, row, position, head / (q_heads / kv_heads));
                    pools[side][at..][..dim * bytes].chunks(bytes).map(|b| stored(case.dtype, b))
                };
                let scores: Vec<f64> = (from..=position)
                    .map(|p| q.iter().zip(read(0, p)).map(|(q, k)| wide(*q) * k).sum::<f64>() * scale)
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut mixed = vec![0.0; dim];
                for (weight, position) in weights.iter().zip(from..) {
                    mixed.iter_mut().zip(read(1, position)).for_each(|(m, v)| *m += weight / sum * v);
                }
                out.extend(mixed);
            }
        }
    }
    out
}

fn run(case: &Case) -> (Vec<u16>, Vec<f64>) {
    let bench = Bench::new(case.head_dim, case.dtype);
    let work = work(case);
    let tokens: usize = case.rows.iter().map(|(_, len)| len).sum();
    let (q_heads, kv_heads) = case.heads;
    let stride = (q_heads + 2 * kv_heads) * case.head_dim;
    let mut qkv = vec![0x7fc0u16; tokens * stride];
    let queries = numbers(tokens * q_heads * case.head_dim, 77);
    for (to, from) in qkv.chunks_mut(stride).zip(queries.chunks(q_heads * case.head_dim)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(2.0 * from).to_bits());
    }
    let pools = [pool(case, &work, 1), pool(case, &work, 2)];
    let mut counts = [0i32; COUNTS];
    counts[N_TOKENS] = tokens as i32;
    counts[N_SPLIT + GROUP] = work.split.len() as i32;
    counts[N_MERGE + GROUP] = work.merge.len() as i32;
    counts[N_WHOLE + GROUP] = work.whole.len() as i32;
    counts[N_DECODE + GROUP] = work.decode.len() as i32;
    let (counts, rows, tables) = (bench.put(&counts), bench.put(&work.rows), bench.put(&work.tables));
    let (split, merge, whole) = (bench.put(&work.split), bench.put(&work.merge), bench.put(&work.whole));
    let decode = bench.put(&work.decode);
    let tickets = bench.put(&vec![0i32; case.rows.len() * kv_heads]);
    let (qkv_at, keys, values) = (bench.put(&qkv), bench.put(&pools[0]), bench.put(&pools[1]));
    let out_len = tokens * q_heads * case.head_dim;
    let out = bench.poisoned((out_len * 2) as u64);
    let partial_o = bench.poisoned((work.partials * kv_heads * SPLIT_ROWS * case.head_dim * 4) as u64);
    let partial_ml = bench.poisoned((work.partials * kv_heads * SPLIT_ROWS * 8) as u64);
    let args = AttentionArgs {
        counts: counts.at(),
        group: GROUP,
        rows: rows.at(),
        tables: tables.at(),
        split_items: split.at(),
        merge_items: merge.at(),
        whole_items: whole.at(),
        decode_items: decode.at(),
        tickets: tickets.at(),
        qkv: qkv_at.at(),
        tokens,
        keys: keys.at(),
        values: values.at(),
        out: out.at(),
        partial_o: partial_o.at(),
        partial_ml: partial_ml.at(),
        q_heads,
        kv_heads,
        scale: case.sharpness as f32 / (case.head_dim as f32).sqrt(),
        window: case.window,
        // Fewer blocks than items, and more.
        blocks: AttentionBlocks {
            split: 3,
            merge: 2,
            whole: if case.many == Many::Whole { 5 } else { 0 },
            decode: 4,
            prefill: if case.many == Many::Prefill { 5 } else { 0 },
        },
    };
    // SAFETY: arrays of these shapes, which live until they are read.
    unsafe { bench.kernels.attention(bench.launcher(), args) }.unwrap();
    let got: Vec<u16> = bench.get(&out, out_len);
    for array in [&partial_o, &partial_ml] {
        bench.get::<u8>(array, 0);
    }
    let left: Vec<i32> = bench.get(&tickets, case.rows.len() * kv_heads);
    assert!(left.iter().all(|ticket| *ticket == 0), "tickets are left at {left:?}");
    (got, expected(case, &work, &qkv, &pools))
}

fn check(case: &Case) {
    let (got, expected) = run(case);
    let got: Vec<f64> = got.into_iter().map(wide).collect();
    let what = format!(
        "attention {} {:?} window {} times {} {:?} {:?} {:?} {:?}",
        case.head_dim, case.heads, case.window, case.sharpness, case.dtype, case.few, case.many, case.rows
    );
    close(&what, &got, &expected, |index| expected[index].abs() / 100.0 + 0.01);
}

/// Around a block, a chunk and several.
const CONTEXTS: [usize; 9] = [0, 1, 15, 16, 255, 256, 257, 511, 700];

fn each_shape(mut f: impl FnMut(Case)) {
    for head_dim in [64, 128, 256] {
        for heads in [(4, 4), (3, 1), (8, 2), (16, 1)] {
            for window in [0, 1, 100, 300] {
                let rows = Vec::new();
                let (few, many, dtype) = (Few::Split, Many::Whole, KvDtype::Bf16);
                f(Case { head_dim, heads, window, sharpness: 1.0, dtype, rows, few, many });
            }
        }
    }
}

#[test]
fn single_tokens_split_over_chunks() {
    each_shape(|case| check(&Case { rows: CONTEXTS.map(|context| (context, 1)).into(), ..case }));
}

#[test]
fn a_few_tokens_split_over_chunks() {
    each_shape(|case| {
        let most = SPLIT_ROWS / (case.heads.0 / case.heads.1);
        let rows = [(0, most), (250, most), (256 - most, most), (600, most.div_ceil(2))];
        check(&Case { rows: rows.into(), ..case });
    });
}

#[test]
fn prompts_take_all_their_chunks() {
    each_shape(|case| {
        let rows = [(0, 1), (0, 17), (3, 63), (0, 65), (200, 130), (512, 33), (255, 2)];
        check(&Case { rows: rows.into(), few: Few::Whole, ..case });
    });
}

#[test]
fn rows_of_all_kinds_in_one_step() {
    each_shape(|case| check(&Case { rows: vec![(300, 1), (0, 200), (16, 1), (700, 40), (257, 2)], ..case }));
}

#[test]
fn every_stored_type() {
    for dtype in KV_DTYPES {
        for head_dim in [64, 128, 256] {
            for few in [Few::Split, Few::Whole] {
                let rows = vec![(300, 1), (0, 20), (255, 1), (520, 3)];
                let (heads, many) = ((6, 2), Many::Whole);
                check(&Case { head_dim, heads, window: 0, sharpness: 1.0, dtype, rows, few, many });
            }
        }
    }
}

/// A query's result must not hang on which way it took, on its tile or on its batch mates: to the bit.
#[test]
fn split_and_whole_agree_to_the_bit() {
    each_shape(|case| {
        for context in CONTEXTS {
            let alone = |few: Few| run(&Case { rows: vec![(context, 1)], few, ..case.clone() }).0;
            assert!(alone(Few::Split) == alone(Few::Whole), "{case:?} at {context}");
        }
    });
}

#[test]
fn single_tokens_in_runs_of_keys() {
    each_shape(|case| {
        for run in [128, 320, 4096] {
            check(&Case {
                rows: CONTEXTS.map(|context| (context, 1)).into(),
                few: Few::Decode(run),
                ..case.clone()
            });
        }
    });
}

#[test]
fn a_few_tokens_in_runs_of_keys() {
    each_shape(|case| {
        let most = SPLIT_ROWS / (case.heads.0 / case.heads.1);
        let rows = [(0, most), (250, most), (256 - most, most), (600, most.div_ceil(2)), (40, 100)];
        check(&Case { rows: rows.into(), few: Few::Decode(192), ..case });
    });
}

/// Only where the card has that kernel.
fn check_prefill(case: Case) {
    if !Bench::new(case.head_dim, case.dtype).kernels.has_prefill() {
        return println!("no prefill kernel for heads of {} on this card", case.head_dim);
    }
    check(&Case { many: Many::Prefill, ..case });
}

#[test]
fn prompts_on_hopper() {
    each_shape(|case| {
        let rows = [(0, 17), (3, 63), (0, 65), (200, 130), (512, 33), (255, 20), (0, 300), (700, 1)];
        check_prefill(Case { rows: rows.into(), few: Few::Decode(128), ..case });
    });
}

/// Everything goes through tiles: one token, whole tiles and tiles that end or begin inside of a block, of 128 keys or of a window.
#[test]
fn short_and_whole_tiles_on_hopper() {
    each_shape(|case| {
        let rows = [(0, 1), (15, 2), (1, 16), (0, 128), (128, 128), (127, 1), (128, 1), (384, 48), (5, 257)];
        check_prefill(Case { rows: rows.into(), few: Few::Whole, ..case });
    });
}

/// Largest scores that keep growing from tile to tile, in either direction: sums are multiplied again and again.
#[test]
fn sharp_prompts_on_hopper() {
    each_shape(|case| {
        let rows = [(0, 300), (600, 70), (1000, 33)];
        check_prefill(Case { rows: rows.into(), few: Few::Whole, sharpness: 12.0, ..case });
    });
}

/// Many tiles of keys, in a window whose edge wanders through them too.
#[test]
fn long_prompts_on_hopper() {
    for (head_dim, window) in [(64, 0), (64, 1000), (128, 0), (128, 1111)] {
        let (rows, few, dtype) = (vec![(2900, 140), (0, 700), (4095, 2)], Few::Whole, KvDtype::Bf16);
        let (heads, many, sharpness) = ((1, 1), Many::Prefill, 1.0);
        check_prefill(Case { head_dim, heads, window, sharpness, dtype, rows, few, many });
    }
}
