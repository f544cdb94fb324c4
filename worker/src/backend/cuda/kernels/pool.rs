//! Launches of the kernels that add up hidden states.

use super::super::error::CudaError;
use super::super::launch::{Args, Grid, Launcher};
use super::super::memory::Address;
use super::{Kernels, ROW_THREADS};

/// What hidden states are made of, and where they are added up.
#[derive(Clone, Copy, Debug)]
pub struct PoolArgs {
    pub counts: Address,
    pub rows: Address,
    /// `[token][hidden]`, in f32.
    pub residual: Address,
    /// Of the final norm.
    pub weight: Address,
    pub epsilon: f32,
    /// Room for a number of each token.
    pub scales: Address,
    /// `[slot][hidden]`, in f32.
    pub sums: Address,
    /// `[vector][hidden]`, in f32.
    pub vectors: Address,
    pub hidden: usize,
}

/// Columns that a block adds up.
const COLUMNS: usize = 64;

impl Kernels {
    /// Norms of the tokens, then sums of the pooled rows.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn pool(
        &self,
        to: Launcher<'_>,
        (tokens, rows): (usize, usize),
        a: PoolArgs,
    ) -> Result<(), CudaError> {
        let scales = Args::new().address(a.counts).address(a.residual).f32(a.epsilon).address(a.scales);
        let sums = Args::new().address(a.counts).address(a.rows).address(a.residual).address(a.scales);
        let sums = sums.address(a.weight).address(a.sums).address(a.vectors).int(a.hidden);
        let grid = Grid::plane((rows, a.hidden.div_ceil(COLUMNS)), COLUMNS);
        // SAFETY: the caller's promise.
        unsafe {
            to.launch(self.pool_scales, Grid::of(tokens, ROW_THREADS), scales.int(a.hidden))?;
            to.launch(self.pool_rows, grid, sums)
        }
    }
}
