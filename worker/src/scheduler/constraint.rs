//! A sequence's place in its grammar: what may be drawn next, and when nothing may.

use thalweg_model::grammar::{Grammar, Matcher, MatcherError, TokenMask};

use crate::sampling::SamplingParams;

/// A function of the grammar, the sampling parameters and the output: a sequence that was resumed stands where it stood.
#[derive(Debug)]
pub(super) struct Constraint {
    matcher: Matcher,
    state: State,
}

#[derive(Debug, PartialEq)]
enum State {
    /// There is more to draw.
    Open,
    /// The output is a whole text of the grammar, and nothing may follow it.
    Complete,
    /// It cannot go on.
    Failed(String),
}

impl Constraint {
    /// Behind what was put out before.
    pub(super) fn new(grammar: &Grammar, output: &[u32]) -> Self {
        let mut constraint = Self { matcher: grammar.matcher(), state: State::Open };
        constraint.consume(output);
        constraint
    }

    /// Takes in tokens that were drawn under its masks.
    pub(super) fn consume(&mut self, tokens: &[u32]) {
        if self.state != State::Open || tokens.is_empty() {
            return;
        }
        match self.matcher.consume(tokens) {
            Ok(()) if self.matcher.is_stopped() => self.state = State::Complete,
            Ok(()) => {}
            Err(error) => self.fail(error),
        }
    }

    /// What may be drawn as output number `output_index`; None when nothing may, and why is known from then on.
    ///
    /// Ids that end the sequence may be drawn where the grammar accepts the text before them. Those that the request ignores,
    /// or does not want before min_tokens, are left out as long as the grammar has anything else to offer; when it has not, the
    /// sequence is complete.
    pub(super) fn mask(&mut self, sampling: &SamplingParams, output_index: u32) -> Option<TokenMask> {
        if self.state != State::Open {
            return None;
        }
        if self.matcher.is_stopped() {
            self.state = State::Complete;
            return None;
        }
        let mut mask = match self.matcher.mask(&sampling.end_ids) {
            Ok(mask) => mask,
            Err(error) => {
                self.fail(error);
                return None;
            }
        };
        let ends = &sampling.end_ids;
        let ignored: Vec<u32> =
            self.matcher.eos_ids().iter().copied().filter(|id| ends.binary_search(id).is_err()).collect();
        let too_early = output_index < sampling.min_tokens;
        let only_ends = mask.forbid_unless_all(&ignored) || (too_early && mask.forbid_unless_all(ends));
        if only_ends {
            self.state = State::Complete;
            return None;
        }
        Some(mask)
    }

    /// Something may follow the output.
    pub(super) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// Nothing may follow the output.
    pub(super) fn is_complete(&self) -> bool {
        self.state == State::Complete
    }

    /// Why it cannot go on.
    pub(super) fn failure(&self) -> Option<&str> {
        match &self.state {
            State::Failed(reason) => Some(reason),
            _ => None,
        }
    }

    fn fail(&mut self, error: MatcherError) {
        self.state = State::Failed(error.reason);
    }
}
