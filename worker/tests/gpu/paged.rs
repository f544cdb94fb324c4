//! One layer's attention over paged KV: what goes to the GPU, and a softmax in f64 to hold it against.

use half::bf16;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{
    AttnItem, CHUNK_TOKENS, COUNTS, DecodeItem, MergeItem, N_DECODE, N_MERGE, N_SHARED, N_SPLIT, N_TOKENS,
    N_WHOLE, RowMeta, SPLIT_ROWS, SharedItem,
};
use thalweg_worker::backend::cuda::kernels::{AttentionArgs, AttentionBlocks, PREFILL_ROWS, whole_tile_rows};

use crate::support::{Bench, close, numbers, stored, wide};

/// One layer's work.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) head_dim: usize,
    pub(crate) heads: (usize, usize),
    pub(crate) window: usize,
    /// Scores are that many times as far apart as they usually are.
    pub(crate) sharpness: f64,
    pub(crate) dtype: KvDtype,
    /// Context and new tokens of each row.
    pub(crate) rows: Vec<(usize, usize)>,
    pub(crate) few: Few,
    pub(crate) many: Many,
}

/// What rows of few queries go through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Few {
    /// As the others.
    Whole,
    /// Chunks of 256 keys, merged.
    Split,
    /// Runs of so many keys.
    Decode(usize),
}

/// What the others go through.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Many {
    Whole,
    Prefill,
}

/// Everything that goes to the GPU but q, k and v.
#[derive(Default)]
pub(crate) struct Work {
    pub(crate) rows: Vec<RowMeta>,
    pub(crate) tables: Vec<i32>,
    split: Vec<AttnItem>,
    merge: Vec<MergeItem>,
    whole: Vec<AttnItem>,
    pub(crate) decode: Vec<DecodeItem>,
    pub(crate) shared: Vec<SharedItem>,
    pub(crate) partials: usize,
    pub(crate) blocks: usize,
}

pub(crate) const GROUP: usize = 1;
const DECODE_BLOCKS: usize = 4;

/// Every row with blocks of its own.
pub(crate) fn work(case: &Case) -> Work {
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
                key_begin: (begin + index * run) as i32,
                key_end: (begin + (index + 1) * run).min(end) as i32,
                partial: if count == 1 { -1 } else { (first + index) as i32 },
                partial_first: first as i32,
                n_partials: count as i32,
                n_runs: count as i32,
                ..DecodeItem::default()
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

pub(crate) fn run(case: &Case, work: &Work) -> (Vec<u16>, Vec<f64>) {
    let bench = Bench::new(case.head_dim, case.dtype);
    let tokens: usize = case.rows.iter().map(|(_, len)| len).sum();
    let (q_heads, kv_heads) = case.heads;
    let stride = (q_heads + 2 * kv_heads) * case.head_dim;
    let mut qkv = vec![0x7fc0u16; tokens * stride];
    let queries = numbers(tokens * q_heads * case.head_dim, 77);
    for (to, from) in qkv.chunks_mut(stride).zip(queries.chunks(q_heads * case.head_dim)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = bf16::from_f32(2.0 * from).to_bits());
    }
    let pools = [pool(case, work, 1), pool(case, work, 2)];
    let mut counts = [0i32; COUNTS];
    counts[N_TOKENS] = tokens as i32;
    counts[N_SPLIT + GROUP] = work.split.len() as i32;
    counts[N_MERGE + GROUP] = work.merge.len() as i32;
    counts[N_WHOLE + GROUP] = work.whole.len() as i32;
    counts[N_DECODE + GROUP] = work.decode.len() as i32;
    counts[N_SHARED + GROUP] = work.shared.len() as i32;
    let (counts, rows, tables) = (bench.put(&counts), bench.put(&work.rows), bench.put(&work.tables));
    let (split, merge, whole) = (bench.put(&work.split), bench.put(&work.merge), bench.put(&work.whole));
    // Blocks read the item of their number before they know how many there are.
    let spare = std::iter::repeat_n(DecodeItem::default(), DECODE_BLOCKS);
    let mut decode: Vec<DecodeItem> = work.decode.iter().copied().chain(spare).collect();
    decode[..work.decode.len()].iter_mut().for_each(|item| item.follow(&work.rows[item.row as usize], GROUP));
    let (decode, shared) = (bench.put(&decode), bench.put(&work.shared));
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
        shared_items: shared.at(),
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
            decode: DECODE_BLOCKS,
            shared: work.shared.len().min(5),
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
    (got, expected(case, work, &qkv, &pools))
}

pub(crate) fn check_work(case: &Case, work: &Work) {
    let (got, expected) = run(case, work);
    let got: Vec<f64> = got.into_iter().map(wide).collect();
    let what = format!(
        "attention {} {:?} window {} times {} {:?} {:?} {:?} {:?}",
        case.head_dim, case.heads, case.window, case.sharpness, case.dtype, case.few, case.many, case.rows
    );
    close(&what, &got, &expected, |index| expected[index].abs() / 100.0 + 0.01);
}
