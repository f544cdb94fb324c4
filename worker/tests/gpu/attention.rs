//! Attention over paged KV against a softmax in f64, split over chunks and whole, in runs of keys, and of prompts.

use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::abi::SPLIT_ROWS;

use crate::paged::{Case, Few, Many, check_work, run, work};
use crate::support::{Bench, KV_DTYPES};

fn check(case: &Case) {
    check_work(case, &work(case));
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
            let alone = |few: Few| {
                let case = Case { rows: vec![(context, 1)], few, ..case.clone() };
                run(&case, &work(&case)).0
            };
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
