//! Shapes of steps: what grids and products are sized by, and which of them are recorded.

use super::layout::{Capacities, decode_max, shared_max, split_max};
use super::prefix::ROWS_MIN;
use super::step::Step;
use crate::plan::KV_GROUPS;

/// Tokens of the largest recorded step that is no pure decode.
const MIXED_TOKENS_MAX: usize = 512;
/// Sequences up to which each batch of a decode step has its own graph.
const EXACT_MAX: usize = 8;

/// Sizes of one step's launches. Counts on the GPU say how much of them is real.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepShape {
    /// Room of each array, where tables and new slots are as many as the step has.
    pub(super) capacities: Capacities,
    /// Passes over logit rows.
    pub(super) passes: usize,
}

/// Shapes that are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Bucket {
    /// Every row has one token.
    Decode(usize),
    /// The same, where some of the rows begin with the same blocks.
    Shared(usize),
    /// Any rows of so many tokens together.
    Mixed(usize),
}

/// What buckets are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BucketLimits {
    pub(super) max_slots: usize,
    pub(super) max_tokens: usize,
    pub(super) max_model_len: usize,
    pub(super) partials: usize,
    pub(super) rows_per_pass: usize,
    /// Which KV groups have layers.
    pub(super) used: [bool; KV_GROUPS],
    /// Runs that decoding rows are cut into beyond one each; None: they are split over chunks.
    pub(super) runs: Option<usize>,
    /// Items of keys that rows of a group share; None: they never do.
    pub(super) shared: [Option<usize>; KV_GROUPS],
}

impl StepShape {
    /// Exactly a step's.
    pub(super) fn of(step: &Step, rows_per_pass: usize) -> Self {
        let items = step.items.each_ref();
        let capacities = Capacities {
            tokens: step.token_src.len(),
            rows: step.rows.len(),
            logit_rows: step.logit_rows.len(),
            pooled: step.pooled.len(),
            split: items.map(|items| items.split.len()),
            decode: items.map(|items| items.decode.len()),
            shared: items.map(|items| items.shared.len()),
            merge: items.map(|items| items.merge.len()),
            whole: items.map(|items| items.whole.len()),
            ..Capacities::default()
        };
        Self { capacities, passes: capacities.logit_rows.div_ceil(rows_per_pass) }
    }

    /// Whether a step of this shape can run as one of the other.
    pub(super) fn fits(&self, room: &Self) -> bool {
        let (own, room) = (&self.capacities, &room.capacities);
        let below =
            |own: [usize; KV_GROUPS], room: [usize; KV_GROUPS]| own.iter().zip(room).all(|(a, b)| *a <= b);
        self.passes <= 1
            && own.tokens <= room.tokens
            && own.rows <= room.rows
            && own.logit_rows <= room.logit_rows
            && own.pooled <= room.pooled
            && below(own.split, room.split)
            && below(own.decode, room.decode)
            && below(own.shared, room.shared)
            && below(own.merge, room.merge)
            && below(own.whole, room.whole)
    }
}

impl Bucket {
    /// All of them, so that the first that fits is the smallest: decode before shared before mixed.
    pub(super) fn all(limits: &BucketLimits) -> Vec<Self> {
        let most = limits.max_slots.min(limits.max_tokens).min(limits.rows_per_pass);
        let decode = sizes(most).into_iter().map(Self::Decode);
        let can_share = limits.shared.iter().any(Option::is_some);
        let shared = sizes(most).into_iter().filter(|size| can_share && *size >= ROWS_MIN).map(Self::Shared);
        let mixed =
            sizes(MIXED_TOKENS_MAX.min(limits.max_tokens)).into_iter().filter(|size| *size > EXACT_MAX);
        decode.chain(shared).chain(mixed.map(Self::Mixed)).collect()
    }

    /// Its shape.
    pub(super) fn shape(self, limits: &BucketLimits) -> StepShape {
        let tokens = match self {
            Self::Decode(tokens) | Self::Shared(tokens) | Self::Mixed(tokens) => tokens,
        };
        let rows = tokens.min(limits.max_slots);
        let split = split_max(rows, limits.partials, limits.max_model_len);
        let of_used = |count: usize| limits.used.map(|used| if used { count } else { 0 });
        let capacities = Capacities {
            tokens,
            rows,
            logit_rows: rows.min(limits.rows_per_pass),
            split: of_used(limits.runs.map_or(split, |_| 0)),
            decode: of_used(limits.runs.map_or(0, |runs| decode_max(rows, runs))),
            shared: match self {
                Self::Decode(_) => [0; KV_GROUPS],
                Self::Shared(_) | Self::Mixed(_) => {
                    limits.shared.map(|most| most.map_or(0, |most| shared_max(rows, most)))
                }
            },
            merge: of_used(limits.runs.map_or(rows.min(limits.partials), |_| 0)),
            whole: match self {
                Self::Decode(_) | Self::Shared(_) => [0; KV_GROUPS],
                Self::Mixed(_) => of_used(tokens),
            },
            ..Capacities::default()
        };
        StepShape { capacities, passes: 1 }
    }
}

/// Exact up to eight, then in steps of at most a half.
fn sizes(most: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> = (1..=EXACT_MAX.min(most)).collect();
    let mut size = EXACT_MAX;
    while size < most {
        // 12, 16, 24, 32, 48, 64 and so on.
        size = if size.is_power_of_two() { size + size / 2 } else { (size / 3) * 4 };
        sizes.push(size.min(most));
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_rise_to_the_most() {
        assert_eq!(sizes(3), [1, 2, 3]);
        assert_eq!(sizes(20), [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20]);
        assert_eq!(sizes(512)[8..], [12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]);
    }

    #[test]
    fn a_step_takes_the_smallest_bucket_that_holds_it() {
        let limits = |shared: Option<usize>| BucketLimits {
            max_slots: 64,
            max_tokens: 1024,
            max_model_len: 4096,
            partials: 100,
            rows_per_pass: 256,
            used: [true, false],
            runs: Some(33),
            shared: [shared, None],
        };
        let check =
            |tokens: usize, (shared, whole): (usize, usize), logit_rows: usize, expected: Option<Bucket>| {
                let capacities = Capacities {
                    tokens,
                    rows: tokens.min(60),
                    logit_rows,
                    decode: [tokens.min(60), 0],
                    shared: [shared, 0],
                    whole: [whole, 0],
                    ..Capacities::default()
                };
                let own = StepShape { capacities, passes: 1 };
                let limits = limits(Some(16));
                let found = Bucket::all(&limits).into_iter().find(|bucket| own.fits(&bucket.shape(&limits)));
                assert_eq!(found, expected, "{tokens} {shared} {whole} {logit_rows}");
            };
        check(1, (0, 0), 1, Some(Bucket::Decode(1)));
        check(9, (0, 0), 9, Some(Bucket::Decode(12)));
        check(9, (0, 1), 1, Some(Bucket::Mixed(12)));
        check(8, (16, 0), 8, Some(Bucket::Shared(8)));
        check(9, (16, 0), 9, Some(Bucket::Shared(12)));
        check(9, (16, 1), 9, Some(Bucket::Mixed(12)));
        check(500, (2, 8), 60, Some(Bucket::Mixed(512)));
        check(500, (0, 8), 65, None);
        check(513, (0, 8), 1, None);
        // Hidden states are pooled outside of recorded steps.
        let pooled = Capacities { tokens: 9, rows: 1, pooled: 1, whole: [1, 0], ..Capacities::default() };
        let (own, limits_of) = (StepShape { capacities: pooled, passes: 0 }, limits(None));
        assert!(Bucket::all(&limits_of).into_iter().all(|bucket| !own.fits(&bucket.shape(&limits_of))));
        // Where rows never share, no graph is there for it.
        let sharing = |limits: &BucketLimits| {
            let all = Bucket::all(limits).into_iter();
            all.filter(|bucket| bucket.shape(limits).capacities.shared != [0; KV_GROUPS]).count()
        };
        // From 8 to 64 rows seven of decoding rows, from 12 to 512 tokens twelve of others.
        assert_eq!((sharing(&limits(Some(16))), sharing(&limits(None))), (7 + 12, 0));
    }
}
