//! The kernels by name, each with a function that launches it in the right shape.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Gpu;
use super::error::CudaError;
use super::launch::{Args, Grid, Kernel, Launcher};
use super::memory::Address;
pub use args::{AttentionArgs, AttentionBlocks, Gemm, QkvArgs, SampleArgs, SlotsArgs, Store};
use cluster::Clustered;
pub use cluster::{Behind, CLUSTER_ROWS, CLUSTER_ROWS_MIN, CLUSTER_TILE, Factors};
use large::Large;
pub use load::whole_tile_rows;
use load::{head_shape, kv_dtype};
pub use lora::LoraArgs;
pub use pool::PoolArgs;
use products::Normed;

mod args;
mod cluster;
mod large;
mod load;
mod lora;
mod maps;
mod pool;
mod products;

/// Threads of kernels that work on rows.
const ROW_THREADS: usize = 256;
const SAMPLE_THREADS: usize = 512;
/// Blocks of `sample` that a multiprocessor runs at once, and most that share a row.
const SAMPLE_BLOCKS: usize = 2;
const SAMPLE_PARTS_MAX: usize = 8;
const DECODE_THREADS: usize = 128;
const PREFILL_THREADS: usize = 384;
/// Values of a gate that one block takes.
const GATE_VALUES: usize = 8 * ROW_THREADS;
/// Values of a head that one thread finishes, and blocks that do so on a multiprocessor at once.
const HEAD_VALUES: usize = 16;
const HEADS_BLOCKS: usize = 4;
const WORD_BYTES: usize = 8;
/// Blocks of a fill.
const FILL_BLOCKS: usize = 2048;
/// Blocks that copy one KV block.
const COPY_BLOCKS: usize = 32;
/// Most rows of a product that `gemm_small` takes.
pub const SMALL_ROWS: usize = 16;
/// Inputs of a product come in multiples of this.
pub const GEMM_INPUTS: usize = 32;
/// Widest row whose norm is a part of the product behind it.
pub const NORMED_INPUTS_MAX: usize = 4096;
/// Query rows of a tile of `attention_prefill`.
pub const PREFILL_ROWS: usize = 128;

/// All of them.
#[derive(Debug)]
pub struct Kernels {
    gpu: Arc<Gpu>,
    modules: Vec<sys::CUmodule>,
    head_dim: usize,
    embed: Kernel,
    rms_norm: Kernel,
    rms_norm_rows: Kernel,
    add_rms_norm: Kernel,
    qkv_finish: Kernel,
    gate_act: Kernel,
    gemm_small: [Kernel; 2],
    gemm_qkv: [Kernel; 2],
    normed: Option<Normed>,
    clustered: Option<[Clustered; 3]>,
    large: Option<Large>,
    narrow: Kernel,
    pool_scales: Kernel,
    pool_rows: Kernel,
    gemm_tile: Kernel,
    attention_split: Kernel,
    attention_whole: Kernel,
    attention_merge: Kernel,
    attention_decode: Option<Kernel>,
    attention_prefill: Option<Kernel>,
    attention_shared: Option<Shared>,
    sample: Kernel,
    slots_init: Kernel,
    fill_random: Kernel,
    fill_value: Kernel,
    copy_blocks: Kernel,
    copy_words: Kernel,
    lora_shrink: Kernel,
    lora_expand: Kernel,
}

/// Keys that rows share, and the rows' own behind them.
#[derive(Clone, Copy, Debug)]
struct Shared {
    keys: Kernel,
    decode: Kernel,
}

// SAFETY: module handles may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

impl Kernels {
    /// Whether rows of few queries have a kernel that is faster than split and merge, if not bitwise the same in every batch.
    pub fn has_decode(&self) -> bool {
        self.attention_decode.is_some()
    }

    /// The same of rows of many queries, and of keys that rows share.
    pub fn has_prefill(&self) -> bool {
        self.attention_prefill.is_some()
    }

    /// # Safety
    /// As [`Launcher::launch`], of this and of all below.
    pub unsafe fn embed(
        &self,
        to: Launcher<'_>,
        tokens: usize,
        [counts, source, last_token, table, residual]: [Address; 5],
        scale: f32,
        hidden: usize,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(counts).address(source).address(last_token).address(table);
        let args = args.f32(scale).address(residual).int(hidden);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.embed, Grid::of(tokens, ROW_THREADS), args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn rms_norm(
        &self,
        to: Launcher<'_>,
        tokens: usize,
        [counts, x, weight, out]: [Address; 4],
        epsilon: f32,
        width: usize,
    ) -> Result<(), CudaError> {
        let args =
            Args::new().address(counts).address(x).address(weight).f32(epsilon).address(out).int(width);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.rms_norm, Grid::of(tokens, ROW_THREADS), args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn rms_norm_rows(
        &self,
        to: Launcher<'_>,
        (first, rows): (usize, usize),
        [counts, logit_rows, residual, weight, out]: [Address; 5],
        epsilon: f32,
        width: usize,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(counts).address(logit_rows).int(first).address(residual);
        let args = args.address(weight).f32(epsilon).address(out).int(width);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.rms_norm_rows, Grid::of(rows, ROW_THREADS), args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn add_rms_norm(
        &self,
        to: Launcher<'_>,
        tokens: usize,
        [counts, y, weight, residual]: [Address; 4],
        epsilon: f32,
        width: usize,
    ) -> Result<(), CudaError> {
        let args =
            Args::new().address(counts).address(y).address(weight).f32(epsilon).address(residual).int(width);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.add_rms_norm, Grid::of(tokens, ROW_THREADS), args) }
    }

    /// Rows whose logits are wanted to places of their own, one behind the other: what attention gave them, and their residual.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn narrow(
        &self,
        to: Launcher<'_>,
        logit_rows: usize,
        [counts, rows, attended, residual, attended_out, residual_out]: [Address; 6],
        (query, hidden): (usize, usize),
    ) -> Result<(), CudaError> {
        let args = Args::new().address(counts).address(rows).address(attended).address(residual);
        let args = args.address(attended_out).address(residual_out).int(query).int(hidden);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.narrow, Grid::of(logit_rows, ROW_THREADS), args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn qkv_finish(&self, to: Launcher<'_>, tokens: usize, a: QkvArgs) -> Result<(), CudaError> {
        let args = Args::new().address(a.counts).address(a.positions).address(a.places).address(a.qkv);
        let args = args.address(a.bias).address(a.q_norm).address(a.k_norm).f32(a.epsilon).address(a.rope);
        let args = args.int(a.q_heads).int(a.kv_heads).int(self.head_dim).address(a.keys).address(a.values);
        let args = args.i32(kv_dtype(a.dtype).map_or(0, |(number, _)| number));
        let heads_of_a_warp = 32 * HEAD_VALUES / self.head_dim;
        let units = tokens * (a.q_heads + 2 * a.kv_heads).div_ceil(heads_of_a_warp);
        let blocks = units.div_ceil(ROW_THREADS / 32).min(HEADS_BLOCKS * self.gpu.multiprocessors());
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.qkv_finish, Grid::of(blocks, ROW_THREADS), args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn gate_act(
        &self,
        to: Launcher<'_>,
        tokens: usize,
        [counts, gate_up, out]: [Address; 3],
        mlp: usize,
        activation: i32,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(counts).address(gate_up).address(out).int(mlp).i32(activation);
        let grid = Grid::plane((tokens, mlp.div_ceil(GATE_VALUES)), ROW_THREADS);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.gate_act, grid, args) }
    }

    /// Split items, then their merges, then whole items; keys that rows share, then runs of rows, then prompts.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn attention(&self, to: Launcher<'_>, a: AttentionArgs) -> Result<(), CudaError> {
        let Some(shape) = head_shape(self.head_dim) else { return Ok(()) };
        let of_items = |items: Address| {
            Args::new().address(a.counts).int(a.group).address(a.rows).address(a.tables).address(items)
        };
        let over = |args: Args| {
            let args = args.address(a.qkv).int((a.q_heads + 2 * a.kv_heads) * self.head_dim);
            args.address(a.keys).address(a.values).address(a.out)
        };
        let ends = |args: Args| args.int(a.q_heads).int(a.kv_heads).f32(a.scale).int(a.window);
        let over_chunks =
            |items: Address| ends(over(of_items(items)).address(a.partial_o).address(a.partial_ml));
        let AttentionBlocks { split, merge, whole, decode, shared, prefill } = a.blocks;
        let merge_args = Args::new().address(a.counts).int(a.group).address(a.rows).address(a.merge_items);
        let merge_args = merge_args.address(a.partial_o).address(a.partial_ml).address(a.out);
        let merge_args = merge_args.int(a.q_heads).int(a.kv_heads);
        let split_grid = Grid::plane((split, a.kv_heads), 32).with_shared(shape.split_shared);
        let whole_grid =
            Grid::plane((whole, a.kv_heads), shape.whole_threads).with_shared(shape.whole_shared);
        let by_units = |items: usize| {
            let blocks = (items * a.kv_heads).min(self.gpu.multiprocessors());
            Grid::of(blocks, PREFILL_THREADS).with_shared(shape.prefill_shared)
        };
        // SAFETY: the caller's promise.
        unsafe {
            to.launch(self.attention_split, split_grid, over_chunks(a.split_items))?;
            to.launch(self.attention_merge, Grid::plane((merge, a.kv_heads), 128), merge_args)?;
            to.launch(self.attention_whole, whole_grid, over_chunks(a.whole_items))?;
            let sharing = self.attention_shared.filter(|_| shared > 0);
            if let Some(Shared { keys: kernel, .. }) = sharing {
                let args = of_items(a.shared_items).address(a.partial_o).address(a.partial_ml);
                let args = args.int(a.q_heads).int(a.kv_heads).f32(a.scale);
                to.launch_with_maps(kernel, by_units(shared), args, &maps::prefill_maps(&a, self.head_dim)?)?;
            }
            if let Some(kernel) = sharing.map(|sharing| sharing.decode).or(self.attention_decode) {
                let args =
                    Args::new().address(a.counts).int(a.group).address(a.tables).address(a.decode_items);
                let args = over(args).address(a.partial_o).address(a.partial_ml).address(a.tickets);
                let grid = Grid::plane((decode, a.kv_heads), DECODE_THREADS).with_shared(shape.decode_shared);
                to.launch(kernel, grid, ends(args))?;
            }
            if let Some(kernel) = self.attention_prefill.filter(|_| prefill > 0) {
                let args = ends(of_items(a.whole_items).address(a.out));
                to.launch_with_maps(
                    kernel,
                    by_units(prefill),
                    args,
                    &maps::prefill_maps(&a, self.head_dim)?,
                )?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn sample(&self, to: Launcher<'_>, rows: usize, a: SampleArgs) -> Result<(), CudaError> {
        let args = Args::new().address(a.counts).address(a.rows).int(a.first).address(a.logits).int(a.vocab);
        let args = args.address(a.params).address(a.bias).address(a.ends).address(a.last_token);
        let args = args.address(a.seen).address(a.masks).address(a.out);
        let at_once = if self.gpu.is_hopper() { SAMPLE_BLOCKS * self.gpu.multiprocessors() } else { 1 };
        let parts = sample_parts(rows, at_once);
        let grid = Grid::of(rows * parts, SAMPLE_THREADS).with_cluster(parts);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.sample, grid, args) }
    }

    /// # Safety
    /// See `embed`.
    pub unsafe fn slots_init(&self, to: Launcher<'_>, slots: usize, a: SlotsArgs) -> Result<(), CudaError> {
        let args = Args::new().address(a.counts).address(a.starts).address(a.tokens).address(a.start_bias);
        let args = args.address(a.start_ends).address(a.params).address(a.bias).address(a.ends);
        let args = args.address(a.last_token).address(a.seen).int(a.vocab);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.slots_init, Grid::of(slots, ROW_THREADS), args) }
    }

    /// `n` bf16 numbers in [-scale, scale), a function of seed and index.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn fill_random(
        &self,
        to: Launcher<'_>,
        out: Address,
        n: u64,
        seed: u64,
        scale: f32,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(out).u64(n).u64(seed).f32(scale);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.fill_random, Grid::of(FILL_BLOCKS, ROW_THREADS), args) }
    }

    /// `n` times the same bf16 number.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn fill_value(
        &self,
        to: Launcher<'_>,
        out: Address,
        n: u64,
        value: f32,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(out).u64(n).f32(value);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.fill_value, Grid::of(FILL_BLOCKS, ROW_THREADS), args) }
    }

    /// Whole blocks of one layer, pair after pair.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn copy_blocks(
        &self,
        to: Launcher<'_>,
        [keys, values, pairs]: [Address; 3],
        block_bytes: u64,
        count: usize,
    ) -> Result<(), CudaError> {
        let args = Args::new().address(keys).address(values).u64(block_bytes).address(pairs).int(count);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.copy_blocks, Grid::of(COPY_BLOCKS, ROW_THREADS), args) }
    }

    /// Whole words of eight bytes, some of them in host memory: sooner begun than what the copy engine does.
    ///
    /// # Safety
    /// See `embed`.
    pub unsafe fn copy_words(
        &self,
        to: Launcher<'_>,
        [from, out]: [Address; 2],
        bytes: usize,
    ) -> Result<(), CudaError> {
        debug_assert!(bytes.is_multiple_of(WORD_BYTES), "{bytes}");
        let words = bytes / WORD_BYTES;
        let args = Args::new().address(from).address(out).int(words);
        // SAFETY: the caller's promise.
        unsafe { to.launch(self.copy_words, Grid::of(words.div_ceil(ROW_THREADS), ROW_THREADS), args) }
    }
}

/// Blocks that share a row, so that as many run at once as the card has room for.
fn sample_parts(rows: usize, blocks_at_once: usize) -> usize {
    let mut parts = 1;
    while 2 * parts <= SAMPLE_PARTS_MAX && 2 * parts * rows <= blocks_at_once {
        parts *= 2;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_rows_are_shared_among_blocks() {
        let parts = |rows| sample_parts(rows, 264);
        assert_eq!([1, 33, 34, 64, 66, 67, 132, 133, 512].map(parts), [8, 8, 4, 4, 4, 2, 2, 1, 1]);
        assert_eq!(sample_parts(1, 1), 1);
    }
}
