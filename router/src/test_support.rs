//! A served model for unit tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::tokenizer::Tokenizer;

use crate::dialect::Dialect;
use crate::models::{ModelEntry, Models};

#[path = "../tests/support/tokenizer.rs"]
pub(crate) mod tokenizer;

/// A model of one token per byte, with a context of 512 tokens.
pub(crate) fn entry(name: &str, with_template: bool) -> Arc<ModelEntry> {
    let bundle = tokenizer::bundle(with_template, 512);
    let template = bundle
        .chat_template
        .as_ref()
        .map(|source| Arc::new(ChatTemplate::new(source, &bundle).expect("the template compiles")));
    Arc::new(ModelEntry {
        name: name.to_owned(),
        created: 1_700_000_000,
        fingerprint: bytes::Bytes::from_static(b"fingerprint"),
        adapter: None,
        tokenizer: Arc::new(Tokenizer::new(&bundle).expect("the tokenizer loads")),
        dialect: Dialect::of(template.as_deref()),
        template,
        max_model_len: 512,
        block_tokens: 16,
    })
}

/// `tiny` with a chat template and `base` without.
pub(crate) fn models() -> Models {
    let models = Models::default();
    let table = [entry("tiny", true), entry("base", false)].map(|m| (m.name.clone(), m));
    models.replace(BTreeMap::from(table));
    models
}
