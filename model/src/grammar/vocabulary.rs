//! A tokenizer's vocabulary as the grammar library wants it.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use super::compile::GrammarError;
use crate::tokenizer::Tokenizer;

/// What is known of control tokens, beside the trie of all others.
pub(super) struct Vocabulary {
    pub(super) trie: TokEnv,
    /// Ids without text: control tokens, what ends a sequence, padding.
    pub(super) control: SimpleVob,
    /// What ends a sequence.
    pub(super) eos_ids: Vec<u32>,
}

impl Vocabulary {
    /// The id stands for no text.
    pub(super) fn is_control(&self, id: u32) -> bool {
        (id as usize) < self.control.len() && self.control.is_allowed(id)
    }

    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let size = tokenizer.vocab_size();
        let eos_ids: Vec<u32> =
            tokenizer.bundle().eos_ids.iter().copied().filter(|id| (*id as usize) < size).collect();
        let mut control = SimpleVob::alloc(size);
        let words: Vec<Vec<u8>> = (0..size as u32)
            .map(|id| {
                let is_text = !tokenizer.is_special(id) && !eos_ids.contains(&id);
                let word = if is_text { word(tokenizer.token_bytes(id)) } else { Vec::new() };
                if word.is_empty() {
                    control.allow_token(id);
                }
                word
            })
            .collect();
        let Some(first) = eos_ids.first() else {
            let reason = "the model has no end of sequence token, so that nothing could end an answer";
            return Err(GrammarError::Model { reason: reason.into() });
        };
        let trie = TokTrie::from(&TokRxInfo::new(size as u32, *first), &words).with_eos_tokens(&eos_ids);
        Ok(Self { trie: Arc::new(ApproximateTokEnv::new(trie)), control, eos_ids })
    }
}

/// Text of a token. The byte 0xFF, which no UTF-8 has, is the library's mark of control tokens; and its trie takes words of
/// up to 255 bytes.
fn word(bytes: Vec<u8>) -> Vec<u8> {
    if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) || bytes.len() > WORD_BYTES_MAX {
        Vec::new()
    } else {
        bytes
    }
}

const WORD_BYTES_MAX: usize = 255;
