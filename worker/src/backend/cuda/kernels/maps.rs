//! How arrays are laid out, for Hopper's copy engine.

use cudarc::driver::sys;
use sys::CUtensorMapL2promotion as Promotion;

use super::super::error::{CudaError, check};
use super::super::memory::Address;
use super::cluster::CLUSTER_TILE;
use super::large::TILE_GATES;
use super::{AttentionArgs, Gemm, PREFILL_ROWS};
use crate::backend::cpu::BLOCK_TOKENS;

/// Columns of a box: a row of the 128-byte swizzle.
const COLUMNS: u32 = 64;
/// Rows of a layer's keys or values, as many as a coordinate can name: launches are recorded before it is known how many blocks there
/// will be, and no table names one beyond them.
const CACHE_ROWS: u64 = (i32::MAX as u64 + 1) - BLOCK_TOKENS as u64;

/// Queries, keys and values, in the boxes that `attn_prefill` and `attn_shared` ask for: an item's queries, a block's keys, a block's values.
pub(super) fn prefill_maps(a: &AttentionArgs, head_dim: usize) -> Result<[sys::CUtensorMap; 3], CudaError> {
    let (heads, group) = (a.q_heads + 2 * a.kv_heads, a.q_heads / a.kv_heads);
    let row_bytes = (head_dim * 2) as u64;
    let queries = encode(
        a.qkv,
        &[head_dim as u64, heads as u64, a.tokens as u64],
        &[row_bytes, heads as u64 * row_bytes],
        &[COLUMNS, group as u32, (PREFILL_ROWS / group) as u32],
        Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    )?;
    let cache = |at: Address| {
        let boxes = [COLUMNS, BLOCK_TOKENS as u32];
        let promotion = Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
        encode(at, &[head_dim as u64, CACHE_ROWS], &[row_bytes], &boxes, promotion)
    };
    Ok([queries, cache(a.keys)?, cache(a.values)?])
}

/// Which rows of the weights make a tile of `gemm_cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Weights {
    /// Neighbours.
    Plain,
    /// Eights of gates, each beside the eight of its factors.
    Gated,
    /// Eights of the lower halves of heads, each beside the eight that rope turns it with.
    Heads { head_dim: usize },
}

impl Weights {
    /// Sizes behind K, rows from one index of each to the next, and a tile's boxes.
    fn dimensions(self, n: usize) -> [(u64, u64, u32); 4] {
        const EIGHTS: usize = CLUSTER_TILE / 16;
        let dimension = |size: usize, rows: usize, boxes: usize| (size as u64, rows as u64, boxes as u32);
        let none = dimension(1, 1, 1);
        match self {
            Self::Plain => [dimension(n, 1, CLUSTER_TILE), none, none, none],
            Self::Gated => [dimension(8, 1, 8), dimension(2, n, 2), dimension(n / 8, 8, EIGHTS), none],
            Self::Heads { head_dim } => {
                let half = head_dim / 2;
                let eights = EIGHTS.min(half / 8);
                let heads = dimension(n / head_dim, head_dim, EIGHTS / eights);
                [dimension(8, 1, 8), dimension(2, half, 2), dimension(half / 8, 8, eights), heads]
            }
        }
    }
}

/// Weights by tiles, and inputs by so many rows.
pub(super) fn gemm_maps(
    gemm: &Gemm,
    weights: Weights,
    rows: usize,
) -> Result<[sys::CUtensorMap; 2], CudaError> {
    let (k, row_bytes) = (gemm.k as u64, (gemm.k * 2) as u64);
    let dimensions = weights.dimensions(gemm.n);
    let [a, b, c, d] = dimensions.map(|(size, ..)| size);
    let strides = dimensions.map(|(_, rows, _)| rows * row_bytes);
    let [e, f, g, h] = dimensions.map(|(.., boxes)| boxes);
    // What a box does not ask for is not wanted soon enough to be brought to L2 with it: 3% of the time.
    let promotion = Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    Ok([
        encode(gemm.weights, &[k, a, b, c, d], &strides, &[COLUMNS, e, f, g, h], promotion)?,
        encode(gemm.inputs, &[k, gemm.m as u64], &[row_bytes], &[COLUMNS, rows as u32], promotion)?,
    ])
}

/// Gates and the factors behind them by halves of a tile, and inputs by so many rows.
pub(super) fn large_maps(gemm: &Gemm, rows: usize) -> Result<[sys::CUtensorMap; 2], CudaError> {
    let (k, row_bytes) = (gemm.k as u64, (gemm.k * 2) as u64);
    let promotion = Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    let by_rows = |at: Address, count: usize, rows: usize| {
        encode(at, &[k, count as u64], &[row_bytes], &[COLUMNS, rows as u32], promotion)
    };
    Ok([by_rows(gemm.weights, 2 * gemm.n, TILE_GATES)?, by_rows(gemm.inputs, gemm.m, rows)?])
}

/// An array of bf16 by its sizes, the innermost first, and the bytes from one index of each further dimension to the next.
fn encode(
    at: Address,
    sizes: &[u64],
    strides: &[u64],
    boxes: &[u32],
    promotion: Promotion,
) -> Result<sys::CUtensorMap, CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let steps = [1; 5];
    assert!(strides.len() + 1 == sizes.len() && boxes.len() == sizes.len() && sizes.len() <= steps.len());
    // SAFETY: the slices have the lengths that the rank says; the driver writes the map, and does not read the array.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            sizes.len() as u32,
            at as *mut _,
            sizes.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            promotion,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(result, || format!("cuTensorMapEncodeTiled of {sizes:?} in boxes of {boxes:?}"))?;
    Ok(map)
}
