//! Grammars over the hash model's 64 ids, and over a real vocabulary.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use thalweg_model::grammar::{Grammar, GrammarSource, Grammars, JsonBlanks};
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use crate::hash_model::VOCAB;

/// Ids that end a sequence, as requests of the workload know them.
pub(crate) const EOS: [u32; 2] = [3, 9];

/// A JSON schema, a regular expression, choices, and a recursive grammar: some end soon, some go on as long as they may.
const SCHEMA: &str = r#"{"type": "object", "properties": {"a": {"enum": ["b", "cd", "cde"]}, "n": {"type": "integer"}},
    "required": ["a"], "additionalProperties": false}"#;

/// Over the hash model's vocabulary.
pub(crate) fn grammars() -> Vec<Grammar> {
    static GRAMMARS: OnceLock<Vec<Grammar>> = OnceLock::new();
    GRAMMARS.get_or_init(|| compile(&tokenizer())).clone()
}

/// Over any vocabulary.
pub(crate) fn compile(tokenizer: &Tokenizer) -> Vec<Grammar> {
    let grammars = Grammars::new(tokenizer).unwrap();
    let choices = ["abc", "abd", "x", "xyz"].map(String::from).to_vec();
    let sources = [
        GrammarSource::JsonSchema(SCHEMA.into()),
        GrammarSource::JsonObject,
        GrammarSource::Regex("[a-j]{2,12}".into()),
        GrammarSource::Choice(choices),
        GrammarSource::Lark("start: \"a\" | \"(\" start \")\" | start \"b\"".into()),
    ];
    sources.iter().map(|source| grammars.compile(source, JsonBlanks::default()).unwrap()).collect()
}

/// A character an id, some of two, and two control tokens.
fn tokenizer() -> Tokenizer {
    let texts = "{}\":,[]()-0123456789abcdefghijklmnopqrstuvwxyz".chars().map(String::from);
    let texts = texts
        .chain(["\":", "{\"", "\"}", "ab", "cd", "((", "))", "12", "bb", "\",\"", "xy"].map(String::from));
    let ids = (0..VOCAB).filter(|id| !EOS.contains(id));
    let vocab: Map<String, Value> = texts.zip(ids).map(|(text, id)| (text, json!(id))).collect();
    let control = |id: u32| {
        json!({"id": id, "content": format!("<|{id}|>"), "special": true, "single_word": false,
                                   "lstrip": false, "rstrip": false, "normalized": false})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": EOS.map(control), "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    let bundle = TokenizerBundle {
        tokenizer_json: tokenizer.to_string(),
        chat_template: None,
        template_tokens: BTreeMap::new(),
        bos_id: None,
        add_bos: false,
        text_end_id: None,
        eos_ids: EOS.to_vec(),
        vocab_size: VOCAB as usize,
        max_position: 128,
    };
    Tokenizer::new(&bundle).unwrap()
}
