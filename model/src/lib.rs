//! What a checkpoint says: its configuration, tensors, tokenizer and chat template; and what adapters change.

#![deny(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod gguf;
mod hub;

pub mod adapter;

pub mod dequantize;
pub mod dtype;
pub mod error;
mod mmap;
mod tensors;

pub mod pooling;

pub mod chat_template;
pub mod grammar;
pub mod tokenizer;
