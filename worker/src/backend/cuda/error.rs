//! What goes wrong with a GPU, in words that say what to do.

use std::ffi::CStr;

use cudarc::cublaslt::sys as lt;
use cudarc::driver::sys;
use thalweg_model::error::ModelError;

use crate::config::ByteSize;

/// The CUDA backend cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A shared library is not where libraries are looked for.
    #[error("{library} was not found ({tried}): install it, or name its folder with --cuda-library-path")]
    Library {
        /// File name.
        library: &'static str,
        /// What the loader said.
        tried: String,
    },
    /// A library that is too old.
    #[error(
        "{library} is version {found}, but at least {needed} is needed: --cuda-library-path names another one's folder"
    )]
    Version {
        /// File name.
        library: &'static str,
        /// What it says of itself.
        found: String,
        /// What the kernels and calls were made for.
        needed: &'static str,
    },
    /// The driver sees fewer GPUs.
    #[error(
        "there is no GPU number {ordinal}: the driver sees {count}; look at CUDA_VISIBLE_DEVICES and nvidia-smi"
    )]
    NoDevice {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A card that the kernels were not built for.
    #[error("{name} has compute capability {major}.{minor}, but 8.0 or newer is needed")]
    TooOld {
        /// The card.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Of its compute capability.
        minor: i32,
    },
    /// A call of the driver failed.
    #[error("{call}: {code}")]
    Driver {
        /// Function and what it was called with.
        call: String,
        /// The driver's name of the error, and its text.
        code: String,
    },
    /// A call of cublasLt failed.
    #[error("{call}: {status}")]
    Blas {
        /// Function and shape.
        call: String,
        /// The library's name of the error.
        status: String,
    },
    /// A kernel is not in this build.
    #[error("this build has no kernel {0}: build it again with all of worker/kernels")]
    Kernel(String),
    /// Work that does not end.
    #[error(
        "no answer from the GPU for {seconds} s, a kernel hangs; --gpu-step-timeout sets how long to wait"
    )]
    Hung {
        /// How long was waited.
        seconds: u64,
    },
    /// A shape that the kernels do not cover.
    #[error("the CUDA backend does not serve this model: {0}")]
    Unsupported(String),
    /// Weights and buffers leave too little of the GPU.
    #[error(
        "the model does not fit on the GPU: of {usable} ({free} are free) {weights} of weights, {buffers} of buffers, kernels and \
         recorded steps leave {left} for a KV cache of {kv}; free memory, raise --gpu-memory-utilization, lower \
         --max-num-batched-tokens, --max-num-seqs or --kv-cache-memory-bytes, or take a smaller model"
    )]
    Memory {
        /// Bytes of weights.
        weights: ByteSize,
        /// Bytes of everything else but KV.
        buffers: ByteSize,
        /// Bytes of KV that were asked for; 0 where nothing is left and nothing was asked for.
        kv: ByteSize,
        /// Bytes that there are for it.
        left: ByteSize,
        /// What may be taken.
        usable: ByteSize,
        /// What is free now.
        free: ByteSize,
    },
    /// The checkpoint could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor that the configuration calls for is absent, or has another shape.
    #[error("the checkpoint has no fitting tensor for {0}")]
    Missing(String),
}

/// Driver results to ours.
pub(super) fn check(result: sys::CUresult, call: impl FnOnce() -> String) -> Result<(), CudaError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Driver { call: call(), code: describe(code) }),
    }
}

/// cublasLt's results to ours.
pub(super) fn check_blas(status: lt::cublasStatus_t, call: impl FnOnce() -> String) -> Result<(), CudaError> {
    match status {
        lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(CudaError::Blas { call: call(), status: format!("{status:?}") }),
    }
}

fn describe(code: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver writes a pointer to a text of its own, which lives for ever.
    let found = unsafe { sys::cuGetErrorString(code, &raw mut text) } == sys::CUresult::CUDA_SUCCESS;
    if !found || text.is_null() {
        return format!("{code:?}");
    }
    // SAFETY: a text of the driver that ends with zero, as just checked.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    format!("{code:?} ({text})")
}
