//! Whether a worker embeds prompts, and how.

use thalweg_model::pooling::PoolingSetting;

use super::{Loaded, Ready};
use crate::backend::Backend;
use crate::backend::cpu::CpuBackend;
#[cfg(feature = "cuda")]
use crate::backend::cuda::CudaBackend;
use crate::config::{PoolingType, WorkerConfig};
use crate::pooling::Pooling;
use crate::worker::StartError;

/// What embeddings are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Values of each.
    pub width: usize,
    /// What they are made of unless a request says otherwise.
    pub pooling: Pooling,
}

/// As the flag says, else the checkpoint, else the last token. None where the device does not pool, or where the checkpoint
/// wants what there is not.
pub(super) fn of(ready: &Ready, config: &WorkerConfig) -> Result<Option<Embedding>, StartError> {
    let (wanted, width) = (config.pooling_type, ready.hidden_size);
    match (ready.loaded.embeds(), wanted, &ready.pooling) {
        (false, Some(wanted), _) => {
            let reason = "GPUs make no embeddings yet; leave it out, or serve the model with --device cpu";
            Err(StartError::config("pooling-type", format!("{wanted:?}").to_lowercase(), reason))
        }
        (false, None, _) => Ok(None),
        (true, Some(PoolingType::Last), _) => Ok(Some(Embedding { width, pooling: Pooling::Last })),
        (true, Some(PoolingType::Mean), _) => Ok(Some(Embedding { width, pooling: Pooling::Mean })),
        (true, None, PoolingSetting::Set(pooling)) => Ok(Some(Embedding { width, pooling: *pooling })),
        (true, None, PoolingSetting::Unset) => Ok(Some(Embedding { width, pooling: Pooling::Last })),
        (true, None, PoolingSetting::Unsupported(reason)) => {
            tracing::info!(
                reason,
                "the model's own way to embed is not served; --pooling-type chooses another one"
            );
            Ok(None)
        }
    }
}

impl Loaded {
    fn embeds(&self) -> bool {
        match self {
            Self::Cpu(_) => CpuBackend::EMBEDS,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => CudaBackend::EMBEDS,
            Self::Sim(_) => true,
        }
    }
}

/// What the user guide says; a backend that learns it changes that page too.
#[cfg(all(test, feature = "cuda"))]
const _: () = assert!(!CudaBackend::EMBEDS && CpuBackend::EMBEDS);
