//! The parts of a tokenizer.json that are read here, besides what the tokenizers crate reads.

use std::path::Path;

use serde::Deserialize;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{Model, PreTokenizerWrapper};

use super::Inner;
use crate::error::ModelError;

/// A tokenizer.json without its vocabulary.
#[derive(Debug, Deserialize)]
pub(super) struct Description {
    #[serde(default)]
    pub(super) added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub(super) decoder: Option<serde_json::Value>,
    #[serde(default)]
    pub(super) post_processor: Option<serde_json::Value>,
    model: ModelType,
}

/// An entry of `added_tokens`.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    pub(super) content: String,
    #[serde(default)]
    pub(super) special: bool,
    #[serde(default)]
    pub(super) lstrip: bool,
    #[serde(default)]
    pub(super) rstrip: bool,
}

#[derive(Debug, Deserialize)]
struct ModelType {
    #[serde(rename = "type")]
    kind: Option<String>,
}

impl Description {
    /// Reads it, and refuses what is no BPE.
    pub(super) fn parse(json: &str) -> Result<Self, ModelError> {
        Self::parse_file(json, Path::new("tokenizer.json"))
    }

    /// The same, for a message that names the file.
    pub(super) fn parse_file(json: &str, path: &Path) -> Result<Self, ModelError> {
        let description: Self = serde_json::from_str(json)
            .map_err(|error| ModelError::malformed(path, format!("not a tokenizer.json: {error}")))?;
        match description.model.kind.as_deref() {
            None | Some("BPE") => Ok(description),
            Some(other) => Err(ModelError::unsupported(
                path,
                format!("tokenizer model `{other}`"),
                "use a model with a BPE tokenizer, as all of its families have",
            )),
        }
    }
}

/// An error about the tokenizer.json of a bundle, which has no path of its own.
pub(super) fn malformed(reason: String) -> ModelError {
    ModelError::malformed(Path::new("tokenizer.json"), reason)
}

/// A Metaspace that prefixes only the first section of a text cannot tell sections apart once they come one by one:
/// takes the rule out and says whether there was one.
pub(super) fn take_first_prefix(inner: &mut Inner) -> bool {
    let Some(PreTokenizerWrapper::Metaspace(metaspace)) = inner.get_pre_tokenizer() else { return false };
    if metaspace.get_prepend_scheme() != PrependScheme::First {
        return false;
    }
    let plain = Metaspace::new(metaspace.get_replacement(), PrependScheme::Never, metaspace.get_split());
    inner.with_pre_tokenizer(Some(PreTokenizerWrapper::Metaspace(plain)));
    true
}

/// An unk token that is not in the vocabulary would make encoding fail at the first unknown character.
pub(super) fn check_unk(inner: &Inner) -> Result<(), ModelError> {
    match &inner.get_model().unk_token {
        Some(unk) if inner.get_model().token_to_id(unk).is_none() => {
            Err(malformed(format!("names unk_token `{unk}`, which its vocabulary lacks")))
        }
        _ => Ok(()),
    }
}
