//! One answer's way through a grammar.

use std::sync::Arc;

use super::compile::brief;
use super::mask::TokenMask;
use super::vocabulary::Vocabulary;

/// Where an answer stands in its grammar: a function of the grammar and of the tokens that were consumed.
pub struct Matcher {
    inner: llguidance::Matcher,
    vocabulary: Arc<Vocabulary>,
}

/// The grammar cannot be followed any further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct MatcherError {
    /// Why.
    pub reason: String,
}

impl Matcher {
    pub(super) fn new(inner: llguidance::Matcher, vocabulary: Arc<Vocabulary>) -> Self {
        Self { inner, vocabulary }
    }

    /// The same state, which goes its own way from here on. Nothing is shared: what one answer costs another one never
    /// notices.
    pub fn copy(&self) -> Self {
        Self { inner: self.inner.deep_clone(), vocabulary: self.vocabulary.clone() }
    }

    /// Takes in what was put out. An error says that a token does not go on where the grammar stood, and is final.
    pub fn consume(&mut self, tokens: &[u32]) -> Result<(), MatcherError> {
        self.inner.consume_tokens(tokens).map_err(|error| failed(&error))
    }

    /// Tokens that may follow: text that the grammar allows, and where it accepts what there is the model's end of sequence
    /// ids, and those of `ends` that are no text. Never other control tokens, whatever a grammar names. An error is final.
    pub fn mask(&mut self, ends: &[u32]) -> Result<TokenMask, MatcherError> {
        let mut mask = TokenMask(self.inner.compute_mask_or_eos().map_err(|error| failed(&error))?);
        mask.0.sub(&self.vocabulary.control);
        if self.is_accepting() {
            mask.allow(&self.vocabulary.eos_ids);
            ends.iter().filter(|id| self.vocabulary.is_control(**id)).for_each(|id| mask.allow(&[*id]));
        }
        if mask.0.is_zero() {
            let reason = "no token of this model's vocabulary can follow what the grammar has come to";
            return Err(MatcherError { reason: reason.into() });
        }
        Ok(mask)
    }

    /// The model's end of sequence ids.
    pub fn eos_ids(&self) -> &[u32] {
        &self.vocabulary.eos_ids
    }

    /// What there is is a whole text of the grammar.
    pub fn is_accepting(&mut self) -> bool {
        self.is_stopped() || self.inner.is_accepting().unwrap_or(false)
    }

    /// It is, and nothing can be added to it.
    pub fn is_stopped(&self) -> bool {
        self.inner.is_stopped() && !self.inner.is_error()
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("stopped", &self.is_stopped()).finish_non_exhaustive()
    }
}

fn failed(error: &anyhow::Error) -> MatcherError {
    let reason = error.to_string();
    let reason =
        if reason.contains("panic:") { "the grammar library failed".to_owned() } else { brief(&reason) };
    MatcherError { reason }
}
