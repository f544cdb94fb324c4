//! Served models by name, as the workers describe them.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::tokenizer::Tokenizer;

use crate::dialect::Dialect;

/// One served name. Outlives its workers, so that a model without any is told from an unknown one.
pub struct ModelEntry {
    /// What clients write into `model`.
    pub name: String,
    /// Seconds since the Unix epoch at which this router first saw it.
    pub created: u64,
    /// Fingerprint of the weights; part of every block hash.
    pub fingerprint: Bytes,
    /// Shared by all names of the fingerprint.
    pub tokenizer: Arc<Tokenizer>,
    /// None: the model has no chat template, and chat requests are refused.
    pub template: Option<Arc<ChatTemplate>>,
    /// How it writes tool calls and thoughts.
    pub dialect: Dialect,
    /// Prompt and output together, in tokens: the least of its workers.
    pub max_model_len: u32,
    /// Tokens of a KV block.
    pub block_tokens: usize,
}

/// All served models; reads never block.
#[derive(Default)]
pub struct Models {
    by_name: ArcSwap<BTreeMap<String, Arc<ModelEntry>>>,
}

impl Models {
    /// The model of this name.
    pub fn get(&self, name: &str) -> Option<Arc<ModelEntry>> {
        self.by_name.load().get(name).cloned()
    }

    /// All models by name.
    pub fn list(&self) -> Vec<Arc<ModelEntry>> {
        self.by_name.load().values().cloned().collect()
    }

    /// Puts a new table in place.
    pub(crate) fn replace(&self, table: BTreeMap<String, Arc<ModelEntry>>) {
        self.by_name.store(Arc::new(table));
    }
}
