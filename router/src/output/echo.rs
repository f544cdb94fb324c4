//! The prompt as the beginning of a completion (`echo`).

use thalweg_model::tokenizer::Detokenizer;
use thalweg_proto::v1;

use crate::tokenize::TokenizedPrompt;

use super::choice::{Rules, TokenInfo};

/// A prompt's text, and where in it each token begins.
pub(crate) struct Echo {
    text: String,
    offsets: Vec<usize>,
}

impl Echo {
    pub(crate) fn new(rules: &Rules<'_>, prompt: &TokenizedPrompt) -> Self {
        // A text may have control tokens written in it, which are shown as they were.
        let skip_special = rules.options.skip_special && prompt.echo.is_none();
        let mut detokenizer = Detokenizer::new(rules.tokenizer, &[], skip_special);
        let (mut decoded, mut characters) = (String::new(), 0);
        let mut offsets = Vec::with_capacity(prompt.ids.len());
        for &id in prompt.ids.iter() {
            offsets.push(characters);
            let text = detokenizer.push(rules.tokenizer, id);
            characters += text.chars().count();
            decoded.push_str(&text);
        }
        decoded.push_str(&detokenizer.finish(rules.tokenizer));
        let text = prompt.echo.clone().unwrap_or_else(|| decoded.clone());
        // What the tokenizer put before a text, such as the beginning of sequence, has no place of its own in it.
        let (shown, known) = (text.chars().count(), decoded.chars().count());
        offsets.iter_mut().for_each(|offset| *offset = (*offset + shown).saturating_sub(known));
        Self { text, offsets }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Length of the text.
    pub(crate) fn characters(&self) -> usize {
        self.text.chars().count()
    }

    /// The worker's prompt logprobs with their places in the text.
    pub(crate) fn token_infos(&self, logprobs: &[v1::TokenLogprobs]) -> Vec<TokenInfo> {
        let info = |(logprobs, offset): (&v1::TokenLogprobs, &usize)| TokenInfo {
            logprobs: logprobs.clone(),
            text_offset: *offset,
        };
        logprobs.iter().zip(&self.offsets).map(info).collect()
    }
}
