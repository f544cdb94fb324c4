//! Why a worker does not start. Each says what to change.

use std::path::PathBuf;

use thalweg_model::error::ModelError;

use crate::backend::BackendError;
use crate::backend::cpu::LoadError;
use crate::config::ByteSize;
use crate::engine::EngineError;
use crate::http::HttpError;
use crate::kv::KvPlanError;
use crate::runner::sim::ProfileError;
use crate::service::GrpcError;

/// The worker did not start; nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A flag contradicts another one, the model or this build.
    #[error("--{flag} {value}: {reason}")]
    Config {
        /// Flag without dashes.
        flag: &'static str,
        /// As given.
        value: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The checkpoint cannot be served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The chat template file cannot be read.
    #[error("--chat-template {}: {source}", path.display())]
    ChatTemplate {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The backend cannot take the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// More memory than there is.
    #[error(
        "the model does not fit in memory: {weights} of weights + {workers} x {kv} of KV cache + {workers} x {scratch} \
         of buffers are {needed}, but {available} are available; lower --kv-cache-memory-bytes{fewer_workers}, or take \
         a smaller or more quantised model",
        fewer_workers = if *workers > 1 { " or --workers" } else { "" }
    )]
    Memory {
        /// Bytes of packed weights.
        weights: ByteSize,
        /// Workers of this process.
        workers: u64,
        /// KV cache of each.
        kv: ByteSize,
        /// Activations and logits of each.
        scratch: ByteSize,
        /// The sum.
        needed: ByteSize,
        /// What the machine, or the container's limit, leaves.
        available: ByteSize,
    },
    /// Not one sequence fits in the KV cache.
    #[error(transparent)]
    Kv(#[from] KvPlanError),
    /// The engine refused its configuration.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// What a simulation is told makes no sense.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// gRPC cannot listen.
    #[error(transparent)]
    Grpc(#[from] GrpcError),
    /// Metrics cannot listen.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The GPU cannot take the model.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::backend::cuda::CudaError),
    /// A fault of ours.
    #[error("loading the model panicked: {0}")]
    Panicked(String),
}

impl StartError {
    pub(super) fn panicked(error: tokio::task::JoinError) -> Self {
        Self::Panicked(error.to_string())
    }

    pub(super) fn config(flag: &'static str, value: impl ToString, reason: impl Into<String>) -> Self {
        Self::Config { flag, value: value.to_string(), reason: reason.into() }
    }
}
