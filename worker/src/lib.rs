//! One replica: from a gRPC request to sampled tokens. Modules stand in the order in which a request meets them.

pub mod config;
pub mod worker;
pub mod http;
pub mod service;
pub mod engine;
pub mod scheduler;
pub mod kv;
pub mod plan;
pub mod sampling;
pub mod runner;
pub mod backend;
pub mod metrics;
