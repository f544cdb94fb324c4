//! Checkpoints of both formats: what they say, and how faulty ones are refused.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and prints its seed"
)]

#[path = "../support/mod.rs"]
mod support;

mod adapters;
mod config;
mod dequantize;
mod files;
mod gguf;
mod pooling;
mod real_models;
mod tiny_models;
