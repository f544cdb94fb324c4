//! `POST /v1/embeddings`: body to request.

use std::sync::Arc;

use serde_json::{Map, Value};
use thalweg_proto::v1;

use crate::auth::Grant;
use crate::error::RouterError;
use crate::models::{ModelEntry, Models};

use super::common::{self, take};
use super::fields::Fields;
use super::limits::INPUTS_MAX;
use super::prompts::PromptField;
use super::{Prompt, restrict};

/// An embeddings request in which every field has been checked, but for the inputs' lengths: those need the tokenizer.
#[derive(Clone)]
pub struct ValidEmbedding {
    model: Arc<ModelEntry>,
    inputs: Vec<Prompt>,
    info: v1::EmbeddingInfo,
    encoding: Encoding,
    dimensions: Option<usize>,
    truncate_to: Option<usize>,
    cache_salt: String,
    /// None: not given.
    priority: Option<i32>,
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    /// Arrays of numbers.
    Float,
    /// Little-endian f32 in base64.
    Base64,
}

/// What the workers of a model say of its embeddings.
pub type EmbeddingsOf<'a> = &'a dyn Fn(&ModelEntry) -> Result<v1::EmbeddingInfo, RouterError>;

/// Reads an embeddings request for one of the models served.
pub fn parse_embedding(
    mut body: Map<String, Value>,
    models: &Models,
    embeddings_of: EmbeddingsOf<'_>,
) -> Result<ValidEmbedding, RouterError> {
    let input = take(&mut body, "input");
    let fields = Fields::new(&body);
    let model = common::model(&fields, models)?;
    if input.is_none() && fields.get("messages").is_some() {
        return Err(fields.error("messages", "is not supported here; send the text as `input`"));
    }
    if fields.boolean("stream")? == Some(true) {
        return Err(fields.error("stream", "is not available here; embeddings come in one piece"));
    }
    fields.string("user")?;
    let info = embeddings_of(&model)?;
    let vocab_size = model.tokenizer.vocab_size();
    let bos = fields.boolean("add_special_tokens")?.unwrap_or(true);
    Ok(ValidEmbedding {
        inputs: PromptField { name: "input", most: INPUTS_MAX, vocab_size, bos }.read(input)?,
        info,
        encoding: encoding(&fields)?,
        dimensions: dimensions(&fields, info.width)?,
        truncate_to: common::truncate_to(&fields, model.max_model_len)?,
        cache_salt: common::cache_salt(&fields)?,
        priority: common::priority(&fields)?,
        model,
    })
}

fn encoding(fields: &Fields<'_>) -> Result<Encoding, RouterError> {
    match fields.string("encoding_format")? {
        None | Some("float") => Ok(Encoding::Float),
        Some("base64") => Ok(Encoding::Base64),
        Some(_) => Err(fields.error("encoding_format", "must be \"float\" or \"base64\"")),
    }
}

fn dimensions(fields: &Fields<'_>, width: u32) -> Result<Option<usize>, RouterError> {
    match fields.count("dimensions", 1)? {
        Some(wanted) if wanted > width => {
            let message =
                format!("is {wanted}, but this model's embeddings have {width} numbers; ask for fewer");
            Err(fields.error("dimensions", message))
        }
        wanted => Ok(wanted.map(|wanted| wanted as usize)),
    }
}

impl ValidEmbedding {
    /// The model asked for.
    pub fn model(&self) -> &Arc<ModelEntry> {
        &self.model
    }

    /// At least one, the first time.
    pub(crate) fn take_inputs(&mut self) -> Vec<Prompt> {
        std::mem::take(&mut self.inputs)
    }

    /// What workers are asked for.
    pub(crate) fn info(&self) -> v1::EmbeddingInfo {
        self.info
    }

    /// How vectors are written.
    pub(crate) fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Numbers of each vector, if fewer than it has.
    pub(crate) fn dimensions(&self) -> Option<usize> {
        self.dimensions
    }

    /// Tokens of an input at most: what is longer is cut, not refused.
    pub(crate) fn truncate_to(&self) -> Option<usize> {
        self.truncate_to
    }

    /// Root of the block hashes, beside the tenant; empty if none.
    pub(crate) fn cache_salt(&self) -> &str {
        &self.cache_salt
    }

    /// Lower runs earlier.
    pub(crate) fn priority(&self) -> i32 {
        self.priority.unwrap_or(0)
    }

    /// Refuses what was explicitly asked for beyond the grant; what was left open stays within it.
    pub(crate) fn restrict(&mut self, grant: &Grant) -> Result<(), RouterError> {
        self.priority = restrict::priority(self.priority, grant)?;
        Ok(())
    }
}
