//! Sets of tokens.

use llguidance::toktrie::SimpleVob;

/// Tokens that may be drawn: bit `id % 32` of word `id / 32`. As wide as the vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenMask(pub(super) SimpleVob);

impl TokenMask {
    /// These tokens of a vocabulary; ids behind its end are left out.
    pub fn of(vocab_size: usize, ids: &[u32]) -> Self {
        let mut set = SimpleVob::alloc(vocab_size);
        ids.iter().filter(|id| (**id as usize) < vocab_size).for_each(|id| set.allow_token(*id));
        Self(set)
    }

    /// The bits; those behind the vocabulary's end are 0.
    pub fn words(&self) -> &[u32] {
        let words = self.0.len().div_ceil(32);
        &self.0.as_slice()[..words]
    }

    /// Whether a token may be drawn.
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.0.len() && self.0.is_allowed(id)
    }

    /// Ids that may be drawn, ascending.
    pub fn ids(&self) -> Vec<u32> {
        self.0.to_list()
    }

    /// Allows some more.
    pub fn allow(&mut self, ids: &[u32]) {
        let size = self.0.len();
        ids.iter().filter(|id| (**id as usize) < size).for_each(|id| self.0.allow_token(*id));
    }

    /// Takes these tokens out, if others remain; true when they do not.
    pub fn forbid_unless_all(&mut self, ids: &[u32]) -> bool {
        let kept: Vec<u32> = ids.iter().copied().filter(|id| self.allows(*id)).collect();
        kept.iter().for_each(|id| self.0.disallow_token(*id));
        let empty = self.0.is_zero();
        if empty {
            self.allow(&kept);
        }
        empty
    }
}
