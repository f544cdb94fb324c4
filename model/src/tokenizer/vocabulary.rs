//! The bytes that each token stands for, in one arena.

use std::collections::HashMap;

use serde_json::Value;
use tokenizers::Model;

use super::json::{Description, malformed};
use super::{Inner, spm};
use crate::error::ModelError;

/// Bytes by token id. Ids without a token (padding rows of the embedding) stand for nothing.
#[derive(Debug)]
pub(super) struct Vocabulary {
    arena: Vec<u8>,
    /// Start of each id's bytes; one more than there are ids.
    starts: Vec<u32>,
    special: Vec<bool>,
    /// A text's first space is not part of it: the encoder put it there.
    strip_first_space: bool,
}

/// How the model writes bytes as characters.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Alphabet {
    /// GPT-2's: one visible character per byte.
    ByteLevel,
    /// SentencePiece's: `▁` is a space, `<0x0A>` a byte.
    Spm,
}

impl Vocabulary {
    pub(super) fn new(
        inner: &Inner,
        description: &Description,
        vocab_size: usize,
    ) -> Result<Self, ModelError> {
        let (alphabet, strip_first_space) = decoder(description)?;
        let added: HashMap<u32, (&str, bool)> = description
            .added_tokens
            .iter()
            .map(|token| (token.id, (token.content.as_str(), token.special)))
            .collect();
        let byte_of = byte_level_table();
        let mut table =
            Self { arena: Vec::new(), starts: vec![0], special: vec![false; vocab_size], strip_first_space };
        let mut found = 0;
        for id in 0..vocab_size as u32 {
            let token = inner.get_model().id_to_token(id);
            found += usize::from(token.is_some());
            if let Some((content, special)) = added.get(&id) {
                table.special[id as usize] = *special;
                table.arena.extend_from_slice(content.as_bytes());
            } else if let Some(token) = token {
                alphabet.append(&token, &byte_of, &mut table.arena);
            }
            table.starts.push(table.arena.len() as u32);
        }
        check_range(inner, found, &added, vocab_size)?;
        Ok(table)
    }

    /// What the id stands for; control tokens stand for nothing where `skip_special`.
    pub(super) fn bytes(&self, id: u32, skip_special: bool) -> &[u8] {
        let id = id as usize;
        if id >= self.special.len() || (skip_special && self.special[id]) {
            return &[];
        }
        &self.arena[self.starts[id] as usize..self.starts[id + 1] as usize]
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub(super) fn strip_first_space(&self) -> bool {
        self.strip_first_space
    }
}

impl Alphabet {
    fn append(self, token: &str, byte_of: &HashMap<char, u8>, arena: &mut Vec<u8>) {
        match self {
            Self::Spm => match spm::parse_byte(token) {
                Some(byte) => arena.push(byte),
                None => arena.extend_from_slice(token.replace(spm::SPACE, " ").as_bytes()),
            },
            Self::ByteLevel => {
                let start = arena.len();
                for char in token.chars() {
                    match byte_of.get(&char) {
                        Some(byte) => arena.push(*byte),
                        None => {
                            arena.truncate(start);
                            return arena.extend_from_slice(token.as_bytes());
                        }
                    }
                }
            }
        }
    }
}

/// Ordinary tokens need a row of the embedding, as do those that text turns into without being asked. Special ones may
/// lie behind it (Gemma's image token in its text models): they are never produced.
fn check_range(
    inner: &Inner,
    found: usize,
    added: &HashMap<u32, (&str, bool)>,
    vocab_size: usize,
) -> Result<(), ModelError> {
    let plain = if found < inner.get_model().get_vocab_size() {
        inner.get_model().get_vocab().into_values().filter(|id| !added.contains_key(id)).max()
    } else {
        None
    };
    let added = added.iter().filter(|(_, (_, special))| !special).map(|(id, _)| *id).max();
    match plain.max(added) {
        Some(id) if id as usize >= vocab_size => Err(malformed(format!(
            "has token id {id}, but the model's vocabulary ends at {vocab_size}: they do not belong together"
        ))),
        _ => Ok(()),
    }
}

/// The alphabet, and whether the first space of a text is dropped.
fn decoder(description: &Description) -> Result<(Alphabet, bool), ModelError> {
    let Some(decoder) = &description.decoder else {
        return Err(malformed("has no decoder".into()));
    };
    let whole = std::slice::from_ref(decoder);
    let steps = decoder.get("decoders").and_then(Value::as_array).map_or(whole, Vec::as_slice);
    let find = |kind: &str| steps.iter().find(|step| step["type"] == kind);
    if find("ByteLevel").is_some() {
        return Ok((Alphabet::ByteLevel, false));
    }
    if let Some(metaspace) = find("Metaspace") {
        let never = metaspace["prepend_scheme"] == "never" || metaspace["add_prefix_space"] == false;
        return Ok((Alphabet::Spm, !never));
    }
    if find("Replace").is_some() || find("ByteFallback").is_some() {
        let strips = |step: &Value| step["content"] == " " && step["start"].as_u64() > Some(0);
        return Ok((Alphabet::Spm, find("Strip").is_some_and(strips)));
    }
    Err(malformed(format!(
        "has decoder `{}`, of which only ByteLevel and SentencePiece's are known",
        decoder["type"]
    )))
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
fn byte_level_table() -> HashMap<char, u8> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => (char::from(byte), byte),
            _ => {
                next += 1;
                (char::from_u32(next - 1).unwrap_or_default(), byte)
            }
        })
        .collect()
}
