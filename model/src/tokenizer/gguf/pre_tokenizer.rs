//! The rules that cut text into words before BPE, by the names that GGUF gives them.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::ModelError;

/// Words of Llama 3 and, but for the run of digits, of Qwen 2.
const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of Mistral's Tekken, which also cut where the case changes.
const TEKKEN_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A set of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreTokenizer {
    Gpt2,
    /// GPT-2's, each digit alone.
    Digits,
    Llama3,
    Qwen2,
    Tekken,
}

impl PreTokenizer {
    pub(super) fn named(name: &str, path: &Path) -> Result<Self, ModelError> {
        match name {
            "default" | "gpt-2" | "gpt2" | "phi-2" | "olmo" | "jina-es" | "jina-de" | "roberta-bpe" => {
                Ok(Self::Gpt2)
            }
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => Ok(Self::Digits),
            "llama-bpe" | "llama3" | "llama-v3" | "dbrx" | "smaug-bpe" => Ok(Self::Llama3),
            "qwen2" | "deepseek-r1-qwen" => Ok(Self::Qwen2),
            "tekken" => Ok(Self::Tekken),
            _ => Err(ModelError::unsupported(
                path,
                format!("pre-tokenizer `{name}`"),
                "use the model's original folder, whose tokenizer.json says how to cut words",
            )),
        }
    }

    /// Files that do not say whether prompts begin with BOS mean this.
    pub(super) fn adds_bos(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    /// Words that are tokens are not merged up from bytes.
    pub(super) fn ignores_merges(self) -> bool {
        matches!(self, Self::Llama3 | Self::Tekken)
    }

    pub(super) fn normalizer(self) -> Value {
        if self == Self::Qwen2 { json!({"type": "NFC"}) } else { Value::Null }
    }

    pub(super) fn to_json(self) -> Value {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let first = match self {
            Self::Gpt2 => return bytes(true),
            Self::Digits => json!({"type": "Digits", "individual_digits": true}),
            Self::Llama3 => words(LLAMA3_WORDS),
            Self::Qwen2 => words(QWEN2_WORDS),
            Self::Tekken => words(TEKKEN_WORDS),
        };
        json!({"type": "Sequence", "pretokenizers": [first, bytes(self == Self::Digits)]})
    }
}

fn words(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}
