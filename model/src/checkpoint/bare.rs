//! A model without its weights: what dummy weights are made for.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::Checkpoint;
use super::load::{folder_name, rounded};
use crate::config::ModelConfig;
use crate::dtype::DType;
use crate::error::ModelError;
use crate::hub;
use crate::tokenizer::{self, TokenizerBundle};

/// Shape and tokenizer of a model.
#[derive(Clone, Debug)]
pub struct BareModel {
    /// The file's stem or the folder's name.
    pub name: String,
    /// The model's shape.
    pub config: ModelConfig,
    /// The folder's, or a token for each byte where it has none.
    pub tokenizer: TokenizerBundle,
}

impl BareModel {
    /// From a folder with config.json, which needs no weights, or from a GGUF file.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        if !path.is_dir() {
            let checkpoint = Checkpoint::open(path)?;
            let (name, config) = (checkpoint.name().to_owned(), checkpoint.config().clone());
            return Ok(Self { name, config, tokenizer: checkpoint.tokenizer_bundle()? });
        }
        let mut config = hub::read_config(path)?;
        // Dummy weights are bf16.
        config.embedding_scale = rounded(config.embedding_scale, DType::BF16);
        let tokenizer = match path.join("tokenizer.json").exists() {
            true => tokenizer::hub::bundle(path, &config)?,
            false => bytes_as_tokens(path, &config)?,
        };
        Ok(Self { name: folder_name(path)?, config, tokenizer })
    }
}

/// Token n is byte n; ids above stand for nothing.
fn bytes_as_tokens(path: &Path, config: &ModelConfig) -> Result<TokenizerBundle, ModelError> {
    if config.vocab_size < 256 {
        let what = format!("a vocabulary of {} without tokenizer.json", config.vocab_size);
        return Err(ModelError::unsupported(path, what, "give it a tokenizer.json, or at least 256 tokens"));
    }
    let mut others = 0x100..;
    let vocabulary: Map<String, Value> = (0..=255u8)
        .map(|byte| {
            let character = match byte {
                b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
                // GPT-2's way to write the rest visibly.
                _ => others.next().and_then(char::from_u32).unwrap_or_default(),
            };
            (character.to_string(), Value::from(byte))
        })
        .collect();
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let document = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": bytes,
        "post_processor": null,
        "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    });
    Ok(TokenizerBundle {
        tokenizer_json: document.to_string(),
        chat_template: None,
        template_tokens: BTreeMap::new(),
        bos_id: None,
        add_bos: false,
        text_end_id: None,
        eos_ids: Vec::new(),
        vocab_size: config.vocab_size,
        max_position: config.max_position,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::{Specials, Tokenizer};

    #[test]
    fn a_folder_of_config_alone_has_a_token_for_each_byte() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/gpu-models/llama-3.1-8b");
        let model = BareModel::open(&folder).expect("a shape");
        assert_eq!(
            (&*model.name, model.config.num_layers(), model.config.vocab_size),
            ("llama-3.1-8b", 32, 128_256)
        );
        let tokenizer = Tokenizer::new(&model.tokenizer).expect("a tokenizer");
        let text = "wide é\n";
        let ids = tokenizer.encode(text, Specials::Plain, true);
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids, false), text);
        assert_eq!(tokenizer.decode(&[300, 104, 128_255], false), "h");
    }
}
