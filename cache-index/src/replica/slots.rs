//! Blocks and their holders: slots in order of arrival, found by key.
//!
//! Chains arrive in order, so the slot behind a block's is most often that of the next block: a walk along a chain reads
//! memory in sequence and asks the hash tables only where a chain is broken.

use hashbrown::HashTable;

use super::sets::{SetId, Sets};

/// Slots of one chunk; chunks never move.
const CHUNK: usize = 4096;
/// Hash tables, each so small that its growth stalls readers for less than a millisecond or two.
const TABLES: usize = 256;
/// Holders that fit into the slot.
const FEW: usize = 3;
/// No life has this number.
pub(super) const NO_LIFE: u16 = u16::MAX;

/// Who holds a block. Equal sets compare equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holders {
    /// Sorted, filled up with `NO_LIFE`.
    Few([u16; FEW]),
    /// More than fit.
    Many(SetId),
}

/// One block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) key: u64,
    pub(super) holders: Holders,
}

const _: () = assert!(size_of::<Slot>() == 16, "a slot is 16 bytes, which the limit of 40 an entry needs");

const NOBODY: Holders = Holders::Few([NO_LIFE; FEW]);

/// All blocks that anybody holds.
pub(super) struct Slots {
    chunks: Vec<Vec<Slot>>,
    /// Last freed, first used: a chain evicted from its tail up is refilled from its head down.
    free: Vec<u32>,
    tables: Vec<HashTable<u32>>,
    pub(super) sets: Sets,
}

impl Default for Slots {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            free: Vec::new(),
            tables: (0..TABLES).map(|_| HashTable::new()).collect(),
            sets: Sets::default(),
        }
    }
}

impl Slots {
    /// Blocks held by anybody.
    pub(super) fn len(&self) -> usize {
        self.end() as usize - self.free.len()
    }

    /// One past the highest slot ever used.
    pub(super) fn end(&self) -> u32 {
        let last = self.chunks.last().map_or(0, Vec::len);
        (self.chunks.len().saturating_sub(1) * CHUNK + last) as u32
    }

    /// The block's slot, looked for at `guess` first.
    pub(super) fn find(&self, key: u64, guess: u32) -> Option<u32> {
        if self.get(guess).is_some_and(|slot| slot.key == key && slot.holders != NOBODY) {
            return Some(guess);
        }
        self.tables[table_of(key)].find(key, |i| self.slot(*i).key == key).copied()
    }

    pub(super) fn holders(&self, slot: u32) -> Holders {
        self.slot(slot).holders
    }

    /// Makes `life` a holder of the block; false if it was one.
    pub(super) fn add(&mut self, key: u64, life: u16) -> bool {
        let Some(i) = self.find(key, self.end()) else {
            self.insert(key, life);
            return true;
        };
        let before = self.slot(i).holders;
        let after = match before {
            Holders::Few(lives) if lives.contains(&life) => before,
            Holders::Few(lives) if lives[FEW - 1] == NO_LIFE => few_with(lives, life),
            Holders::Few(lives) => {
                let mut sorted = [lives[0], lives[1], lives[2], life];
                sorted.sort_unstable();
                Holders::Many(self.sets.intern(&sorted))
            }
            Holders::Many(set) => Holders::Many(self.sets.with(set, life)),
        };
        self.slot_mut(i).holders = after;
        before != after
    }

    /// `life` no longer holds the block; false if it did not.
    pub(super) fn remove(&mut self, key: u64, life: u16) -> bool {
        self.find(key, self.end()).is_some_and(|i| self.remove_at(i, life))
    }

    /// The same for a slot, perhaps a free one.
    pub(super) fn remove_at(&mut self, i: u32, life: u16) -> bool {
        let Slot { key, holders: before } = *self.slot(i);
        let after = match before {
            Holders::Few(lives) => few_without(lives, life),
            Holders::Many(set) if !self.sets.members(set).contains(life) => before,
            Holders::Many(set) => {
                let rest = self.sets.without(set, life);
                let after = match *rest.as_slice() {
                    [a, b, c] => Holders::Few([a, b, c]),
                    _ => Holders::Many(self.sets.intern(&rest)),
                };
                self.sets.release(set);
                after
            }
        };
        self.slot_mut(i).holders = after;
        if before != after && after == NOBODY {
            if let Ok(found) = self.tables[table_of(key)].find_entry(key, |j| *j == i) {
                found.remove();
            }
            self.free.push(i);
        }
        before != after
    }

    fn insert(&mut self, key: u64, life: u16) {
        let slot = Slot { key, holders: few_with([NO_LIFE; FEW], life) };
        let i = match self.free.pop() {
            Some(i) => {
                *self.slot_mut(i) = slot;
                i
            }
            None => self.push(slot),
        };
        let chunks = &self.chunks;
        self.tables[table_of(key)]
            .insert_unique(key, i, |j| chunks[*j as usize / CHUNK][*j as usize % CHUNK].key);
    }

    fn push(&mut self, slot: Slot) -> u32 {
        let i = self.end();
        match self.chunks.last_mut() {
            Some(chunk) if chunk.len() < CHUNK => chunk.push(slot),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(slot);
                self.chunks.push(chunk);
            }
        }
        i
    }

    fn get(&self, i: u32) -> Option<&Slot> {
        self.chunks.get(i as usize / CHUNK)?.get(i as usize % CHUNK)
    }

    fn slot(&self, i: u32) -> &Slot {
        &self.chunks[i as usize / CHUNK][i as usize % CHUNK]
    }

    fn slot_mut(&mut self, i: u32) -> &mut Slot {
        &mut self.chunks[i as usize / CHUNK][i as usize % CHUNK]
    }
}

/// Bits that a table of usual size uses neither for its buckets nor for its tags.
fn table_of(key: u64) -> usize {
    (key >> 40) as usize % TABLES
}

fn few_with(mut lives: [u16; FEW], life: u16) -> Holders {
    lives[FEW - 1] = life;
    lives.sort_unstable();
    Holders::Few(lives)
}

fn few_without(mut lives: [u16; FEW], life: u16) -> Holders {
    for held in &mut lives {
        if *held == life {
            *held = NO_LIFE;
        }
    }
    lives.sort_unstable();
    Holders::Few(lives)
}
