//! Launches of products, by the number of their rows.

use super::super::error::CudaError;
use super::super::launch::{Args, Grid, Kernel, Launcher};
use super::super::memory::Address;
use super::load::{kv_dtype, small_shared};
use super::{Gemm, Kernels, NORMED_INPUTS_MAX, QkvArgs, ROW_THREADS, SMALL_ROWS, Store};

const TILE: (usize, usize) = (128, 64);
/// Columns that a block of `gemm_small` works on at once.
const SMALL_COLUMNS: usize = 16;
/// Eight warps that multiply, and one that fetches.
const SMALL_THREADS: usize = 288;

/// Products of one row's norm, where the card's shared memory has room for the row beside the weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Normed {
    pub(super) gemm: Kernel,
    pub(super) qkv: Kernel,
}

impl Kernels {
    /// Whether a product of one row can make the row's norm too.
    pub fn has_normed(&self) -> bool {
        self.normed.is_some()
    }

    /// For at most [`SMALL_ROWS`] rows.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn gemm_small(&self, to: Launcher<'_>, gemm: Gemm) -> Result<(), CudaError> {
        let kernel = self.gemm_small[usize::from(gemm.m > SMALL_ROWS / 2)];
        // SAFETY: the caller's promise.
        unsafe { to.launch(kernel, self.small_grid(&gemm, 0), gemm.args().i32(gemm.store.number())) }
    }

    /// For one row, whose norm is the product's input: `gemm.inputs` is the row itself, in f32, of at most [`NORMED_INPUTS_MAX`].
    ///
    /// # Safety
    /// See `embed`. There are such kernels, see `has_normed`.
    pub unsafe fn gemm_normed(
        &self,
        to: Launcher<'_>,
        gemm: Gemm,
        (weight, epsilon): (Address, f32),
    ) -> Result<(), CudaError> {
        let Some(Normed { gemm: kernel, .. }) = self.normed else { return Ok(()) };
        let args = Args::new().address(gemm.weights).address(gemm.inputs).address(weight).f32(epsilon);
        let args = args.address(gemm.outputs).int(gemm.n).int(gemm.k).address(gemm.m_at);
        let args = args.i32(gemm.store.number());
        // SAFETY: the caller's promise.
        unsafe { to.launch(kernel, self.small_grid(&gemm, 2 * NORMED_INPUTS_MAX), args) }
    }

    /// Queries, keys and values of at most [`SMALL_ROWS`] rows as `qkv_finish` leaves them, heads having no norms of their own. With a
    /// norm, `gemm.inputs` is as for `gemm_normed`.
    ///
    /// # Safety
    /// See `embed` and `gemm_normed`.
    pub unsafe fn gemm_qkv(
        &self,
        to: Launcher<'_>,
        gemm: Gemm,
        norm: Option<(Address, f32)>,
        a: QkvArgs,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(gemm.weights).address(gemm.inputs);
        let (kernel, args, row_bytes) = match (norm, self.normed) {
            (Some((weight, epsilon)), Some(normed)) => {
                (normed.qkv, args.address(weight).f32(epsilon), 2 * NORMED_INPUTS_MAX)
            }
            _ => (self.gemm_qkv[usize::from(gemm.m > SMALL_ROWS / 2)], args, 0),
        };
        let args = args.address(gemm.outputs).int(gemm.n).int(gemm.k).int(gemm.m).address(gemm.m_at);
        let args = args.address(a.positions).address(a.places).address(a.bias).address(a.rope);
        let args = args.address(a.keys).address(a.values).int(a.q_heads).int(a.kv_heads).int(self.head_dim);
        let args = args.i32(kv_dtype(a.dtype).map_or(0, |(number, _)| number));
        // SAFETY: the caller's promise.
        unsafe { to.launch(kernel, self.small_grid(&gemm, row_bytes), args) }
    }

    /// Two blocks on a multiprocessor, or as many as there is work for.
    fn small_grid(&self, gemm: &Gemm, row_bytes: usize) -> Grid {
        // Half of a gated tile's rows are factors.
        let columns = if matches!(gemm.store, Store::Gated(_)) { SMALL_COLUMNS / 2 } else { SMALL_COLUMNS };
        let blocks = gemm.n.div_ceil(columns).min(2 * self.gpu.multiprocessors());
        Grid::of(blocks, SMALL_THREADS).with_shared(small_shared(&self.gpu) + row_bytes)
    }

    /// For any number of rows, each bitwise as `gemm_small` gives it.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn gemm_tile(&self, to: Launcher<'_>, gemm: Gemm) -> Result<(), CudaError> {
        let grid = Grid::plane((gemm.n.div_ceil(TILE.0), gemm.m.div_ceil(TILE.1)), ROW_THREADS);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.gemm_tile, grid, gemm.args().i32(gemm.store.number())) }
    }
}
