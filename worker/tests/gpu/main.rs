//! The CUDA backend on a GPU: single kernels against plain arithmetic on the CPU, then whole models against the CPU backend and
//! other engines. Without a GPU every test fails and says so; `make test-gpu` runs them.
#![cfg(feature = "cuda")]
#![allow(unsafe_code, reason = "kernels are launched on memory of the test's own")]
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails, and prints what it saw"
)]

mod adapters;
mod attention;
mod clusters;
mod draws;
mod embeddings;
mod faults;
mod few;
mod gemm;
mod golden;
mod large;
mod layers;
mod lora;
mod memory;
mod models;
mod paged;
mod plan_search;
#[path = "../support/plans.rs"]
mod plans;
mod pool;
mod rows;
mod sampling;
mod shared;
mod support;
