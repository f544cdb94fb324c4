//! What a state of a lexer says of all tokens at once, whatever the parser's state is.

use llguidance::derivre::StateID;
use llguidance::earley::ParserRecognizer;
use llguidance::toktrie::{Recognizer, SimpleVob};

use super::trie::{Children, Trie};

/// Tokens from a state of a lexer on: those that stay within the lexeme are allowed by the lexer alone; those that end it are
/// left to the parser.
pub(super) struct Reach {
    within: Within,
    beyond: Vec<Step>,
}

enum Within {
    Few(Vec<u32>),
    Many(SimpleVob),
}

/// Of a walk along the bytes behind which lexemes end.
enum Step {
    /// A byte within the lexeme.
    Down(u8),
    /// Back over it.
    Up,
    /// The byte that leads to this node of the trie ends the lexeme.
    Try(u32),
}

/// Bytes with which some lexeme of a grammar begins.
pub(super) struct Beginnings([bool; 256]);

impl Beginnings {
    pub(super) fn new(rec: &mut ParserRecognizer<'_>) -> Self {
        let lexemes = rec.lexer().lexer_spec();
        let mut all = lexemes.all_lexemes();
        // The vocabulary's slices: no grammar has them.
        (0..lexemes.num_extra_lexemes).for_each(|slice| all.remove(lexemes.extra_lexeme(slice)));
        let state = rec.lexer_mut().start_state(&all);
        let mut next = |byte| rec.lexer_mut().transition_start_state(state, Some(byte), &None);
        Self(std::array::from_fn(|byte| !next(byte as u8).is_dead()))
    }
}

impl Reach {
    /// `none` is empty, and as wide as the vocabulary.
    pub(super) fn new(
        trie: &Trie,
        rec: &mut ParserRecognizer<'_>,
        beginnings: &Beginnings,
        mut none: SimpleVob,
    ) -> Self {
        let state = rec.lexer_state();
        let mut search = Search { trie, rec, beginnings, within: Vec::new(), beyond: Vec::new() };
        search.explore(trie.roots(), state);
        let Search { within, beyond, .. } = search;
        // A token takes 32 bits in a list and one in a set.
        let within = if within.len() > none.len() / 32 {
            within.iter().for_each(|word| none.allow_token(*word));
            Within::Many(none)
        } else {
            Within::Few(within)
        };
        Self { within, beyond }
    }

    /// Bytes that it takes, about.
    pub(super) fn bytes(&self) -> usize {
        let within = match &self.within {
            Within::Few(list) => size_of_val(list.as_slice()),
            Within::Many(set) => set.len() / 8,
        };
        within + size_of_val(self.beyond.as_slice())
    }

    /// What may follow, added to an empty set; None if the lexer has come to one of its bounds.
    pub(super) fn tokens(
        &self,
        trie: &Trie,
        rec: &mut ParserRecognizer<'_>,
        mut into: SimpleVob,
    ) -> Option<SimpleVob> {
        match &self.within {
            Within::Few(list) => list.iter().for_each(|word| into.allow_token(*word)),
            Within::Many(set) => into.or(set),
        }
        rec.trie_started("reach");
        let mut depth = 0;
        let is_done = self.beyond.iter().all(|step| match *step {
            Step::Down(byte) => {
                let is_within = rec.try_push_byte(byte);
                depth += usize::from(is_within);
                is_within
            }
            Step::Up => {
                rec.pop_bytes(1);
                depth -= 1;
                true
            }
            Step::Try(node) => {
                trie.add(node, rec, &mut into);
                true
            }
        });
        rec.pop_bytes(depth);
        rec.trie_finished();
        is_done.then_some(into)
    }
}

struct Search<'a, 'r> {
    trie: &'a Trie,
    rec: &'a mut ParserRecognizer<'r>,
    beginnings: &'a Beginnings,
    within: Vec<u32>,
    beyond: Vec<Step>,
}

impl Search<'_, '_> {
    /// As the parser goes along bytes, as long as it has nothing but the lexer to ask.
    fn explore(&mut self, children: Children, state: StateID) {
        let trie = self.trie;
        for (node, byte) in trie.each(children) {
            let next = self.rec.lexer_mut().transition_start_state(state, Some(byte), &None);
            if next.is_dead() || next.has_lowest_match() {
                if self.may_end(state, byte, next) {
                    self.beyond.push(Step::Try(node));
                }
                continue;
            }
            self.within.extend(trie.word(node));
            let before = self.beyond.len();
            self.beyond.push(Step::Down(byte));
            self.explore(trie.children(node), next);
            if self.beyond.len() == before + 1 {
                self.beyond.pop();
            } else {
                self.beyond.push(Step::Up);
            }
        }
    }

    /// A byte that the lexeme cannot have ends it only if another one begins with it.
    fn may_end(&mut self, state: StateID, byte: u8, next: StateID) -> bool {
        (!next.is_dead() || self.beginnings.0[usize::from(byte)])
            && !self.rec.lexer_mut().advance(state, byte, false, &None).is_error()
    }
}
