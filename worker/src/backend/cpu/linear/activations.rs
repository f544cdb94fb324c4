//! The inputs of matrix products: rows of f32, and the same in int8 by blocks of 32.

use super::super::isa::Isa;
use super::super::pool::Pool;
use super::format::{BLOCK, GROUPS};

/// Tokens whose blocks lie side by side, so that a kernel reaches them from one address.
pub(super) const TILE: usize = 8;

/// Blocks whose largest value is not above this are taken as zero: its reciprocal must be finite.
pub(super) const TINY: f32 = 1e-30;

/// Tiles that one task quantises.
const TILES_PER_TASK: usize = 4;

/// Which forms of its input a matrix needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inputs {
    /// Quantised by blocks of 32.
    pub int8: bool,
    /// As they are.
    pub float: bool,
}

impl Inputs {
    /// What both need.
    pub fn union(self, other: Self) -> Self {
        Self { int8: self.int8 || other.int8, float: self.float || other.float }
    }
}

/// Block `b` of 8 tokens. A token's values are `scale * quants`; its sums serve weights with an offset or a minimum.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct TileBlock {
    /// Four signed bytes in each, the first one lowest.
    pub(super) quants: [[i32; GROUPS]; TILE],
    /// Largest magnitude / 127.
    pub(super) scale: [f32; TILE],
    /// `scale` times the sum of the quants.
    pub(super) scaled_sum: [f32; TILE],
    /// Minus the sum of the quants.
    pub(super) negated_sum: [i32; TILE],
    /// Minus the sum of the first 16 quants.
    pub(super) negated_first: [i32; TILE],
}

impl TileBlock {
    const ZERO: Self = Self {
        quants: [[0; GROUPS]; TILE],
        scale: [0.0; TILE],
        scaled_sum: [0.0; TILE],
        negated_sum: [0; TILE],
        negated_first: [0; TILE],
    };
}

/// `[tokens, cols]` prepared for any number of products. Memory is kept from one use to the next.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    inputs: Inputs,
    /// `[tile][block]`.
    tiles: Vec<TileBlock>,
    /// `[token][col]`.
    float: Vec<f32>,
}

impl Activations {
    /// Room for `tokens` rows of `cols`; it grows where more come.
    pub fn new(tokens: usize, cols: usize) -> Self {
        let tiles = Vec::with_capacity(tokens.div_ceil(TILE) * cols.div_ceil(BLOCK));
        Self { tiles, ..Self::default() }
    }

    /// Takes `tokens` rows of `cols` values, row-major, in the forms that `inputs` names.
    pub fn prepare(&mut self, pool: &Pool, x: &[f32], tokens: usize, cols: usize, inputs: Inputs) {
        assert_eq!(x.len(), tokens * cols, "activations of {tokens} tokens and {cols} columns");
        (self.tokens, self.cols, self.inputs) = (tokens, cols, inputs);
        if inputs.float {
            self.float.clear();
            self.float.extend_from_slice(x);
        }
        if inputs.int8 {
            assert!(cols.is_multiple_of(BLOCK), "{cols} columns are no whole blocks of {BLOCK}");
            self.quantise(pool, x);
        }
    }

    fn quantise(&mut self, pool: &Pool, x: &[f32]) {
        let (blocks, cols) = (self.cols / BLOCK, self.cols);
        let length = self.tokens.div_ceil(TILE) * blocks;
        if self.tiles.len() < length {
            self.tiles.resize(length, TileBlock::ZERO);
        }
        let isa = pool.isa();
        pool.chunks(&mut self.tiles[..length], TILES_PER_TASK * blocks, &|task, tiles| {
            let rows = x[task * TILES_PER_TASK * TILE * cols..].chunks_exact(cols);
            for (index, row) in rows.take(tiles.len() / blocks * TILE).enumerate() {
                quantise_row(isa, row, &mut tiles[index / TILE * blocks..][..blocks], index % TILE);
            }
        });
    }

    /// Rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The forms that are there.
    pub fn inputs(&self) -> Inputs {
        self.inputs
    }

    /// The blocks of the tile that holds `token`.
    pub(super) fn tile(&self, token: usize) -> &[TileBlock] {
        let blocks = self.cols / BLOCK;
        &self.tiles[token / TILE * blocks..][..blocks]
    }

    /// The row of `token` as it is.
    pub(super) fn row(&self, token: usize) -> &[f32] {
        &self.float[token * self.cols..][..self.cols]
    }
}

fn quantise_row(isa: Isa, row: &[f32], tile: &mut [TileBlock], lane: usize) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a pool has only an instruction set that this processor has.
        Isa::Avx512 => unsafe { super::avx512::quantise_row(row, tile, lane) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { super::avx2::quantise_row(row, tile, lane) },
        _ => super::scalar::quantise_row(row, tile, lane),
    }
}

#[cfg(test)]
impl Activations {
    /// Fills the int8 lanes that no token uses with what would show: NaN and extreme integers. f32 rows have no such lanes.
    pub(super) fn poison_padding(&mut self) {
        let blocks = if self.inputs.int8 { self.cols / BLOCK } else { 0 };
        for lane in self.tokens..self.tokens.next_multiple_of(TILE) {
            for block in self.tiles.iter_mut().skip(lane / TILE * blocks).take(blocks) {
                block.quants[lane % TILE] = [i32::from_ne_bytes([0x80; 4]); GROUPS];
                block.scale[lane % TILE] = f32::NAN;
                block.scaled_sum[lane % TILE] = f32::NAN;
                block.negated_sum[lane % TILE] = i32::MIN;
                block.negated_first[lane % TILE] = i32::MAX;
            }
        }
    }
}
