//! One replica: from a gRPC request to sampled tokens. Modules stand in the order in which a request meets them.

#![deny(unsafe_code)]

pub mod backend;
pub mod config;
pub mod engine;
pub mod http;
pub mod kv;
pub mod metrics;
pub mod plan;
pub mod pooling;
pub mod runner;
pub mod sampling;
pub mod scheduler;
pub mod service;
pub mod worker;
