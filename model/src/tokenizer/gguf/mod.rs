//! A tokenizer.json from GGUF's metadata.

mod document;
mod pre_tokenizer;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hashbrown::HashMap;

use self::document::{Document, Family};
use self::pre_tokenizer::PreTokenizer;
use super::{TokenizerBundle, spm};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::gguf::Metadata;

/// Texts that end a turn or a document in the models that we know; files often name only one of theirs.
const END_TEXTS: [&str; 10] = [
    "<|im_end|>",
    "<end_of_turn>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
];

/// Type ids of tokens.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Reads the keys under `tokenizer.`.
pub(crate) fn bundle(
    metadata: &Metadata,
    config: &ModelConfig,
    path: &Path,
) -> Result<TokenizerBundle, ModelError> {
    let vocabulary = Vocabulary::read(metadata, config, path)?;
    let kind = metadata.string("tokenizer.ggml.model")?.unwrap_or_default();
    let (family, bos_by_default) = match kind {
        "llama" => (vocabulary.spm(metadata)?, true),
        "gpt2" => {
            let name = metadata.string("tokenizer.ggml.pre")?.unwrap_or("default");
            let pre_tokenizer = PreTokenizer::named(name, path)?;
            (vocabulary.byte_level(metadata, pre_tokenizer)?, pre_tokenizer.adds_bos())
        }
        "" => return Err(vocabulary.malformed("metadata key `tokenizer.ggml.model` is missing")),
        other => {
            return Err(ModelError::unsupported(
                path,
                format!("tokenizer model `{other}`"),
                "use a GGUF file whose `tokenizer.ggml.model` is llama or gpt2, or a folder with a tokenizer.json",
            ));
        }
    };
    let bos_id = vocabulary.token_id(metadata, "bos")?;
    let add_bos =
        metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(bos_by_default) && bos_id.is_some();
    let ends = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
    let text_end_id = if ends { vocabulary.token_id(metadata, "eos")? } else { None };
    Ok(TokenizerBundle {
        text_end_id,
        tokenizer_json: Document { vocabulary: &vocabulary, family: &family }.to_json(),
        chat_template: metadata.string("tokenizer.chat_template")?.map(str::to_owned),
        template_tokens: vocabulary.template_tokens(metadata)?,
        bos_id,
        add_bos,
        eos_ids: vocabulary.eos_ids(metadata)?,
        vocab_size: config.vocab_size,
        max_position: config.max_position,
    })
}

/// The token list, checked against the model.
struct Vocabulary<'a> {
    path: &'a Path,
    tokens: Vec<&'a str>,
    kinds: Vec<i64>,
    /// The first id of each text.
    ids: HashMap<&'a str, u32>,
    /// By id: no token before it has the same text.
    first: Vec<bool>,
}

impl<'a> Vocabulary<'a> {
    fn read(metadata: &'a Metadata, config: &ModelConfig, path: &'a Path) -> Result<Self, ModelError> {
        let missing = |key: &str| ModelError::malformed(path, format!("metadata key `{key}` is missing"));
        let malformed = |reason: String| ModelError::malformed(path, reason);
        let key = "tokenizer.ggml.tokens";
        let strings = metadata.strings(key)?.ok_or_else(|| missing(key))?;
        let count = strings.len();
        let tokens: Vec<&str> = strings.collect();
        if count == 0 || tokens.len() != count {
            return Err(malformed(format!(
                "`{key}` holds {count} tokens, of which {} are readable",
                tokens.len()
            )));
        }
        if count > config.vocab_size {
            let rows = config.vocab_size;
            return Err(malformed(format!(
                "`{key}` has {count} tokens where the model has {rows} embedding rows"
            )));
        }
        let kinds: Vec<i64> = match metadata.ints("tokenizer.ggml.token_type")? {
            Some(kinds) => kinds.collect(),
            None => vec![1; count],
        };
        if kinds.len() != count {
            let found = kinds.len();
            return Err(malformed(format!(
                "`tokenizer.ggml.token_type` has {found} entries for {count} tokens"
            )));
        }
        let mut ids = HashMap::with_capacity(count);
        let first = (0..count as u32).zip(&tokens).map(|(id, token)| *ids.entry(*token).or_insert(id) == id);
        let first = first.collect();
        Ok(Self { path, tokens, kinds, ids, first })
    }

    fn byte_level(
        &self,
        metadata: &'a Metadata,
        pre_tokenizer: PreTokenizer,
    ) -> Result<Family<'a>, ModelError> {
        let key = "tokenizer.ggml.merges";
        let strings = metadata
            .strings(key)?
            .ok_or_else(|| self.malformed(format!("metadata key `{key}` is missing")))?;
        let mut merges = Vec::with_capacity(strings.len());
        for rule in strings {
            // The separator is the first space behind the first character.
            let space = rule.char_indices().skip(1).find(|(_, char)| *char == ' ').map(|(at, _)| at);
            let Some((left, right)) = space.map(|at| (&rule[..at], &rule[at + 1..])) else {
                return Err(self.malformed(format!("`{key}` has `{rule}`, expected two tokens")));
            };
            let known = |token: &str| self.ids.contains_key(token);
            if !known(left) || !known(right) || !known(&format!("{left}{right}")) {
                return Err(
                    self.malformed(format!("`{key}` has `{rule}`, which names tokens that do not exist"))
                );
            }
            merges.push((left, right));
        }
        Ok(Family::ByteLevel { pre_tokenizer, merges })
    }

    fn spm(&self, metadata: &'a Metadata) -> Result<Family<'a>, ModelError> {
        let key = "tokenizer.ggml.scores";
        let scores: Vec<f32> = match metadata.floats(key)? {
            Some(scores) => scores.collect(),
            None => return Err(self.malformed(format!("metadata key `{key}` is missing"))),
        };
        if scores.len() != self.tokens.len() {
            let (found, count) = (scores.len(), self.tokens.len());
            return Err(self.malformed(format!("`{key}` has {found} entries for {count} tokens")));
        }
        let plain = |id: usize| !matches!(self.kinds[id], UNKNOWN | CONTROL | USER_DEFINED | BYTE);
        Ok(Family::Spm {
            merges: spm::merges(&self.tokens, &scores, &self.ids, plain),
            unk: self.token_id(metadata, "unknown")?.map(|id| self.tokens[id as usize]),
            space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
        })
    }

    /// The id under `tokenizer.ggml.NAME_token_id`.
    fn token_id(&self, metadata: &Metadata, name: &str) -> Result<Option<u32>, ModelError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match metadata.u32(&key)? {
            Some(id) if id as usize >= self.tokens.len() => {
                let count = self.tokens.len();
                Err(self.malformed(format!("`{key}` is {id}, but there are only {count} tokens")))
            }
            id => Ok(id),
        }
    }

    fn template_tokens(&self, metadata: &Metadata) -> Result<BTreeMap<String, String>, ModelError> {
        let names =
            [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"), ("seperator", "sep")];
        let mut tokens = BTreeMap::new();
        for (key, name) in names {
            if let Some(id) = self.token_id(metadata, key)? {
                tokens.insert(format!("{name}_token"), self.tokens[id as usize].to_owned());
            }
        }
        Ok(tokens)
    }

    fn eos_ids(&self, metadata: &Metadata) -> Result<Vec<u32>, ModelError> {
        let mut ids = BTreeSet::new();
        for name in ["eos", "eot", "eom"] {
            ids.extend(self.token_id(metadata, name)?);
        }
        let known = END_TEXTS.iter().filter_map(|text| self.ids.get(text).copied());
        ids.extend(known.filter(|id| matches!(self.kinds[*id as usize], CONTROL | USER_DEFINED)));
        Ok(ids.into_iter().collect())
    }

    fn malformed(&self, reason: impl Into<String>) -> ModelError {
        ModelError::malformed(self.path, reason)
    }
}
