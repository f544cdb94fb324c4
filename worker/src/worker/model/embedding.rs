//! How a worker embeds prompts.

use thalweg_model::pooling::PoolingSetting;

use super::Ready;
use crate::config::{PoolingType, WorkerConfig};
use crate::pooling::Pooling;

/// What embeddings are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Values of each.
    pub width: usize,
    /// What they are made of unless a request says otherwise.
    pub pooling: Pooling,
}

/// As the flag says, else the checkpoint, else the last token. None where the checkpoint wants what there is not.
pub(super) fn of(ready: &Ready, config: &WorkerConfig) -> Option<Embedding> {
    let pooling = match (config.pooling_type, &ready.pooling) {
        (Some(PoolingType::Last), _) => Pooling::Last,
        (Some(PoolingType::Mean), _) => Pooling::Mean,
        (None, PoolingSetting::Set(pooling)) => *pooling,
        (None, PoolingSetting::Unset) => Pooling::Last,
        (None, PoolingSetting::Unsupported(reason)) => {
            tracing::info!(
                reason,
                "the model's own way to embed is not served; --pooling-type chooses another one"
            );
            return None;
        }
    };
    Some(Embedding { width: ready.hidden_size, pooling })
}
