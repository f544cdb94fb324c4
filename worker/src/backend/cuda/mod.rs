//! The CUDA backend: one worker's GPU. Libraries are opened at run time; kernels come from worker/kernels. Modules stand in the
//! order in which a step meets them.

pub use config::{CudaBackendConfig, OnFault, buffer_bytes};
pub use context::Gpu;
pub use device::CudaBackend;
pub use error::CudaError;
pub use fault::FAULT_EXIT_CODE;
pub use lora::adapter_bytes;
pub use prepare::PreparedBackend;
pub use search::PlanSearch;
pub use weights::{CudaModel, WeightSource, weight_bytes};

mod buffers;
mod clusters;
mod config;
mod device;
mod driver;
mod error;
mod fault;
mod gates;
mod graphs;
mod items;
mod kv;
mod layout;
mod narrow;
mod ops;
mod plan;
mod plan_cache;
mod pooled;
mod prefix;
mod prepare;
mod record;
mod reserved;
mod results;
mod search;
mod shape;
mod slots;
mod staging;
mod step;
#[cfg(test)]
mod testing;
mod timing;
mod transfer;
mod upload;
mod weights;

#[doc(hidden)]
#[allow(missing_docs, reason = "as kernels/common.cuh has it; public for tests of single kernels")]
pub mod abi;
#[doc(hidden)]
#[allow(missing_docs, reason = "public for tests of single kernels")]
pub mod blas;
#[doc(hidden)]
pub mod context;
#[doc(hidden)]
pub mod dry;
#[doc(hidden)]
#[allow(missing_docs, reason = "arguments are those of worker/kernels; public for tests of single kernels")]
pub mod kernels;
#[doc(hidden)]
#[allow(missing_docs, reason = "public for tests of single kernels")]
pub mod launch;
#[doc(hidden)]
#[allow(missing_docs, reason = "public for tests of single kernels")]
pub mod lora;
mod masks;
#[doc(hidden)]
#[allow(missing_docs, reason = "public for tests of single kernels")]
pub mod memory;
