//! How arrays of attention are laid out, for Hopper's copy engine.

use cudarc::driver::sys;

use super::super::error::{CudaError, check};
use super::super::memory::Address;
use super::{AttentionArgs, PREFILL_ROWS};
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
    )?;
    let cache = |at: Address| {
        encode(at, &[head_dim as u64, CACHE_ROWS], &[row_bytes], &[COLUMNS, BLOCK_TOKENS as u32])
    };
    Ok([queries, cache(a.keys)?, cache(a.values)?])
}

/// An array of bf16 by its sizes, the innermost first, and the bytes from one index of each further dimension to the next.
fn encode(at: Address, sizes: &[u64], strides: &[u64], boxes: &[u32]) -> Result<sys::CUtensorMap, CudaError> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    let steps = [1; 3];
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
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(result, || format!("cuTensorMapEncodeTiled of {sizes:?} in boxes of {boxes:?}"))?;
    Ok(map)
}
