//! Keys that decoding rows share: single kernels against a softmax in f64, then whole models against steps in which every row reads
//! its keys itself.

use std::sync::Arc;

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::{DecodeItem, SharedItem};
use thalweg_worker::backend::cuda::kernels::PREFILL_ROWS;
use thalweg_worker::backend::cuda::{CudaBackend, CudaBackendConfig, CudaModel};
use thalweg_worker::plan::{Logprobs, Row, RowInput, Want};
use thalweg_worker::runner::DeviceRunner;
use thalweg_worker::sampling::SamplingParams;

use crate::models::{config, ids, load, row, run, runner, start, tiny};
use crate::paged::{Case, Few, GROUP, Many, Work, check_work, work};
use crate::support::Bench;

/// Rows that share keys, among the rows of a step.
struct Prefix {
    first: usize,
    rows: usize,
    keys: usize,
    pieces: usize,
}

const TILE_KEYS: usize = 128;

/// Lengths of what rows have behind the shared keys, from 1 to 200.
fn own(index: usize) -> usize {
    [1, 200, 16, 17, 77, 128, 129, 2, 150][index % 9]
}

/// A prefix's rows have the blocks of the first one, and their runs begin behind it.
fn share(case: &Case, work: &mut Work, prefix: &Prefix, run: usize) {
    let members = prefix.first..prefix.first + prefix.rows;
    let tables = members.clone().map(|row| work.rows[row].table_offset[GROUP] as usize);
    let tables: Vec<usize> = tables.collect();
    for table in &tables[1..] {
        work.tables.copy_within(tables[0]..tables[0] + prefix.keys / 16, *table);
    }
    let runs_of = |row: usize| (case.rows[row].0 + 1 - prefix.keys).div_ceil(run);
    let most = members.clone().map(runs_of).max().unwrap();
    let stride = prefix.pieces + if most > 1 { most } else { 0 };
    work.decode.retain(|item| !members.contains(&(item.row as usize)));
    for (index, row) in members.enumerate() {
        let (count, first, end) = (runs_of(row), work.partials + index * stride, case.rows[row].0 + 1);
        work.decode.extend((0..count).map(|index| DecodeItem {
            row: row as i32,
            key_begin: (prefix.keys + index * run) as i32,
            key_end: (prefix.keys + (index + 1) * run).min(end) as i32,
            partial: if count == 1 { -1 } else { (first + prefix.pieces + index) as i32 },
            partial_first: first as i32,
            n_partials: (prefix.pieces + count) as i32,
            n_runs: count as i32,
            ..DecodeItem::default()
        }));
    }
    let tile = PREFILL_ROWS / (case.heads.0 / case.heads.1);
    let key = |piece: usize| (piece * (prefix.keys / TILE_KEYS) / prefix.pieces * TILE_KEYS) as i32;
    for index in (0..prefix.rows).step_by(tile) {
        work.shared.extend((0..prefix.pieces).map(|piece| SharedItem {
            row: (prefix.first + index) as i32,
            n_rows: tile.min(prefix.rows - index) as i32,
            key_begin: key(piece),
            key_end: key(piece + 1),
            partial: (work.partials + index * stride + piece) as i32,
            stride: stride as i32,
        }));
    }
    work.partials += prefix.rows * stride;
}

/// Rows alone, then rows of each prefix with `alone` of others behind them, then prompts.
fn check(
    case: &Case,
    prefixes: &[(usize, usize, usize)],
    alone: usize,
    prompts: &[(usize, usize)],
    run: usize,
) {
    let mut rows: Vec<(usize, usize)> = (0..alone).map(|index| (own(index) + 255, 1)).collect();
    let mut placed = Vec::new();
    for (count, keys, pieces) in prefixes.iter().copied() {
        placed.push(Prefix { first: rows.len(), rows: count, keys, pieces });
        rows.extend((0..count).map(|index| (keys + own(index) - 1, 1)));
        rows.extend((0..alone).map(|index| (own(index + count) - 1, 1)));
    }
    rows.extend(prompts);
    let case = Case { rows, few: Few::Decode(run), ..case.clone() };
    let mut work = work(&case);
    placed.iter().for_each(|prefix| share(&case, &mut work, prefix, run));
    check_work(&case, &work);
}

/// Every shape that the card has these kernels for.
fn each_shape(f: impl Fn(&Case)) {
    for head_dim in [64, 128] {
        if !Bench::new(head_dim, KvDtype::Bf16).kernels.has_prefill() {
            println!("no kernel for shared keys of heads of {head_dim} on this card");
            continue;
        }
        for heads in [(4, 4), (3, 1), (8, 2), (16, 1)] {
            let (few, many, dtype, rows) = (Few::Whole, Many::Prefill, KvDtype::Bf16, Vec::new());
            f(&Case { head_dim, heads, window: 0, sharpness: 1.0, dtype, rows, few, many });
        }
    }
}

#[test]
fn rows_share_whole_tiles() {
    each_shape(|case| {
        for (rows, keys, pieces) in
            [(8, 256, 1), (8, 2048, 8), (9, 384, 2), (33, 2048, 5), (33, 256, 2), (64, 256, 1), (64, 384, 1)]
        {
            check(case, &[(rows, keys, pieces)], 0, &[], 4096);
        }
    });
}

/// More units of work than multiprocessors, so that blocks take several, of pieces as short as can be.
#[test]
fn many_pieces_of_a_tile() {
    each_shape(|case| check(case, &[(64, 2048, 16), (40, 1024, 8)], 1, &[], 4096));
}

/// Rows' own keys in several runs, which meet each other and what was shared.
#[test]
fn own_keys_in_runs() {
    each_shape(|case| {
        check(case, &[(9, 384, 1)], 0, &[], 128);
        check(case, &[(33, 2048, 9)], 3, &[], 64);
    });
}

#[test]
fn two_prefixes_beside_rows_alone_and_prompts() {
    each_shape(|case| {
        check(case, &[(9, 384, 3), (33, 256, 1)], 2, &[(0, 300), (700, 40)], 128);
        check(case, &[(8, 2048, 4), (12, 256, 2)], 5, &[(130, 65)], 4096);
    });
}

/// Largest scores far apart, in shared and own keys alike: either may outweigh the other.
#[test]
fn sharp_scores_meet() {
    each_shape(|case| check(&Case { sharpness: 12.0, ..case.clone() }, &[(33, 1024, 4)], 2, &[], 128));
}

const SLOTS: usize = 24;
const SHARED_KEYS: usize = 512;

fn sharing(slot: usize, tokens: Vec<u32>, context: usize) -> Row {
    let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: None };
    let (mut own, first) =
        (row(slot, RowInput::Tokens(tokens), context, want), row(0, RowInput::LastSampled, 0, want));
    let blocks = SHARED_KEYS / 16;
    own.tables.iter_mut().zip(&first.tables).for_each(|(own, first)| {
        Arc::make_mut(&mut own.blocks)[..blocks].copy_from_slice(&first.blocks[..blocks]);
    });
    own
}

/// Logprobs of the last of some steps in which all slots but the last decode behind the same prompt; in every second step the last
/// slot's prompt goes on.
fn answers(runner: &mut DeviceRunner<CudaBackend>, expects_shared: bool) -> Vec<Logprobs> {
    let starts = (0..SLOTS).map(|slot| start(slot, SamplingParams::greedy())).collect();
    let prompt = vec![row(0, RowInput::Tokens(ids(SHARED_KEYS, 9, 320)), 0, Want::Nothing)];
    run(runner, starts, prompt);
    let lens: Vec<usize> = (0..SLOTS - 1).map(|slot| 1 + slot * 37 % 200).collect();
    for (slot, len) in lens.iter().enumerate() {
        run(runner, Vec::new(), vec![sharing(slot, ids(*len, slot as u32, 320), SHARED_KEYS)]);
    }
    let mut answers = Vec::new();
    for step in 0..6 {
        let decoding = lens.iter().enumerate();
        let decoding =
            decoding.map(|(slot, len)| sharing(slot, vec![7 * step as u32], SHARED_KEYS + len + step));
        let mut rows: Vec<Row> = decoding.collect();
        if step % 2 == 1 {
            let tokens = RowInput::Tokens(ids(30, step as u32, 320));
            rows.insert(SLOTS / 2, row(SLOTS - 1, tokens, step / 2 * 30, Want::Nothing));
        }
        answers.extend(run(runner, Vec::new(), rows).into_iter().flat_map(|row| row.prompt));
        assert_eq!(runner.device().shared_items() > 0, expects_shared, "step {step}");
    }
    answers
}

fn close(what: &str, ours: &[Logprobs], theirs: &[Logprobs], tolerance: f32) {
    assert_eq!(ours.len(), 6 * (SLOTS - 1), "{what}");
    let worst = ours.iter().zip(theirs).map(|(ours, theirs)| (ours.logprob - theirs.logprob).abs());
    let worst = worst.fold(0f32, |worst, x| if x.is_nan() { f32::INFINITY } else { worst.max(x) });
    println!("{what}: logprobs within {worst:.4}");
    assert!(worst <= tolerance, "{what}: {worst}");
}

/// Recorded and launched one by one, overlapped and not, on a cache of NaN; against a backend whose rows never share.
#[test]
fn models_answer_as_if_each_row_read_its_keys() {
    let model: Arc<CudaModel> = load(&tiny("llama3"));
    if !Bench::new(64, KvDtype::Bf16).kernels.has_prefill() {
        return println!("no kernel for shared keys on this card");
    }
    let answers = |config: CudaBackendConfig| {
        let expects_shared = !config.deterministic;
        let mut runner = runner(&model, config);
        runner.device().fill_kv(0xff).expect("a fill");
        answers(&mut runner, expects_shared)
    };
    let theirs = answers(config(SLOTS));
    let ours = |graphs, overlapped| {
        answers(CudaBackendConfig { deterministic: false, graphs, overlapped, ..config(SLOTS) })
    };
    let eager = ours(false, false);
    close("one by one against rows alone", &eager, &theirs, 0.15);
    for (what, graphs, overlapped) in
        [("recorded", true, false), ("overlapped", false, true), ("recorded and overlapped", true, true)]
    {
        close(&format!("{what} against one by one"), &ours(graphs, overlapped), &eager, 0.02);
    }
}
