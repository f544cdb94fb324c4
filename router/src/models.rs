//! Served models by name, as the workers describe them.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use bytes::Bytes;
use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::tokenizer::Tokenizer;

use crate::dialect::Dialect;

/// One served name, of a model or of a LoRA adapter on one. Outlives its workers, so that a name without any is told from
/// an unknown one.
pub struct ModelEntry {
    /// What clients write into `model`.
    pub name: String,
    /// Seconds since the Unix epoch at which this router first saw it.
    pub created: u64,
    /// Fingerprint of the model's weights; part of every block hash.
    pub fingerprint: Bytes,
    /// None: the model as it is.
    pub adapter: Option<AdapterOf>,
    /// Shared by all names of the fingerprint.
    pub tokenizer: Arc<Tokenizer>,
    /// None: the model has no chat template, and chat requests are refused.
    pub template: Option<Arc<ChatTemplate>>,
    /// How it writes tool calls and thoughts.
    pub dialect: Dialect,
    /// Prompt and output together, in tokens: the least of its workers that live.
    pub max_model_len: u32,
    /// Tokens of a KV block.
    pub block_tokens: usize,
}

/// What makes a name that of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterOf {
    /// Main name of the model that it is on.
    pub base: String,
    /// Of the adapter alone; empty where its workers do not say.
    pub fingerprint: Bytes,
}

/// What computes an answer. Workers of the same weights may go on for each other.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Weights {
    /// Fingerprint of the model.
    pub model: Bytes,
    /// Fingerprint of the adapter on it, if there is one.
    pub adapter: Option<Bytes>,
}

impl ModelEntry {
    /// What computes its answers.
    pub fn weights(&self) -> Weights {
        let adapter = self.adapter.as_ref().map(|adapter| adapter.fingerprint.clone());
        Weights { model: self.fingerprint.clone(), adapter }
    }

    /// The adapter as workers and block hashes call it; empty for the model as it is.
    pub fn adapter_name(&self) -> &str {
        if self.adapter.is_some() { &self.name } else { "" }
    }

    /// As messages call it.
    pub(crate) fn described(&self) -> String {
        match &self.adapter {
            None => self.name.clone(),
            Some(adapter) => format!("adapter {} of {}", self.name, adapter.base),
        }
    }
}

/// All served models and adapters; reads never block.
#[derive(Default)]
pub struct Models {
    by_name: ArcSwap<BTreeMap<String, Arc<ModelEntry>>>,
    list: ArcSwap<Vec<Arc<ModelEntry>>>,
}

impl Models {
    /// The model of this name, perhaps of workers that have left.
    pub fn get(&self, name: &str) -> Option<Arc<ModelEntry>> {
        self.by_name.load().get(name).cloned()
    }

    /// Models of known workers by name, then their adapters: clients that take the first mean a model.
    pub fn list(&self) -> Arc<Vec<Arc<ModelEntry>>> {
        self.list.load_full()
    }

    /// All names.
    pub(crate) fn table(&self) -> Arc<BTreeMap<String, Arc<ModelEntry>>> {
        self.by_name.load_full()
    }

    /// Puts a new table in place, of which those names are listed for which it holds.
    pub(crate) fn replace(
        &self,
        table: BTreeMap<String, Arc<ModelEntry>>,
        is_listed: impl Fn(&ModelEntry) -> bool,
    ) {
        let mut list: Vec<_> = table.values().filter(|entry| is_listed(entry)).cloned().collect();
        list.sort_by_key(|entry| entry.adapter.is_some());
        self.by_name.store(Arc::new(table));
        self.list.store(Arc::new(list));
    }
}
