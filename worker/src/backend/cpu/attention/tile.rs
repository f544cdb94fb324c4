//! One tile of attention: the query heads of one KV head for a few consecutive tokens, against 256 keys.
//!
//! Keys stand in lanes, so that a score is one lane's sum over the head walking upward, whatever the tile; keys beyond what a
//! query sees change no lane but their own and are taken out before the softmax. Values are summed from the lowest key upward.

use std::marker::PhantomData;

use super::super::config::BLOCK_TOKENS;
use super::super::kv_dtype::KvElement;
use super::super::lanes::{Kernel, LANES, Lanes};
use super::block::{fetch, softmax, transpose_block, widen_rows};
use super::partial::PartialMut;

/// Keys per chunk, by absolute position.
pub(super) const CHUNK: usize = 256;
/// Query vectors of a tile.
pub(super) const TILE_QUERIES: usize = 64;
/// Blocks whose scores are computed together.
const QUAD: usize = 4;

/// Blocks of keys that are on their way while one is worked on. A block is too small for the hardware to see a stream.
const KEYS_AHEAD: usize = 2;
/// What a tile works on. Query `i` is head `i % group` of the KV head at token `i / group`.
pub(super) struct Tile<'a> {
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    /// From the first token's first query to the last token's last.
    pub(super) q: &'a [f32],
    /// Floats from a token's queries to the next token's.
    pub(super) stride: usize,
    /// Keys of the chunk that each token sees.
    pub(super) seen: &'a [(usize, usize)],
    /// Keys and values, `[16][head_dim]`, of the chunk's blocks from `first_block` on.
    pub(super) blocks: &'a [(&'a [u8], &'a [u8])],
    pub(super) first_block: usize,
}

/// Working memory of one thread.
pub(super) struct Scratch<'a> {
    /// `[QUAD][head_dim][16]`.
    pub(super) keys: &'a mut [f32],
    /// `[16][head_dim]`.
    pub(super) values: &'a mut [f32],
    /// `[TILE_QUERIES][CHUNK]`.
    pub(super) scores: &'a mut [f32],
}

/// Floats that each part of [`Scratch`] takes: keys, values, scores.
pub(super) fn scratch_floats(head_dim: usize) -> [usize; 3] {
    [QUAD * head_dim * LANES, BLOCK_TOKENS * head_dim, TILE_QUERIES * CHUNK]
}

/// Softmax over the chunk, unnormalised: each query's largest score, sum of weights, and weighted sum of values.
pub(super) struct ChunkKernel<'a, 'b, 'c, E> {
    tile: Tile<'a>,
    scratch: &'a mut Scratch<'b>,
    out: &'a mut PartialMut<'c>,
    element: PhantomData<E>,
}

impl<'a, 'b, 'c, E> ChunkKernel<'a, 'b, 'c, E> {
    pub(super) fn new(tile: Tile<'a>, scratch: &'a mut Scratch<'b>, out: &'a mut PartialMut<'c>) -> Self {
        let [keys, values, scores] = scratch_floats(tile.head_dim);
        assert!(tile.queries() <= TILE_QUERIES && tile.head_dim.is_multiple_of(LANES));
        assert!(
            scratch.keys.len() == keys && scratch.values.len() == values && scratch.scores.len() == scores
        );
        assert!(tile.q.len() == (tile.seen.len() - 1) * tile.stride + tile.group * tile.head_dim);
        Self { tile, scratch, out, element: PhantomData }
    }
}

impl<E: KvElement> Kernel for ChunkKernel<'_, '_, '_, E> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { tile, scratch, out, .. } = self;
        // SAFETY: the caller vouches for the instruction set; sizes were checked in `new`.
        unsafe {
            tile.scores::<L, E>(scratch);
            for query in 0..tile.queries() {
                let (from, to) = tile.seen[query / tile.group];
                let scores = &mut scratch.scores[query * CHUNK..][..CHUNK];
                (out.largest[query], out.sum[query]) = softmax::<L>(scores, from, to);
            }
            out.values[..tile.queries() * tile.head_dim].fill(0.0);
            tile.values::<L, E>(scratch, out.values);
        }
    }
}

impl Tile<'_> {
    fn queries(&self) -> usize {
        self.seen.len() * self.group
    }

    #[inline(always)]
    unsafe fn scores<L: Lanes, E: KvElement>(&self, scratch: &mut Scratch<'_>) {
        let panel = self.head_dim * LANES;
        for (quad, blocks) in self.blocks.chunks(QUAD).enumerate() {
            for (index, (keys, values)) in blocks.iter().enumerate() {
                // SAFETY: the caller vouches for the instruction set.
                unsafe {
                    fetch::<L>(values);
                    if let Some((keys, _)) = self.blocks.get(quad * QUAD + index + KEYS_AHEAD) {
                        fetch::<L>(keys);
                    }
                    transpose_block::<L, E>(keys, self.head_dim, &mut scratch.keys[index * panel..][..panel]);
                }
            }
            let at = (self.first_block + quad * QUAD) * BLOCK_TOKENS;
            let columns = blocks.len() * BLOCK_TOKENS;
            // SAFETY: scratch holds a row of scores for each query, and the columns end within the chunk.
            unsafe { self.score_quad::<L>(scratch.keys, scratch.scores, at, columns) };
        }
    }

    #[inline(always)]
    unsafe fn score_quad<L: Lanes>(&self, keys: &[f32], scores: &mut [f32], at: usize, columns: usize) {
        assert!(at + columns <= CHUNK && scores.len() >= self.queries() * CHUNK);
        let mut query = 0;
        while query < self.queries() {
            let count = (self.queries() - query).min(4);
            // SAFETY: queries up to `queries` exist, keys hold a quad, and every row of scores has `columns` from `at` on.
            unsafe {
                let q = std::array::from_fn(|i| self.query((query + i).min(self.queries() - 1)));
                let out = scores.as_mut_ptr().add(query * CHUNK + at);
                match (count, columns > BLOCK_TOKENS && L::WIDE) {
                    (4, true) => self.dot::<L, 4, QUAD>(q, keys, out, columns),
                    (3, true) => self.dot::<L, 3, QUAD>(q, keys, out, columns),
                    (2, true) => self.dot::<L, 2, QUAD>(q, keys, out, columns),
                    (1, true) => self.dot::<L, 1, QUAD>(q, keys, out, columns),
                    (4, false) => self.dot::<L, 4, 1>(q, keys, out, columns),
                    (3, false) => self.dot::<L, 3, 1>(q, keys, out, columns),
                    (2, false) => self.dot::<L, 2, 1>(q, keys, out, columns),
                    _ => self.dot::<L, 1, 1>(q, keys, out, columns),
                }
            }
            query += count;
        }
    }

    /// Scores of `N` queries against the quad's blocks, `B` at a time. Blocks past `columns` are computed from what the scratch
    /// still holds, and not stored.
    #[inline(always)]
    unsafe fn dot<L: Lanes, const N: usize, const B: usize>(
        &self,
        q: [*const f32; 4],
        keys: &[f32],
        out: *mut f32,
        columns: usize,
    ) {
        let panel = self.head_dim * LANES;
        for first in (0..columns.div_ceil(LANES)).step_by(B) {
            // SAFETY: keys hold QUAD panels, `first + B` is at most QUAD; q and out are as the caller promised.
            unsafe {
                let keys = keys.as_ptr().add(first * panel);
                let mut sums = [[L::splat(0.0); B]; N];
                for d in 0..self.head_dim {
                    let columns: [L::V; B] =
                        std::array::from_fn(|b| L::load(keys.add(b * panel + d * LANES)));
                    for (sums, q) in sums.iter_mut().zip(q) {
                        let q = L::splat(*q.add(d));
                        for (sum, column) in sums.iter_mut().zip(columns) {
                            *sum = L::fma(q, column, *sum);
                        }
                    }
                }
                for (n, sums) in sums.into_iter().enumerate() {
                    for (b, sum) in sums.into_iter().enumerate() {
                        let column = (first + b) * LANES;
                        if column < columns {
                            L::store(out.add(n * CHUNK + column), L::mul(sum, L::splat(self.scale)));
                        }
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn values<L: Lanes, E: KvElement>(&self, scratch: &mut Scratch<'_>, out: &mut [f32]) {
        let seen = self.seen;
        for (index, (_, values)) in self.blocks.iter().enumerate() {
            let at = (self.first_block + index) * BLOCK_TOKENS;
            let within = |(from, to): (usize, usize)| {
                (from.clamp(at, at + BLOCK_TOKENS) - at, to.clamp(at, at + BLOCK_TOKENS) - at)
            };
            let any = seen.iter().map(|seen| within(*seen)).filter(|(from, to)| from < to);
            let Some((low, high)) = any.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else { continue };
            // SAFETY: the caller vouches for the instruction set; rows low..high are of this block and were written.
            unsafe { widen_rows::<L, E>(values, self.head_dim, low, high, scratch.values) };
            let mut query = 0;
            while query < self.queries() {
                let range = within(seen[query / self.group]);
                let same = |i: &usize| within(seen[(query + i) / self.group]) == range;
                let count = (1..4.min(self.queries() - query)).take_while(same).count() + 1;
                // SAFETY: scratch holds the range's values, a row of weights for each query, and out a row for each.
                unsafe {
                    let weights = scratch.scores.as_ptr().add(query * CHUNK + at);
                    let out = out.as_mut_ptr().add(query * self.head_dim);
                    self.weigh_some::<L>(count, weights, scratch.values, range, out);
                }
                query += count;
            }
        }
    }

    #[inline(always)]
    unsafe fn weigh_some<L: Lanes>(
        &self,
        count: usize,
        weights: *const f32,
        values: &[f32],
        range: (usize, usize),
        out: *mut f32,
    ) {
        // SAFETY: the caller's promises are these.
        unsafe {
            match (count, L::WIDE && self.head_dim.is_multiple_of(4 * LANES)) {
                (4, true) => self.weigh::<L, 4, 4>(weights, values, range, out),
                (3, true) => self.weigh::<L, 3, 4>(weights, values, range, out),
                (2, true) => self.weigh::<L, 2, 4>(weights, values, range, out),
                (1, true) => self.weigh::<L, 1, 4>(weights, values, range, out),
                (4, false) => self.weigh::<L, 4, 1>(weights, values, range, out),
                (3, false) => self.weigh::<L, 3, 1>(weights, values, range, out),
                (2, false) => self.weigh::<L, 2, 1>(weights, values, range, out),
                _ => self.weigh::<L, 1, 1>(weights, values, range, out),
            }
        }
    }

    /// Adds the weighted values of a block's keys `range` to the rows of `N` queries, `D` vectors of the head at a time.
    #[inline(always)]
    unsafe fn weigh<L: Lanes, const N: usize, const D: usize>(
        &self,
        weights: *const f32,
        values: &[f32],
        range: (usize, usize),
        out: *mut f32,
    ) {
        for at in (0..self.head_dim).step_by(D * LANES) {
            // SAFETY: `at + D * LANES` is at most head_dim; the rest is the caller's promise.
            unsafe {
                let out = out.add(at);
                let place = |n: usize, d: usize| out.add(n * self.head_dim + d * LANES);
                let mut sums: [[L::V; D]; N] =
                    std::array::from_fn(|n| std::array::from_fn(|d| L::load(place(n, d))));
                for key in range.0..range.1 {
                    let row = values.as_ptr().add(key * self.head_dim + at);
                    let row: [L::V; D] = std::array::from_fn(|d| L::load(row.add(d * LANES)));
                    for (n, sums) in sums.iter_mut().enumerate() {
                        let weight = L::splat(*weights.add(n * CHUNK + key));
                        for (sum, value) in sums.iter_mut().zip(row) {
                            *sum = L::fma(weight, value, *sum);
                        }
                    }
                }
                for (n, sums) in sums.into_iter().enumerate() {
                    for (d, sum) in sums.into_iter().enumerate() {
                        L::store(place(n, d), sum);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn query(&self, index: usize) -> *const f32 {
        // SAFETY: the caller asks for a query of this tile.
        unsafe { self.q.as_ptr().add(index / self.group * self.stride + index % self.group * self.head_dim) }
    }
}
