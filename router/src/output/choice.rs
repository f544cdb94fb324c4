//! One choice from tokens to text.

use thalweg_model::tokenizer::{Detokenizer, Tokenizer};
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use crate::error::RouterError;
use crate::request::ReplyOptions;

use super::part::{CallDelta, Part};
use super::reader::Reader;
use super::stop::StopMatcher;

/// What a delta of the worker added to a choice.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// Index in the reply.
    pub(crate) choice: usize,
    /// Content; thoughts stand before it and calls behind it.
    pub(crate) text: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<CallDelta>,
    pub(crate) token_ids: Vec<u32>,
    /// One per token if asked for, else empty.
    pub(crate) logprobs: Vec<TokenInfo>,
    pub(crate) finish: Option<Finish>,
}

/// A token with its logprobs and its place in the text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenInfo {
    pub(crate) logprobs: v1::TokenLogprobs,
    /// Characters of the choice's text before it.
    pub(crate) text_offset: usize,
}

/// How a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finish {
    /// OpenAI's word.
    pub(crate) reason: &'static str,
    pub(crate) stop: Option<StopReason>,
}

/// Which of the client's stops ended a choice (vLLM's `stop_reason`).
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(untagged)]
pub(crate) enum StopReason {
    Token(u32),
    Text(String),
}

/// State of one choice. Constant work per token.
pub(crate) struct Choice {
    detokenizer: Detokenizer,
    /// None where the text is nothing but content.
    reader: Option<Box<Reader>>,
    stops: StopMatcher,
    /// Characters put out or held back so far, those of an echoed prompt included.
    characters: usize,
    tokens: u32,
    reasoning_tokens: u32,
    finished: bool,
}

/// What all choices of a request have in common.
pub(crate) struct Rules<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) options: &'a ReplyOptions,
    pub(crate) min_tokens: u32,
    pub(crate) stop_token_ids: &'a [u32],
}

impl Choice {
    /// A choice behind `prompt`, whose text begins at `characters`.
    pub(crate) fn new(rules: &Rules<'_>, prompt: &[u32], characters: usize) -> Self {
        Self {
            detokenizer: Detokenizer::new(rules.tokenizer, prompt, rules.options.skip_special),
            reader: Reader::new(&rules.options.reading, rules.tokenizer, prompt).map(Box::new),
            stops: StopMatcher::new(&rules.options.stop, rules.options.include_stop),
            characters,
            tokens: 0,
            reasoning_tokens: 0,
            finished: false,
        }
    }

    pub(crate) fn finished(&self) -> bool {
        self.finished
    }

    /// Tokens that count: those behind a stop string do not.
    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Those of them that are thoughts.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Takes a delta of the worker. What comes after the end is dropped.
    pub(crate) fn push(&mut self, rules: &Rules<'_>, delta: v1::ChoiceDelta) -> Result<Piece, RouterError> {
        let finish_reason = delta.finish_reason();
        let last = delta.token_ids.len().saturating_sub(1);
        let mut logprobs = delta.logprobs.into_iter();
        let mut piece = Piece::default();
        for (at, &id) in delta.token_ids.iter().enumerate() {
            if self.finished {
                return Ok(piece);
            }
            self.tokens += 1;
            piece.token_ids.push(id);
            if rules.options.logprobs.is_some() {
                let logprobs = logprobs.next().ok_or_else(missing_logprobs)?;
                piece.logprobs.push(TokenInfo { logprobs, text_offset: self.characters });
            }
            let ends = finish_reason == v1::FinishReason::Stop && at == last;
            if !ends || rules.options.include_stop {
                self.token(rules, id, &mut piece);
            }
        }
        if !self.finished {
            self.end(rules, finish_reason, delta.token_ids.last().copied(), &mut piece)?;
        }
        Ok(piece)
    }

    fn token(&mut self, rules: &Rules<'_>, id: u32, piece: &mut Piece) {
        let Some(reader) = &self.reader else {
            let text = self.detokenizer.push(rules.tokenizer, id);
            return self.text(rules, &text, piece);
        };
        let thought = reader.thinks();
        let marker = Reader::marker(rules.tokenizer, id).filter(|_| rules.options.skip_special);
        let text = match marker {
            Some(marker) => self.detokenizer.finish(rules.tokenizer) + &marker,
            None => self.detokenizer.push(rules.tokenizer, id),
        };
        self.read(rules, piece, |reader, parts| reader.push(&text, parts));
        let thinks = self.reader.as_ref().is_some_and(|reader| reader.thinks());
        self.reasoning_tokens += u32::from(thought || thinks);
    }

    /// Takes what the reader makes of more text, or of its end. Stop strings are looked for in content alone: within a
    /// call they would leave arguments that are no JSON.
    fn read(&mut self, rules: &Rules<'_>, piece: &mut Piece, take: impl FnOnce(&mut Reader, &mut Vec<Part>)) {
        let Some(mut reader) = self.reader.take() else { return };
        let mut parts = Vec::new();
        take(&mut reader, &mut parts);
        for part in parts {
            match part {
                Part::Content(text) => self.text(rules, &text, piece),
                Part::Reasoning(text) => piece.reasoning.push_str(&text),
                Part::Call(call) => {
                    piece.text.push_str(&self.stops.finish());
                    piece.calls.push(call);
                }
            }
            if self.finished {
                break;
            }
        }
        if reader.satisfied() && !self.finished {
            self.finished = true;
            piece.finish = Some(Finish { reason: "tool_calls", stop: None });
        }
        self.reader = Some(reader);
    }

    fn text(&mut self, rules: &Rules<'_>, text: &str, piece: &mut Piece) {
        self.characters += text.chars().count();
        if self.tokens <= rules.min_tokens {
            piece.text.push_str(text);
            return;
        }
        let released = self.stops.push(text);
        piece.text.push_str(&released.text);
        if let Some(stop) = released.stop {
            let stop = rules.options.stop.get(stop).cloned().map(StopReason::Text);
            self.finished = true;
            piece.finish = Some(Finish { reason: "stop", stop });
        }
    }

    fn end(
        &mut self,
        rules: &Rules<'_>,
        reason: v1::FinishReason,
        last: Option<u32>,
        piece: &mut Piece,
    ) -> Result<(), RouterError> {
        let (reason, stop) = match reason {
            v1::FinishReason::Unspecified => return Ok(()),
            v1::FinishReason::Stop => {
                ("stop", last.filter(|id| rules.stop_token_ids.contains(id)).map(StopReason::Token))
            }
            v1::FinishReason::Complete => ("stop", None),
            v1::FinishReason::Length => ("length", None),
            v1::FinishReason::Abort => {
                return Err(RouterError::new(ErrorCode::Internal, "the worker gave the request up"));
            }
        };
        // A character cut off by the end is left out rather than shown as a replacement mark.
        let rest = self.detokenizer.finish(rules.tokenizer);
        let rest = rest.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if self.reader.is_none() {
            self.text(rules, rest, piece);
        } else {
            self.read(rules, piece, |reader, parts| {
                reader.push(rest, parts);
                reader.finish(parts);
            });
        }
        if !self.finished {
            piece.text.push_str(&self.stops.finish());
            let reason = self.reader.as_ref().map_or(reason, |reader| reader.finish_reason(reason));
            piece.finish = Some(Finish { reason, stop });
            self.finished = true;
        }
        Ok(())
    }
}

fn missing_logprobs() -> RouterError {
    RouterError::new(ErrorCode::Internal, "the worker sent a token without the logprobs that were asked for")
}
