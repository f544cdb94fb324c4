//! Attention's work of one step in one KV group, divided for the GPU.

use std::cmp::Reverse;
use std::ops::Range;

use super::abi::{AttnItem, CHUNK_TOKENS, DecodeItem, MergeItem, RowMeta, SPLIT_ROWS, SharedItem};
use super::prefix::{self, Prefix, TILE_KEYS};
use super::step::Limits;
use crate::backend::cpu::BLOCK_TOKENS;

/// Items by the kernel that takes them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Items {
    pub(super) split: Vec<AttnItem>,
    pub(super) merge: Vec<MergeItem>,
    pub(super) whole: Vec<AttnItem>,
    pub(super) decode: Vec<DecodeItem>,
    pub(super) shared: Vec<SharedItem>,
    partials: usize,
    /// Rows that are to be decoded.
    decoding: Vec<Decoding>,
}

/// A row, and the keys that it reads itself.
type Decoding = (usize, Range<usize>);

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
        self.shared.clear();
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
        let tile = tile_tokens(limits);
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

    /// What can only be divided once all rows and their tables are known.
    pub(super) fn finish(&mut self, group: usize, step: (&[RowMeta], &[i32]), limits: &Limits) {
        if limits.ways.prefill {
            // Tiles that see the most go first, so that none is left over at the end; among those of about the same length, the tiles
            // of a row stay together, so that the GPU's cache has the keys and values which they share.
            self.whole.sort_by_key(|item| {
                let chunks = (item.partial - item.chunk) as u32;
                (Reverse(chunks.next_power_of_two()), item.row, Reverse(item.q_start))
            });
        }
        let Some(runs) = limits.ways.runs.filter(|_| !self.decoding.is_empty()) else { return };
        let prefixes =
            limits.shared(group).map_or_else(Vec::new, |items| self.share(group, step, items, limits));
        let keys: usize = self.decoding.iter().map(|(_, keys)| keys.len()).sum();
        let mut run = keys.div_ceil(runs.max(1)).next_multiple_of(RUN_KEYS).max(RUN_KEYS_MIN);
        // Rows that are few enough for it are done in one round of blocks: a short one behind it would cost nearly another.
        let rows = self.decoding.len();
        let most = if rows <= runs { runs } else { runs + rows };
        while self.runs_of(run, 1) > most {
            run += (run / 8).next_multiple_of(RUN_KEYS);
        }
        while self.partials_of(run, &prefixes) > limits.partials {
            run *= 2;
        }
        let decoding = std::mem::take(&mut self.decoding);
        let mut rest = &decoding[..];
        let mut done = 0;
        for prefix in &prefixes {
            let (alone, from) = rest.split_at(prefix.first - done);
            alone.iter().for_each(|row| self.push_alone(row, run));
            let (sharing, behind) = from.split_at(prefix.rows);
            self.push_sharing(sharing, prefix, run, limits);
            (rest, done) = (behind, prefix.first + prefix.rows);
        }
        rest.iter().for_each(|row| self.push_alone(row, run));
        self.decode.iter_mut().for_each(|item| item.follow(&step.0[item.row as usize], group));
        self.decoding = decoding;
    }

    /// Takes keys that rows share from what they read themselves.
    fn share(
        &mut self,
        group: usize,
        step: (&[RowMeta], &[i32]),
        items: usize,
        limits: &Limits,
    ) -> Vec<Prefix> {
        let mut prefixes = prefix::find(self.decoding.iter().map(|(row, _)| *row), group, step);
        // The other half is for runs.
        prefix::divide(&mut prefixes, tile_tokens(limits), items, limits.partials / 2);
        for prefix in &prefixes {
            for (_, keys) in &mut self.decoding[prefix.first..][..prefix.rows] {
                keys.start = prefix.tiles * TILE_KEYS;
            }
        }
        prefixes
    }

    /// Runs of this length, of rows that have at least so many.
    fn runs_of(&self, run: usize, least: usize) -> usize {
        let runs = self.decoding.iter().map(|row| runs_of(row, run));
        runs.filter(|runs| *runs >= least).sum()
    }

    /// Partial results of all rows.
    fn partials_of(&self, run: usize, prefixes: &[Prefix]) -> usize {
        let sharing = |prefix: &Prefix| &self.decoding[prefix.first..][..prefix.rows];
        let shared: usize =
            prefixes.iter().map(|prefix| prefix.rows * stride(sharing(prefix), prefix, run)).sum();
        let counted = prefixes.iter().flat_map(sharing).map(|row| runs_of(row, run));
        self.runs_of(run, 2) - counted.filter(|runs| *runs >= 2).sum::<usize>() + shared
    }

    fn push_alone(&mut self, row: &Decoding, run: usize) {
        let count = self.push_runs(row, run, (self.partials, 0));
        self.partials += if count == 1 { 0 } else { count };
    }

    /// Rows of a prefix: its pieces for as many of them as go into a tile, and their own runs.
    fn push_sharing(&mut self, rows: &[Decoding], prefix: &Prefix, run: usize, limits: &Limits) {
        let (first, stride) = (self.partials, stride(rows, prefix, run));
        for (index, row) in rows.iter().enumerate() {
            self.push_runs(row, run, (first + index * stride, prefix.pieces));
        }
        let tile = tile_tokens(limits);
        let key = |piece: usize| (piece * prefix.tiles / prefix.pieces * TILE_KEYS) as i32;
        for (index, rows) in rows.chunks(tile).enumerate() {
            self.shared.extend((0..prefix.pieces).map(|piece| SharedItem {
                row: rows[0].0 as i32,
                n_rows: rows.len() as i32,
                key_begin: key(piece),
                key_end: key(piece + 1),
                partial: (first + index * tile * stride + piece) as i32,
                stride: stride as i32,
            }));
        }
        self.partials += rows.len() * stride;
    }

    /// A row's runs, whose partial results stand behind `shared` others; how many there are.
    fn push_runs(&mut self, row: &Decoding, run: usize, (first, shared): (usize, usize)) -> usize {
        let (keys, count) = (aligned(&row.1), runs_of(row, run));
        self.decode.extend((0..count).map(|index| DecodeItem {
            row: row.0 as i32,
            key_begin: (keys.start + index * run) as i32,
            key_end: (keys.start + (index + 1) * run).min(keys.end) as i32,
            partial: if count == 1 { -1 } else { (first + shared + index) as i32 },
            partial_first: first as i32,
            n_partials: (shared + count) as i32,
            n_runs: count as i32,
            ..DecodeItem::default()
        }));
        count
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

/// Tokens whose query rows go into a tile.
fn tile_tokens(limits: &Limits) -> usize {
    limits.ways.whole_rows / limits.gqa_group
}

/// Runs of this length that a row's own keys are cut into.
fn runs_of((_, keys): &Decoding, run: usize) -> usize {
    aligned(keys).len().div_ceil(run)
}

/// Partial results that each row of a prefix has room for.
fn stride(rows: &[Decoding], prefix: &Prefix, run: usize) -> usize {
    let runs = rows.iter().map(|row| runs_of(row, run)).max().unwrap_or(0);
    prefix.pieces + if runs < 2 { 0 } else { runs }
}

/// From the block on in which the first key stands.
fn aligned(keys: &Range<usize>) -> Range<usize> {
    keys.start / BLOCK_TOKENS * BLOCK_TOKENS..keys.end
}

#[cfg(test)]
#[path = "items_tests.rs"]
mod tests;
