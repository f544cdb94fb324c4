//! Attention's work of one step in one KV group, divided for the GPU.

use std::cmp::Reverse;

use super::abi::{AttnItem, CHUNK_TOKENS, DecodeItem, MergeItem, SPLIT_ROWS};
use super::step::Limits;
use crate::backend::cpu::BLOCK_TOKENS;

/// Items by the kernel that takes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Items {
    pub(super) split: Vec<AttnItem>,
    pub(super) merge: Vec<MergeItem>,
    pub(super) whole: Vec<AttnItem>,
    pub(super) decode: Vec<DecodeItem>,
    partials: usize,
    /// Rows that are to be decoded, and the keys that they see.
    decoding: Vec<(usize, std::ops::Range<usize>)>,
}

/// Keys of the shortest run that is worth its partial result.
const RUN_KEYS_MIN: usize = 128;
/// Runs are multiples of this, but for a row's last.
const RUN_KEYS: usize = 64;

impl Items {
    pub(super) fn clear(&mut self) {
        self.split.clear();
        self.merge.clear();
        self.whole.clear();
        self.decode.clear();
        self.decoding.clear();
        self.partials = 0;
    }

    /// Work of one row: a few query rows are spread over their keys, many take all of them in order.
    pub(super) fn push(
        &mut self,
        row: usize,
        (context, len): (usize, usize),
        window: Option<usize>,
        limits: &Limits,
    ) {
        let seen_from = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
        // Of queries at these positions of the sequence.
        let chunks = |first: usize, last: usize| (seen_from(first) / CHUNK_TOKENS, last / CHUNK_TOKENS + 1);
        if len * limits.gqa_group <= SPLIT_ROWS {
            if limits.ways.runs.is_some() {
                return self.decoding.push((row, seen_from(context)..context + len));
            }
            let (begin, end) = chunks(context, context + len - 1);
            let partials = if end - begin == 1 { 0 } else { end - begin };
            if self.partials + partials <= limits.partials {
                return self.push_split(row, (begin, end), partials);
            }
        }
        let tile = limits.ways.whole_rows / limits.gqa_group;
        for q_start in (0..len).step_by(tile) {
            let last = (q_start + tile).min(len) - 1;
            let (begin, end) = chunks(context + q_start, context + last);
            self.whole.push(AttnItem {
                row: row as i32,
                q_start: q_start as i32,
                chunk: begin as i32,
                partial: end as i32,
            });
        }
    }

    /// What can only be divided once all rows are known.
    pub(super) fn finish(&mut self, limits: &Limits) {
        if limits.ways.prefill {
            // Tiles that see the most go first, so that none is left over at the end; among those of about the same length, the tiles
            // of a row stay together, so that the GPU's cache has the keys and values which they share.
            self.whole.sort_by_key(|item| {
                let chunks = (item.partial - item.chunk) as u32;
                (Reverse(chunks.next_power_of_two()), item.row, Reverse(item.q_start))
            });
        }
        let Some(runs) = limits.ways.runs.filter(|_| !self.decoding.is_empty()) else { return };
        let keys: usize = self.decoding.iter().map(|(_, keys)| keys.len()).sum();
        let mut run = keys.div_ceil(runs.max(1)).next_multiple_of(RUN_KEYS).max(RUN_KEYS_MIN);
        // Rows that are few enough for it are done in one round of blocks: a short one behind it would cost nearly another.
        let rows = self.decoding.len();
        let most = if rows <= runs { runs } else { runs + rows };
        while self.runs_of(run, 1) > most {
            run += (run / 8).next_multiple_of(RUN_KEYS);
        }
        while self.runs_of(run, 2) > limits.partials {
            run *= 2;
        }
        let decoding = std::mem::take(&mut self.decoding);
        decoding.iter().for_each(|(row, keys)| self.push_runs(*row, keys, run));
        self.decoding = decoding;
    }

    /// Runs of this length, of rows that have at least so many.
    fn runs_of(&self, run: usize, least: usize) -> usize {
        let runs = self.decoding.iter().map(|(_, keys)| aligned(keys).len().div_ceil(run));
        runs.filter(|runs| *runs >= least).sum()
    }

    fn push_runs(&mut self, row: usize, keys: &std::ops::Range<usize>, run: usize) {
        let keys = aligned(keys);
        let count = keys.len().div_ceil(run);
        let first = self.partials;
        for index in 0..count {
            let begin = keys.start + index * run;
            self.decode.push(DecodeItem {
                row: row as i32,
                q_start: 0,
                key_begin: begin as i32,
                key_end: (begin + run).min(keys.end) as i32,
                partial: if count == 1 { -1 } else { (first + index) as i32 },
                partial_first: first as i32,
                n_partials: count as i32,
                ticket: row as i32,
            });
        }
        self.partials += if count == 1 { 0 } else { count };
    }

    fn push_split(&mut self, row: usize, (begin, end): (usize, usize), partials: usize) {
        let first = self.partials;
        let item = |chunk: usize, partial: i32| AttnItem {
            row: row as i32,
            q_start: 0,
            chunk: chunk as i32,
            partial,
        };
        if partials == 0 {
            return self.split.push(item(begin, -1));
        }
        self.split.extend((begin..end).map(|chunk| item(chunk, (first + chunk - begin) as i32)));
        self.merge.push(MergeItem {
            row: row as i32,
            q_start: 0,
            partial_first: first as i32,
            n_partials: partials as i32,
        });
        self.partials += partials;
    }
}

/// From the block on in which the first key stands.
fn aligned(keys: &std::ops::Range<usize>) -> std::ops::Range<usize> {
    keys.start / BLOCK_TOKENS * BLOCK_TOKENS..keys.end
}
