//! Token ids to text, one at a time.

use super::Tokenizer;

/// Incremental detokeniser of one choice: never hands out half a UTF-8 character, constant work per token.
#[derive(Debug, Default)]
pub struct Detokenizer {
    skip_special: bool,
    /// No token has contributed text yet, and the model's encoder begins texts with a space of its own.
    drop_space: bool,
    /// The beginning of a character, at most 3 bytes.
    pending: Vec<u8>,
}

impl Detokenizer {
    /// Begins behind `context`, the tokens before the first output (they decide about leading spaces); their text is
    /// never emitted. `skip_special` leaves control tokens out.
    pub fn new(tokenizer: &Tokenizer, context: &[u32], skip_special: bool) -> Self {
        let vocabulary = &tokenizer.vocabulary;
        let has_text = |id: &u32| !vocabulary.bytes(*id, skip_special).is_empty();
        let drop_space = vocabulary.strip_first_space() && !context.iter().rev().any(has_text);
        Self { skip_special, drop_space, pending: Vec::new() }
    }

    /// Text that became certain with this token, perhaps none.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> String {
        let mut text = String::new();
        self.push_to(tokenizer, id, &mut text);
        text
    }

    /// What was held back, with U+FFFD for a broken character.
    pub fn finish(&mut self, _tokenizer: &Tokenizer) -> String {
        let held = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&held).into_owned()
    }

    /// [`Self::push`] into a text.
    pub(super) fn push_to(&mut self, tokenizer: &Tokenizer, id: u32, text: &mut String) {
        let mut bytes = tokenizer.vocabulary.bytes(id, self.skip_special);
        if bytes.is_empty() {
            return;
        }
        if std::mem::take(&mut self.drop_space) {
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let certain = certain_bytes(&self.pending);
        text.push_str(&String::from_utf8_lossy(&self.pending[..certain]));
        self.pending.drain(..certain);
    }
}

/// How many bytes no further byte can change: all but the beginning of a character at the end.
fn certain_bytes(bytes: &[u8]) -> usize {
    let mut done = 0;
    loop {
        match std::str::from_utf8(&bytes[done..]) {
            Ok(_) => return bytes.len(),
            Err(error) => match error.error_len() {
                Some(bad) => done += error.valid_up_to() + bad,
                None => return done + error.valid_up_to(),
            },
        }
    }
}
