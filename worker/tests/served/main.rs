//! Workers over real gRPC, on real models and simulated. One binary: each would compile the whole service anew.

mod adapters;
mod embeddings;
mod fixture;
mod resume;
mod service;
mod sim;
#[path = "../support/mod.rs"]
mod support;
