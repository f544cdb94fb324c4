//! Kernels from the fatbins: which there are for a model and a card, and what they ask of it.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::sys;

use super::super::context::Gpu;
use super::super::error::{CudaError, check};
use super::super::launch::Kernel;
use super::cluster::Clustered;
use super::large::Large;
use super::products::Normed;
use super::{Kernels, NORMED_INPUTS_MAX, Shared};
use crate::backend::cpu::KvDtype;

include!(concat!(env!("OUT_DIR"), "/fatbins.rs"));

impl Kernels {
    /// Loads all modules, and the attention of this width of heads and type of KV. The calling thread must be bound.
    pub fn load(gpu: &Arc<Gpu>, head_dim: usize, dtype: KvDtype) -> Result<Self, CudaError> {
        let unsupported = |reason: String| CudaError::Unsupported(reason);
        let shape = head_shape(head_dim).ok_or_else(|| {
            unsupported(format!("heads of {head_dim}; there are kernels for 64, 128 and 256"))
        })?;
        let (_, dtype) = kv_dtype(dtype).ok_or_else(|| {
            unsupported("KV as float32; take --kv-cache-dtype bfloat16, fp8_e4m3 or fp8_e5m2".into())
        })?;
        let modules = load_modules()?;
        let split = find(&modules, format!("attn_split_{}_{dtype}", shape.split), shape.split_shared);
        let whole = find(&modules, format!("attn_whole_{}_{dtype}", shape.split), shape.whole_shared);
        let merge = find(&modules, format!("attn_merge_{}", shape.split), 0);
        let is_plain = dtype == "bf16";
        let room = |bytes: usize| is_plain && bytes > 0 && bytes <= gpu.shared_bytes();
        let decode = room(shape.decode_shared)
            .then(|| find(&modules, format!("attn_decode_{}", shape.split), shape.decode_shared))
            .transpose()?;
        let on_hopper = |name: &str| {
            (gpu.is_hopper() && room(shape.prefill_shared))
                .then(|| find(&modules, format!("{name}_{}", shape.split), shape.prefill_shared))
                .transpose()
        };
        let (prefill, shared) = (on_hopper("attn_prefill")?, on_hopper("attn_shared")?);
        let shared = shared
            .map(|keys| {
                let name = format!("attn_decode_sharing_{}", shape.split);
                find(&modules, name, shape.decode_shared).map(|decode| Shared { keys, decode })
            })
            .transpose()?;
        let of_small = |name: &str| find(&modules, name.into(), small_shared(gpu));
        let normed_shared = small_shared(gpu) + 2 * NORMED_INPUTS_MAX;
        let of_normed = |name: &str| find(&modules, name.into(), normed_shared);
        let normed = gpu
            .is_hopper()
            .then(|| {
                Ok::<_, CudaError>(Normed {
                    gemm: of_normed("gemm_normed")?,
                    qkv: of_normed("gemm_qkv_normed")?,
                })
            })
            .transpose()?;
        let clustered = Clustered::load(gpu, |name, shared_bytes| find(&modules, name, shared_bytes))?;
        let large = Large::load(gpu, |name, shared_bytes| find(&modules, name, shared_bytes))?;
        let find = |name: &str| find(&modules, name.into(), 0);
        Ok(Self {
            gpu: gpu.clone(),
            head_dim,
            embed: find("embed")?,
            rms_norm: find("rms_norm")?,
            rms_norm_rows: find("rms_norm_rows")?,
            add_rms_norm: find("add_rms_norm")?,
            qkv_finish: find("qkv_finish")?,
            gate_act: find("gate_act")?,
            gemm_small: [of_small("gemm_small_8")?, of_small("gemm_small_16")?],
            gemm_qkv: [of_small("gemm_qkv_8")?, of_small("gemm_qkv_16")?],
            normed,
            clustered,
            large,
            narrow: find("narrow")?,
            pool_scales: find("pool_scales")?,
            pool_rows: find("pool_rows")?,
            gemm_tile: find("gemm_tile")?,
            attention_split: split?,
            attention_whole: whole?,
            attention_merge: merge?,
            attention_decode: decode,
            attention_prefill: prefill,
            attention_shared: shared,
            sample: find("sample")?,
            slots_init: find("slots_init")?,
            fill_random: find("fill_random")?,
            fill_value: find("fill_value")?,
            copy_blocks: find("copy_blocks")?,
            copy_words: find("copy_words")?,
            lora_shrink: find("lora_shrink")?,
            lora_expand: find("lora_expand")?,
            modules,
        })
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            for module in &self.modules {
                // SAFETY: loaded in `load`, unloaded once; nothing is launched any more.
                unsafe { sys::cuModuleUnload(*module) };
            }
        }
    }
}

/// Sizes that depend on the width of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HeadShape {
    pub(super) split: &'static str,
    pub(super) split_shared: usize,
    pub(super) whole_shared: usize,
    pub(super) whole_threads: usize,
    pub(super) whole_rows: usize,
    pub(super) decode_shared: usize,
    /// 0: there is no such kernel.
    pub(super) prefill_shared: usize,
}

pub(super) fn head_shape(head_dim: usize) -> Option<HeadShape> {
    Some(match head_dim {
        64 => HeadShape {
            split: "64",
            split_shared: 18_432,
            whole_shared: 40_960,
            whole_threads: 128,
            whole_rows: 64,
            decode_shared: 67_584,
            prefill_shared: 114_848,
        },
        128 => HeadShape {
            split: "128",
            split_shared: 36_864,
            whole_shared: 81_920,
            whole_threads: 128,
            whole_rows: 64,
            decode_shared: 102_400,
            prefill_shared: 229_536,
        },
        256 => HeadShape {
            split: "256",
            split_shared: 73_728,
            whole_shared: 81_920,
            whole_threads: 64,
            whole_rows: 32,
            decode_shared: 139_264,
            prefill_shared: 0,
        },
        _ => return None,
    })
}

/// Query rows of a tile of `attention_whole`; None for a width of heads that has no kernels.
pub fn whole_tile_rows(head_dim: usize) -> Option<usize> {
    head_shape(head_dim).map(|shape| shape.whole_rows)
}

/// Number of a dtype for kernels, and its part of their names; None where there are none.
pub(super) fn kv_dtype(dtype: KvDtype) -> Option<(i32, &'static str)> {
    match dtype {
        KvDtype::F32 => None,
        KvDtype::Bf16 => Some((0, "bf16")),
        KvDtype::Fp8E4m3 => Some((1, "e4m3")),
        KvDtype::Fp8E5m2 => Some((2, "e5m2")),
    }
}

/// Dynamic shared memory of `gemm_small`: a ring of weights where the card copies in bulk.
pub(super) fn small_shared(gpu: &Gpu) -> usize {
    if gpu.is_hopper() { 101_376 } else { 0 }
}

fn load_modules() -> Result<Vec<sys::CUmodule>, CudaError> {
    let load = |(name, image): &(&str, &[u8])| {
        let mut module = std::ptr::null_mut();
        // The driver reads it as words.
        let mut words = vec![0u64; image.len().div_ceil(8)];
        super::super::abi::bytes_of_words(&mut words)[..image.len()].copy_from_slice(image);
        // SAFETY: a whole fatbin, which says its own length; the driver copies it.
        check(unsafe { sys::cuModuleLoadData(&raw mut module, words.as_ptr().cast()) }, || {
            format!("cuModuleLoadData of {name}")
        })?;
        Ok(module)
    };
    FATBINS.iter().map(load).collect()
}

/// A kernel of any module, allowed to take so much dynamic shared memory.
fn find(modules: &[sys::CUmodule], name: String, shared_bytes: usize) -> Result<Kernel, CudaError> {
    let text = CString::new(name.as_str()).map_err(|_| CudaError::Kernel(name.clone()))?;
    let mut function = std::ptr::null_mut();
    let found = modules.iter().any(|module| {
        // SAFETY: the module is loaded, the name ends with zero.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, *module, text.as_ptr()) };
        result == sys::CUresult::CUDA_SUCCESS
    });
    if !found {
        return Err(CudaError::Kernel(name));
    }
    // SAFETY: the function was just found. Loaded with a first launch it would take memory that nobody kept free.
    check(unsafe { sys::cuFuncLoad(function) }, || format!("cuFuncLoad of {name}"))?;
    if shared_bytes > 0 {
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function was just found.
        check(unsafe { sys::cuFuncSetAttribute(function, attribute, shared_bytes as i32) }, || {
            format!("{shared_bytes} bytes of shared memory for {name}")
        })?;
    }
    // A few dozen names for as long as the process lives.
    Ok(Kernel { function, name: name.leak() })
}
