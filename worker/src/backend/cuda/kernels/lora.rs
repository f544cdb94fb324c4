//! Launches of LoRA's kernels.

use super::super::error::CudaError;
use super::super::launch::{Args, Grid, Launcher};
use super::super::memory::Address;
use super::{Kernels, ROW_THREADS};

/// What an adapter's products work on.
#[derive(Clone, Copy, Debug)]
pub struct LoraArgs {
    pub counts: Address,
    /// Of each token; 0: it has none.
    pub slots: Address,
    /// Table of [`super::super::lora::LoraPart`], `[adapter][part]`.
    pub parts: Address,
    pub n_parts: usize,
    /// `[token][k]` in bf16.
    pub inputs: Address,
    pub k: usize,
    /// `[token][part][rank_max]`, in f32.
    pub low: Address,
    pub rank_max: usize,
    /// `[token][n]`.
    pub outputs: Address,
    pub n: usize,
    /// Outputs of the largest part.
    pub part_max: usize,
    pub is_bf16: bool,
}

/// Rows of A that one block takes.
const SHRINK_ROWS: usize = 8;
/// Tokens that a block takes of a long step: those of one adapter share what is read of it.
const TILE: usize = 8;
/// Tokens up to which each has blocks of its own.
const SINGLE_MAX: usize = 64;

impl Kernels {
    /// A x of every token with an adapter, then B of it added to the outputs.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn lora(&self, to: Launcher<'_>, tokens: usize, a: LoraArgs) -> Result<(), CudaError> {
        let tile = if tokens <= SINGLE_MAX { 1 } else { TILE };
        let common = Args::new().address(a.counts).address(a.slots).address(a.parts).int(a.n_parts);
        let shrink = common.address(a.inputs).int(a.k).address(a.low).int(a.rank_max).int(tile);
        let rows = a.n_parts * a.rank_max.div_ceil(SHRINK_ROWS);
        let expand = common.address(a.low).int(a.rank_max).address(a.outputs).int(a.n);
        let expand = expand.i32(i32::from(a.is_bf16)).int(tile);
        let columns = a.n_parts * a.part_max.div_ceil(ROW_THREADS);
        let tiles = tokens.div_ceil(tile);
        // SAFETY: the caller's promise.
        unsafe {
            to.launch(self.lora_shrink, Grid::plane((tiles, rows), ROW_THREADS), shrink)?;
            to.launch(self.lora_expand, Grid::plane((tiles, columns), ROW_THREADS), expand)
        }
    }
}
