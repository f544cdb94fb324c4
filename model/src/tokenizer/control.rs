//! Control tokens in text: where they are, and how to keep users' text from becoming them.

use aho_corasick::{AhoCorasick, MatchKind};

use super::json::{AddedToken, Description, malformed};
use crate::error::ModelError;

/// A tokenizer's control tokens, by their text.
#[derive(Debug)]
pub(crate) struct ControlTokens {
    automaton: AhoCorasick,
    tokens: Vec<AddedToken>,
    /// All texts, each behind a separator, to look for fragments in.
    joined: String,
    /// Bytes of the longest text.
    bytes_max: usize,
    /// Characters that begin a token, and those that end one: mostly `<` and `>`.
    firsts: Vec<char>,
    lasts: Vec<char>,
}

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piece<'a> {
    Control(u32),
    Text(&'a str),
}

impl ControlTokens {
    /// Special tokens of the tokenizer that the model has a row for.
    pub(super) fn new(description: &Description, vocab_size: usize) -> Result<Self, ModelError> {
        let tokens: Vec<AddedToken> = description
            .added_tokens
            .iter()
            .filter(|token| token.special && !token.content.is_empty() && (token.id as usize) < vocab_size)
            .cloned()
            .collect();
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| &token.content))
            .map_err(|error| malformed(format!("special tokens: {error}")))?;
        let joined = tokens.iter().fold(String::new(), |joined, token| joined + "\0" + &token.content);
        let bytes_max = tokens.iter().map(|token| token.content.len()).max().unwrap_or(0);
        let firsts = distinct(tokens.iter().filter_map(|token| token.content.chars().next()));
        let lasts = distinct(tokens.iter().filter_map(|token| token.content.chars().next_back()));
        Ok(Self { automaton, tokens, joined, bytes_max, firsts, lasts })
    }

    /// Cuts a text at its control tokens.
    pub(super) fn split<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Piece<'a>> {
        let mut done = 0;
        let mut pieces = Vec::new();
        for found in self.automaton.find_iter(text) {
            let token = &self.tokens[found.pattern()];
            if found.start() < done {
                continue;
            }
            let mut before = &text[done..found.start()];
            if token.lstrip {
                before = before.trim_end();
            }
            if !before.is_empty() {
                pieces.push(Piece::Text(before));
            }
            pieces.push(Piece::Control(token.id));
            done = found.end();
            if token.rstrip {
                done = text.len() - text[done..].trim_start().len();
            }
        }
        if done < text.len() {
            pieces.push(Piece::Text(&text[done..]));
        }
        pieces.into_iter()
    }

    /// Byte offsets at which a marker breaks every control token in a text.
    pub(crate) fn breaks(&self, text: &str) -> Vec<usize> {
        let mut breaks = Vec::new();
        let mut from = 0;
        while let Some(found) = self.automaton.find(&text[from..]) {
            let at = from + found.start() + first_char_bytes(&text[from + found.start()..]);
            breaks.push(at);
            from = at;
        }
        breaks
    }

    /// Bytes at the end of a text that begin a control token which text behind them could complete; 0 if none.
    pub(crate) fn open_end(&self, text: &str) -> usize {
        let from = text.floor_char_boundary(text.len().saturating_sub(self.bytes_max));
        let begins_token = |tail: &&str| {
            self.tokens
                .iter()
                .any(|token| token.content.len() > tail.len() && token.content.starts_with(*tail))
        };
        let starts = text[from..].char_indices().filter(|(_, char)| self.firsts.contains(char));
        starts.map(|(at, _)| &text[from + at..]).find(begins_token).map_or(0, str::len)
    }

    /// Bytes at the start of a text that end a control token which text before them could begin; 0 if none.
    pub(crate) fn open_start(&self, text: &str) -> usize {
        let until = text.floor_char_boundary(self.bytes_max);
        let ends_token = |head: &&str| {
            self.tokens.iter().any(|token| token.content.len() > head.len() && token.content.ends_with(*head))
        };
        let stops = text[..until].char_indices().rev().filter(|(_, char)| self.lasts.contains(char));
        stops.map(|(at, char)| &text[..at + char.len_utf8()]).find(ends_token).map_or(0, str::len)
    }

    /// The text is a part of a control token.
    pub(crate) fn is_fragment(&self, text: &str) -> bool {
        !text.is_empty() && text.len() < self.bytes_max && self.joined.contains(text)
    }

    /// No control token contains the character.
    pub(crate) fn lacks(&self, char: char) -> bool {
        !self.joined.contains(char)
    }
}

fn distinct(chars: impl Iterator<Item = char>) -> Vec<char> {
    chars.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
}

fn first_char_bytes(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}
