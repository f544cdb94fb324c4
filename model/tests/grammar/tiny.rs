//! A tokenizer of single bytes and some words, small enough to be told by heart.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use thalweg_model::grammar::{Grammar, GrammarError, GrammarSource, Grammars, JsonBlanks};
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

/// Ids 0 to 255 are bytes.
const WORDS: [&str; 8] = ["{\"", "\":", "true", "yes", "no", "ab", "abc", "\"}"];
/// Control tokens behind the words.
const CONTROL: [&str; 4] = ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"];

/// The two ends of sequence, and a control token that is none.
pub(crate) const EOS: [u32; 2] = [266, 267];
pub(crate) const IM_START: u32 = 265;
/// Rows of the embedding: the last four belong to no token.
pub(crate) const VOCAB: usize = 272;

pub(crate) fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| Tokenizer::new(&bundle(EOS.to_vec())).unwrap())
}

pub(crate) fn grammars() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(|| Grammars::new(tokenizer()).unwrap())
}

pub(crate) fn compile(source: &GrammarSource) -> Result<Grammar, GrammarError> {
    grammars().compile(source, JsonBlanks::default())
}

pub(crate) fn schema(value: &Value) -> GrammarSource {
    GrammarSource::JsonSchema(value.to_string())
}

/// Ids of an ASCII text, a token per byte.
pub(crate) fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

pub(crate) fn bundle(eos_ids: Vec<u32>) -> TokenizerBundle {
    let mut vocab = Map::new();
    let spare: Vec<u8> = (0..=255u8).filter(|b| !is_itself(*b)).collect();
    for byte in 0..=255u8 {
        let shown = match spare.iter().position(|b| *b == byte) {
            Some(at) => char::from_u32(256 + at as u32).unwrap(),
            None => char::from(byte),
        };
        vocab.insert(shown.to_string(), json!(byte));
    }
    WORDS.iter().zip(256..).for_each(|(word, id)| drop(vocab.insert((*word).to_owned(), json!(id))));
    let added: Vec<Value> = CONTROL
        .iter()
        .zip(264..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": true})
        })
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    TokenizerBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: None,
        template_tokens: BTreeMap::new(),
        bos_id: Some(264),
        add_bos: true,
        text_end_id: None,
        eos_ids,
        vocab_size: VOCAB,
        max_position: 512,
    }
}

/// Bytes that byte-level BPE writes as themselves.
fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}
