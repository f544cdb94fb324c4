//! Blocks, scheduler and engine over a model that is a hash of what it sees: any wrong block, position or stale KV shows
//! as a wrong token. The same schedules then run on the CPU backend, against the sequence alone.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails, and prints its seed"
)]

mod block_pool;
mod cases;
mod constraints;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod ends;
mod engines;
mod grammars;
mod hash_model;
mod properties;
mod streams;
mod workload;
