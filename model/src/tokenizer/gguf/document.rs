//! Writing the tokenizer.json, without a copy of the vocabulary on the way.

use std::borrow::Cow;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use super::pre_tokenizer::PreTokenizer;
use super::{CONTROL, USER_DEFINED, Vocabulary, spm};

/// What differs between the two kinds of BPE.
pub(super) enum Family<'a> {
    /// GPT-2's: over bytes written as characters.
    ByteLevel { pre_tokenizer: PreTokenizer, merges: Vec<(&'a str, &'a str)> },
    /// SentencePiece's: over characters, unknown ones as bytes.
    Spm { merges: Vec<(&'a str, &'a str)>, unk: Option<&'a str>, space_prefix: bool },
}

/// A tokenizer.json.
pub(super) struct Document<'a> {
    pub(super) vocabulary: &'a Vocabulary<'a>,
    pub(super) family: &'a Family<'a>,
}

#[derive(Serialize)]
struct Root<'a> {
    version: &'static str,
    truncation: Value,
    padding: Value,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Model<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: u32,
    content: Cow<'a, str>,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Model<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Value,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Value,
    end_of_word_suffix: Value,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Ids<'a>,
    merges: &'a [(&'a str, &'a str)],
}

struct Ids<'a>(&'a Document<'a>);

impl Document<'_> {
    pub(super) fn to_json(&self) -> String {
        let root = Root {
            version: "1.0",
            truncation: Value::Null,
            padding: Value::Null,
            added_tokens: self.added_tokens(),
            normalizer: self.family.normalizer(),
            pre_tokenizer: self.family.pre_tokenizer(),
            post_processor: Value::Null,
            decoder: self.family.decoder(),
            model: self.model(),
        };
        serde_json::to_string(&root).expect("strings and numbers can be written as JSON")
    }

    /// Control tokens, and those that text becomes before any merge.
    fn added_tokens(&self) -> Vec<AddedToken<'_>> {
        let kinds = self.vocabulary.kinds.iter().enumerate();
        let added = kinds.filter(|(_, kind)| matches!(**kind, CONTROL | USER_DEFINED));
        added
            .filter(|(id, _)| self.vocabulary.first[*id])
            .map(|(id, kind)| AddedToken {
                id: id as u32,
                content: self.text(id),
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special: *kind == CONTROL,
            })
            .collect()
    }

    fn model(&self) -> Model<'_> {
        let (merges, unk_token, spm, ignore_merges) = match self.family {
            Family::ByteLevel { pre_tokenizer, merges } => {
                (merges, None, false, pre_tokenizer.ignores_merges())
            }
            Family::Spm { merges, unk, .. } => (merges, *unk, true, false),
        };
        Model {
            kind: "BPE",
            dropout: Value::Null,
            unk_token,
            continuing_subword_prefix: Value::Null,
            end_of_word_suffix: Value::Null,
            fuse_unk: spm,
            byte_fallback: spm,
            ignore_merges,
            vocab: Ids(self),
            merges,
        }
    }

    /// The token as the tokenizers crate looks for it: user-defined ones of SentencePiece in the text as it comes,
    /// with plain spaces.
    fn text(&self, id: usize) -> Cow<'_, str> {
        let token = self.vocabulary.tokens[id];
        let spm = matches!(self.family, Family::Spm { .. });
        if spm && self.vocabulary.kinds[id] == USER_DEFINED && token.contains(spm::SPACE) {
            Cow::Owned(token.replace(spm::SPACE, " "))
        } else {
            Cow::Borrowed(token)
        }
    }
}

impl Serialize for Ids<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.vocabulary.ids.len()))?;
        let first = &self.0.vocabulary.first;
        for id in (0..first.len()).filter(|id| first[*id]) {
            map.serialize_entry(&self.0.text(id), &id)?;
        }
        map.end()
    }
}

impl Family<'_> {
    fn normalizer(&self) -> Value {
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        match self {
            Self::ByteLevel { pre_tokenizer, .. } => pre_tokenizer.normalizer(),
            Self::Spm { space_prefix: false, .. } => spaces,
            Self::Spm { .. } => {
                json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]})
            }
        }
    }

    fn pre_tokenizer(&self) -> Value {
        match self {
            Self::ByteLevel { pre_tokenizer, .. } => pre_tokenizer.to_json(),
            Self::Spm { .. } => Value::Null,
        }
    }

    fn decoder(&self) -> Value {
        let Self::Spm { space_prefix, .. } = self else {
            return json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        };
        let mut steps = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if *space_prefix {
            steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        json!({"type": "Sequence", "decoders": steps})
    }
}
