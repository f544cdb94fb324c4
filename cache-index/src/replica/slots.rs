//! Blocks and their holders: slots in order of arrival, found by key.
//!
//! Chains arrive in order, so the slot behind a block's is most often that of the next block: a walk along a chain reads
//! memory in sequence and asks the hash tables only where a chain is broken. One writer changes slots while lookups read
//! them: a lookup never waits for more than one insertion into one of the tables.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashTable;
use parking_lot::RwLock;

use super::paged::Paged;
use super::sets::{SetId, Sets};

/// Hash tables, each so small that a lookup seldom meets an insertion and that its growth stalls few of them.
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

/// The same in a word, so that it changes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed(u64);

/// One block.
pub(super) struct Slot {
    key: AtomicU64,
    holders: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 16, "a slot is 16 bytes, which the limit of 40 an entry needs");

const NOBODY: Holders = Holders::Few([NO_LIFE; FEW]);
/// Above the lives of few holders, and above the number of a set.
const MANY: u64 = 1 << 48;

/// What lookups read.
pub(super) struct SlotView {
    slots: Paged<Slot>,
    tables: Box<[RwLock<HashTable<u32>>]>,
}

/// All blocks that anybody holds, as their writer has them.
pub(super) struct Slots {
    view: Arc<SlotView>,
    end: u32,
    /// Last freed, first used: a chain evicted from its tail up is refilled from its head down.
    free: Vec<u32>,
    pub(super) sets: Sets,
}

impl Packed {
    /// Nobody holds it.
    pub(super) const NOBODY: Self = Self::new(NOBODY);

    const fn new(holders: Holders) -> Self {
        Self(match holders {
            Holders::Few([a, b, c]) => a as u64 | (b as u64) << 16 | (c as u64) << 32,
            Holders::Many(set) => MANY | set.0 as u64,
        })
    }

    pub(super) fn holders(self) -> Holders {
        match self.0 {
            set if set >= MANY => Holders::Many(SetId(set as u32)),
            few => Holders::Few([few as u16, (few >> 16) as u16, (few >> 32) as u16]),
        }
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self { key: AtomicU64::new(0), holders: AtomicU64::new(Packed::NOBODY.0) }
    }
}

impl Slot {
    /// Whether the block is held just so.
    pub(super) fn is_held_by(&self, key: u64, holders: Packed) -> bool {
        self.key.load(Ordering::Acquire) == key && self.holders.load(Ordering::Acquire) == holders.0
    }

    /// Who holds the block, if this is its slot. The key is read first and changes only while nobody holds the block.
    pub(super) fn held(&self, key: u64) -> Option<Packed> {
        if self.key.load(Ordering::Acquire) != key {
            return None;
        }
        Some(Packed(self.holders.load(Ordering::Acquire))).filter(|holders| *holders != Packed::NOBODY)
    }

    fn holders(&self) -> Holders {
        Packed(self.holders.load(Ordering::Acquire)).holders()
    }

    fn set_holders(&self, holders: Holders) {
        self.holders.store(Packed::new(holders).0, Ordering::Release);
    }
}

impl SlotView {
    /// The block's slot, looked for at `guess` first.
    pub(super) fn find(&self, key: u64, guess: Option<u32>) -> Option<u32> {
        let guess = guess.filter(|i| self.slots.get(*i).is_some_and(|slot| slot.held(key).is_some()));
        guess.or_else(|| {
            let is_it = |i: &u32| self.key(*i) == key;
            self.tables[table_of(key)].read().find(key, is_it).copied()
        })
    }

    /// The slot and some of those behind it.
    pub(super) fn from(&self, i: u32) -> &[Slot] {
        self.slots.from(i)
    }

    /// The key that stands there; 0 where none ever stood.
    fn key(&self, i: u32) -> u64 {
        self.slots.get(i).map_or(0, |slot| slot.key.load(Ordering::Acquire))
    }
}

impl Default for Slots {
    fn default() -> Self {
        let tables = (0..TABLES).map(|_| RwLock::default()).collect();
        let view = Arc::new(SlotView { slots: Paged::default(), tables });
        Self { view, end: 0, free: Vec::new(), sets: Sets::default() }
    }
}

impl Slots {
    /// For lookups.
    pub(super) fn view(&self) -> Arc<SlotView> {
        Arc::clone(&self.view)
    }

    /// Blocks held by anybody.
    pub(super) fn len(&self) -> usize {
        self.end as usize - self.free.len()
    }

    /// One past the highest slot ever used.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Makes `life` a holder of the block; false if it was one.
    pub(super) fn add(&mut self, key: u64, life: u16) -> bool {
        let Some(i) = self.view.find(key, None) else { return self.insert(key, life) };
        let before = self.slot(i).holders();
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
        self.slot(i).set_holders(after);
        if let (Holders::Many(set), true) = (before, before != after) {
            self.sets.release(set);
        }
        before != after
    }

    /// `life` no longer holds the block; false if it did not.
    pub(super) fn remove(&mut self, key: u64, life: u16) -> bool {
        self.view.find(key, None).is_some_and(|i| self.remove_at(i, life))
    }

    /// The same for a slot, perhaps a free one.
    pub(super) fn remove_at(&mut self, i: u32, life: u16) -> bool {
        let before = self.slot(i).holders();
        let after = match before {
            Holders::Few(lives) => few_without(lives, life),
            Holders::Many(set) if !self.sets.members(set).contains(life) => before,
            Holders::Many(set) => match *self.sets.without(set, life).as_slice() {
                [a, b, c] => Holders::Few([a, b, c]),
                ref rest => Holders::Many(self.sets.intern(rest)),
            },
        };
        if before == after {
            return false;
        }
        self.slot(i).set_holders(after);
        if let Holders::Many(set) = before {
            self.sets.release(set);
        }
        if after == NOBODY {
            let mut table = self.view.tables[table_of(self.view.key(i))].write();
            if let Ok(found) = table.find_entry(self.view.key(i), |j| *j == i) {
                found.remove();
            }
            drop(table);
            self.free.push(i);
        }
        true
    }

    /// False where 32 bits number no further slot.
    fn insert(&mut self, key: u64, life: u16) -> bool {
        let i = match self.free.pop() {
            Some(i) => i,
            None if self.end == u32::MAX => return false,
            None => {
                self.end += 1;
                self.end - 1
            }
        };
        let slot = self.slot(i);
        slot.key.store(key, Ordering::Release);
        slot.set_holders(few_with([NO_LIFE; FEW], life));
        self.view.tables[table_of(key)].write().insert_unique(key, i, |j| self.view.key(*j));
        true
    }

    fn slot(&self, i: u32) -> &Slot {
        self.view.slots.made(i)
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
