//! Where everything of a step stands in its buffer: one copy carries it to the GPU.

use super::abi::{
    AttnItem, BIAS_MAX, Bias, CHUNK_TOKENS, COUNTS, DecodeItem, END_IDS_MAX, LogitRow, MergeItem, PooledRow,
    RowMeta, SharedItem, SlotStart,
};
use super::config::CudaBackendConfig;
use crate::backend::cpu::BLOCK_TOKENS;
use crate::plan::KV_GROUPS;

/// Number of entries that each array has room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Capacities {
    pub(super) tokens: usize,
    pub(super) rows: usize,
    pub(super) logit_rows: usize,
    pub(super) pooled: usize,
    pub(super) split: [usize; KV_GROUPS],
    pub(super) decode: [usize; KV_GROUPS],
    pub(super) shared: [usize; KV_GROUPS],
    pub(super) merge: [usize; KV_GROUPS],
    pub(super) whole: [usize; KV_GROUPS],
    /// Last of what graphs read: its address does not hang on its size.
    pub(super) tables: usize,
    pub(super) starts: SlotCapacities,
}

/// The same of what new slots come with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotCapacities {
    pub(super) slots: usize,
    pub(super) tokens: usize,
    pub(super) bias: usize,
    pub(super) ends: usize,
}

/// Byte offsets of the arrays, and their end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) counts: u64,
    pub(super) token_src: u64,
    pub(super) positions: u64,
    pub(super) places: [u64; KV_GROUPS],
    pub(super) rows: u64,
    pub(super) logit_rows: u64,
    pub(super) pooled: u64,
    pub(super) split: [u64; KV_GROUPS],
    pub(super) decode: [u64; KV_GROUPS],
    pub(super) shared: [u64; KV_GROUPS],
    pub(super) merge: [u64; KV_GROUPS],
    pub(super) whole: [u64; KV_GROUPS],
    pub(super) tables: u64,
    pub(super) starts: u64,
    pub(super) start_tokens: u64,
    pub(super) start_bias: u64,
    pub(super) start_ends: u64,
    pub(super) bytes: u64,
}

impl Layout {
    /// Arrays one behind the other, each on a boundary of 16 bytes.
    pub(super) fn new(capacities: &Capacities) -> Self {
        let mut end = 0u64;
        let mut take = |count: usize, each: usize| {
            let begin = end;
            end += ((count * each) as u64).next_multiple_of(16);
            begin
        };
        let c = capacities;
        Self {
            counts: take(COUNTS, 4),
            token_src: take(c.tokens, 4),
            positions: take(c.tokens, 4),
            places: [0; KV_GROUPS].map(|_| take(c.tokens, 4)),
            rows: take(c.rows, size_of::<RowMeta>()),
            logit_rows: take(c.logit_rows, size_of::<LogitRow>()),
            pooled: take(c.pooled, size_of::<PooledRow>()),
            split: c.split.map(|count| take(count, size_of::<AttnItem>())),
            decode: c.decode.map(|count| take(count, size_of::<DecodeItem>())),
            shared: c.shared.map(|count| take(count, size_of::<SharedItem>())),
            merge: c.merge.map(|count| take(count, size_of::<MergeItem>())),
            whole: c.whole.map(|count| take(count, size_of::<AttnItem>())),
            tables: take(c.tables, 4),
            starts: take(c.starts.slots, size_of::<SlotStart>()),
            start_tokens: take(c.starts.tokens, 4),
            start_bias: take(c.starts.bias, size_of::<Bias>()),
            start_ends: take(c.starts.ends, 4),
            bytes: end,
        }
    }
}

/// Room for what new slots of one copy come with. Their tokens are sent in several where they are more.
pub(super) fn slot_capacities(config: &CudaBackendConfig) -> SlotCapacities {
    SlotCapacities {
        slots: config.max_slots,
        tokens: (2 * config.max_model_len).max(START_TOKENS),
        bias: config.max_slots * BIAS_MAX,
        ends: config.max_slots * END_IDS_MAX,
    }
}

/// Tokens of new slots that one copy carries at least.
const START_TOKENS: usize = 1 << 16;

/// Entries of all block tables of a step.
pub(super) fn tables_max(config: &CudaBackendConfig) -> usize {
    // A row's last block may be reserved ahead.
    config.max_slots * KV_GROUPS * (config.max_model_len.div_ceil(BLOCK_TOKENS) + 1)
}

/// Attention items of a group for so many tokens: each has a chunk without partial result, or several with one.
pub(super) fn split_max(tokens: usize, partials: usize, max_model_len: usize) -> usize {
    (tokens + partials).min(tokens * (max_model_len.div_ceil(CHUNK_TOKENS) + 1))
}

/// Runs of keys of a group's decoding rows.
pub(super) fn decode_max(rows: usize, partials: usize) -> usize {
    rows + partials
}

/// Items of keys that rows share, of which there are about `most` unless rows alone are more.
pub(super) fn shared_max(rows: usize, most: usize) -> usize {
    rows.max(most)
}

/// The largest step of all.
pub(super) fn largest(config: &CudaBackendConfig, partials: usize) -> Capacities {
    let tokens = config.max_tokens_per_step;
    Capacities {
        tokens,
        rows: config.max_slots,
        logit_rows: tokens,
        pooled: config.max_slots,
        split: [split_max(tokens, partials, config.max_model_len); KV_GROUPS],
        decode: [decode_max(config.max_slots, partials); KV_GROUPS],
        // Each has a partial result at least.
        shared: [shared_max(config.max_slots, partials); KV_GROUPS],
        merge: [tokens.min(partials); KV_GROUPS],
        whole: [tokens; KV_GROUPS],
        tables: tables_max(config),
        starts: slot_capacities(config),
    }
}

/// Bytes of the largest step, whatever the model.
pub(super) fn step_bytes(config: &CudaBackendConfig) -> usize {
    // As many partial results as there ever are.
    Layout::new(&largest(config, 8192)).bytes as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_aligned_and_apart() {
        let starts = SlotCapacities { slots: 1, tokens: 5, bias: 1, ends: 3 };
        let layout = Layout::new(&Capacities {
            tokens: 3,
            rows: 1,
            logit_rows: 1,
            pooled: 2,
            split: [2, 0],
            decode: [0, 0],
            shared: [1, 0],
            merge: [1, 0],
            whole: [1, 1],
            tables: 7,
            starts,
        });
        assert_eq!((layout.counts, layout.token_src, layout.positions), (0, 64, 80));
        assert_eq!((layout.places, layout.rows, layout.logit_rows), ([96, 112], 128, 160));
        assert_eq!((layout.pooled, layout.split, layout.decode), (192, [240, 272], [272, 272]));
        assert_eq!((layout.shared, layout.merge, layout.whole), ([272, 304], [304, 320], [320, 336]));
        assert_eq!((layout.tables, layout.starts, layout.start_tokens), (352, 384, 480));
        assert_eq!((layout.start_bias, layout.start_ends, layout.bytes), (512, 528, 544));
    }

    #[test]
    fn what_graphs_read_does_not_move() {
        let small =
            Capacities { tokens: 8, rows: 8, logit_rows: 8, split: [100, 0], ..Capacities::default() };
        let large =
            Capacities { tables: 10_000, starts: SlotCapacities { slots: 3, ..Default::default() }, ..small };
        let (small, large) = (Layout::new(&small), Layout::new(&large));
        assert_eq!((small.split, small.whole, small.tables), (large.split, large.whole, large.tables));
    }
}
