//! Searches for what may follow, short in states of the lexer that have been looked at beforehand.

use std::sync::Arc;

use hashbrown::HashMap;
use llguidance::earley::{BiasComputer, ParserRecognizer, SlicedBiasComputer};
use llguidance::toktrie::{SimpleVob, TokTrie};

use super::reach::Reach;
use super::trie::Trie;

/// What all grammars of a vocabulary share.
pub(super) struct Words {
    /// The library's own search.
    pub(super) search: Arc<SlicedBiasComputer>,
    pub(super) trie: Trie,
}

impl Words {
    pub(super) fn new(search: Arc<SlicedBiasComputer>) -> Self {
        Self { trie: Trie::new(search.trie()), search }
    }
}

/// By the number of a lexer's state.
pub(super) type Reaches = HashMap<usize, Reach>;

/// Finds what the library's search finds. For parsers whose lexer began as a copy of the one that the reaches are of: its states
/// are numbered in the order in which they come up.
pub(super) struct Guide {
    words: Arc<Words>,
    reaches: Reaches,
}

impl Guide {
    pub(super) fn new(words: Arc<Words>, reaches: Reaches) -> Self {
        Self { words, reaches }
    }
}

impl BiasComputer for Guide {
    fn compute_bias(&self, rec: &mut ParserRecognizer<'_>, start: &[u8]) -> SimpleVob {
        let known = self.reaches.get(&rec.lexer_state().as_usize()).filter(|_| start.is_empty());
        let found =
            known.and_then(|reach| reach.tokens(&self.words.trie, rec, self.trie().alloc_token_set()));
        found.unwrap_or_else(|| self.words.search.compute_bias(rec, start))
    }

    fn trie(&self) -> &TokTrie {
        self.words.search.trie()
    }
}
