//! The contract between the parts: generated gRPC code, ids, block hashes, error codes, and what values options may have.
#![forbid(unsafe_code)]

pub mod block_hash;
pub mod code;
pub mod ids;
pub mod value;

/// Version 1 of the wire protocol, as generated from `proto/thalweg/v1`.
#[allow(missing_docs, clippy::all, unreachable_pub)]
pub mod v1 {
    tonic::include_proto!("thalweg.v1");
}

/// Encoded `FileDescriptorSet` of the protocol, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Oldest and newest protocol version that this build speaks.
pub const PROTOCOL: std::ops::RangeInclusive<u32> = 1..=1;

/// Largest gRPC message taken or sent, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;
