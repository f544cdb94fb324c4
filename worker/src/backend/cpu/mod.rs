//! The CPU backend: weights packed for vector instructions, a paged KV cache, and every operation bitwise independent of batch
//! mates, chunking and thread count. Modules stand in the order in which a step meets them.

#[cfg(feature = "cuda")]
pub(crate) use adapter::Product;
pub use adapter::RANK_MAX;
pub use config::{BLOCK_TOKENS, CpuBackendConfig, kv_block_bytes, logit_rows_per_pass, scratch_bytes};
pub use device::CpuBackend;
pub use kv_dtype::KvDtype;
pub use memory::{OutOfMemory, available_bytes};
pub use model::{CpuModel, LoadError};

mod adapter;
mod arena;
mod attention;
mod buffers;
mod config;
mod device;
mod float8;
mod heads;
pub mod isa;
mod kv;
mod kv_dtype;
mod lanes;
pub mod linear;
mod memory;
mod model;
pub mod pool;
mod pooled;
mod rows;
#[cfg(test)]
mod rows_tests;
mod sample;
mod slots;
mod step;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
