//! Sets of lives, each kept once: the blocks of a shared prefix share their set, and equal sets have equal numbers.

use std::hash::BuildHasher;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use hashbrown::{DefaultHashBuilder, HashTable};

use super::paged::Paged;

/// Members up to here are kept as a list, more as bits.
const LIST_MAX: usize = 16;

/// Number of an interned set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SetId(pub(super) u32);

/// Members of one set; the same members always have the same form.
#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) enum Members {
    /// Sorted.
    List(Box<[u16]>),
    /// Bit i of word j is life 64 j + i; the last word is not 0.
    Bits(Box<[u64]>),
}

impl Members {
    fn new(sorted: &[u16]) -> Self {
        if sorted.len() <= LIST_MAX {
            return Self::List(sorted.into());
        }
        let words = sorted.last().map_or(0, |life| usize::from(*life) / 64 + 1);
        let mut bits = vec![0u64; words].into_boxed_slice();
        for life in sorted {
            bits[usize::from(*life) / 64] |= 1 << (life % 64);
        }
        Self::Bits(bits)
    }

    fn to_vec(&self) -> Vec<u16> {
        match self {
            Self::List(list) => list.to_vec(),
            Self::Bits(bits) => bits.iter().enumerate().flat_map(|(j, word)| ones(j, *word)).collect(),
        }
    }

    pub(super) fn contains(&self, life: u16) -> bool {
        match self {
            Self::List(list) => list.binary_search(&life).is_ok(),
            Self::Bits(bits) => bits.get(usize::from(life) / 64).is_some_and(|w| w >> (life % 64) & 1 == 1),
        }
    }

    /// Word j of the bit form.
    pub(super) fn word(&self, j: usize) -> u64 {
        match self {
            Self::List(list) => list
                .iter()
                .filter(|life| usize::from(**life) / 64 == j)
                .fold(0, |word, life| word | 1 << (life % 64)),
            Self::Bits(bits) => bits.get(j).copied().unwrap_or(0),
        }
    }
}

/// Lives of one word of bits.
pub(super) fn ones(j: usize, word: u64) -> impl Iterator<Item = u16> {
    let mut rest = word;
    std::iter::from_fn(move || {
        let bit = (rest != 0).then(|| rest.trailing_zeros() as usize)?;
        rest &= rest - 1;
        Some((64 * j + bit) as u16)
    })
}

/// What lookups read: the members of sets in use.
#[derive(Default)]
pub(super) struct SetView(Paged<ArcSwapOption<Members>>);

/// All sets in use, counted by reference, as their writer has them.
#[derive(Default)]
pub(super) struct Sets {
    view: Arc<SetView>,
    entries: Vec<Entry>,
    free: Vec<u32>,
    by_members: HashTable<u32>,
    hasher: DefaultHashBuilder,
    /// The last change, since the next block of a chain most often changes in the same way.
    last: Option<Change>,
}

struct Entry {
    members: Arc<Members>,
    refs: u32,
}

#[derive(Clone, Copy)]
struct Change {
    from: SetId,
    life: u16,
    to: SetId,
}

impl SetView {
    /// The members, unless the set went out of use meanwhile.
    pub(super) fn members(&self, set: SetId) -> Option<Arc<Members>> {
        self.0.get(set.0)?.load_full()
    }
}

impl Sets {
    /// For lookups.
    pub(super) fn view(&self) -> Arc<SetView> {
        Arc::clone(&self.view)
    }

    pub(super) fn members(&self, set: SetId) -> &Members {
        &self.entries[set.0 as usize].members
    }

    /// Number of distinct sets.
    pub(super) fn len(&self) -> usize {
        self.by_members.len()
    }

    /// The set of these sorted lives, with one more reference.
    pub(super) fn intern(&mut self, sorted: &[u16]) -> SetId {
        let members = Arc::new(Members::new(sorted));
        let hash = hash_of(&self.hasher, &members);
        if let Some(&id) = self.by_members.find(hash, |id| self.entries[*id as usize].members == members) {
            self.entries[id as usize].refs += 1;
            return SetId(id);
        }
        let entry = Entry { members: Arc::clone(&members), refs: 1 };
        let id = match self.free.pop() {
            Some(id) => {
                self.entries[id as usize] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
        };
        self.view.0.made(id).store(Some(members));
        let (entries, hasher) = (&self.entries, &self.hasher);
        self.by_members.insert_unique(hash, id, |id| hash_of(hasher, &entries[*id as usize].members));
        SetId(id)
    }

    /// The set that has `life` too, with one more reference unless it is the same.
    pub(super) fn with(&mut self, set: SetId, life: u16) -> SetId {
        if let Some(last) = self.last.filter(|c| c.from == set && c.life == life) {
            self.entries[last.to.0 as usize].refs += 1;
            return last.to;
        }
        let mut lives = self.members(set).to_vec();
        let Err(place) = lives.binary_search(&life) else { return set };
        lives.insert(place, life);
        let to = self.intern(&lives);
        self.last = Some(Change { from: set, life, to });
        to
    }

    /// The members of `set` but for `life`.
    pub(super) fn without(&self, set: SetId, life: u16) -> Vec<u16> {
        let mut lives = self.members(set).to_vec();
        lives.retain(|l| *l != life);
        lives
    }

    /// Gives up a reference. A number may be used again only afterwards, so that numbers tell sets apart meanwhile.
    pub(super) fn release(&mut self, set: SetId) {
        let entry = &mut self.entries[set.0 as usize];
        entry.refs -= 1;
        if entry.refs > 0 {
            return;
        }
        let hash = hash_of(&self.hasher, &entry.members);
        if let Ok(found) = self.by_members.find_entry(hash, |id| *id == set.0) {
            found.remove();
        }
        self.entries[set.0 as usize].members = Arc::new(Members::List(Box::default()));
        self.view.0.made(set.0).store(None);
        self.free.push(set.0);
        self.last = self.last.filter(|c| c.from != set && c.to != set);
    }
}

fn hash_of(hasher: &DefaultHashBuilder, members: &Members) -> u64 {
    hasher.hash_one(members)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_members_are_one_set_and_unused_sets_go() {
        let mut sets = Sets::default();
        let many: Vec<u16> = (0..40).map(|i| i * 25).collect();
        let a = sets.intern(&many);
        let b = sets.intern(&many[..39]);
        let c = sets.with(b, many[39]);
        sets.release(b);
        assert_eq!((a, sets.len()), (c, 1), "b is gone, c is a");
        assert_eq!(sets.members(a).to_vec(), many);
        assert_eq!(sets.without(a, many[0]), many[1..]);
        assert_eq!(sets.without(a, 7), many);
        sets.release(a);
        assert_eq!(sets.len(), 1, "c still refers to it");
        sets.release(c);
        assert_eq!(sets.len(), 0);
    }

    #[test]
    fn list_and_bits_agree() {
        for n in [1, LIST_MAX, LIST_MAX + 1, 300] {
            let lives: Vec<u16> = (0..n as u16).map(|i| i * 7 + 3).collect();
            let members = Members::new(&lives);
            let from_words: Vec<u16> = (0..64).flat_map(|j| ones(j, members.word(j))).collect();
            assert_eq!(from_words, lives);
            assert!(lives.iter().all(|l| members.contains(*l)) && !members.contains(4));
        }
    }
}
