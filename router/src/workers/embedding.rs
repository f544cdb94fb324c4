//! What the workers of a model say of its embeddings.

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use super::Workers;
use super::health::HealthState;
use crate::error::RouterError;
use crate::models::ModelEntry;

/// How workers say that they embed prompts. Others would write an answer.
pub(crate) const EMBED: &str = "embed";

impl Workers {
    /// Width and pooling of a model's embeddings, as the first of its workers that makes any says: all are asked for the same.
    /// An error when none does.
    pub(crate) fn embedding(&self, model: &ModelEntry) -> Result<v1::EmbeddingInfo, RouterError> {
        let list = self.list();
        let serves = |w: &&std::sync::Arc<super::Worker>| w.state() != HealthState::Gone && w.serves(model);
        let mut serving = list.iter().filter(serves).peekable();
        if serving.peek().is_none() {
            let message = format!("no worker serves {} at present; start one or try again later", model.name);
            return Err(RouterError::new(ErrorCode::Unavailable, message));
        }
        let told = serving.filter(|w| w.has_feature(EMBED)).find_map(|w| w.about.embedding);
        told.filter(|told| told.width > 0).ok_or_else(|| no_embeddings(&model.name))
    }
}

/// None of a model's workers makes embeddings.
pub(crate) fn no_embeddings(model: &str) -> RouterError {
    let message = format!(
        "no worker of {model} makes embeddings; start one of this version whose model has a pooling that is served, or \
         give it --pooling-type"
    );
    RouterError::new(ErrorCode::Unavailable, message)
}
