//! Blocks that a booked prefill is about to store.

use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use tokio::time::Instant;

use super::Holder;

/// Expectations kept for one first block; above it the oldest goes. Bounds a lookup when everybody shares a prompt.
const PER_FIRST_BLOCK_MAX: usize = 256;

/// A booking's chain, to be withdrawn when the booking fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expectation {
    first: u64,
    number: u64,
}

/// Whose word on which block settles a chain: its last one, which is stored after all others and evicted before them.
type Settlement = (Holder, u64);

struct Expected {
    number: u64,
    settlement: Settlement,
    tenure: u64,
    keys: Arc<[u64]>,
    from: Instant,
    until: Instant,
}

/// All expectations, by the first block of their chain: chains that share a block share all blocks before it.
#[derive(Default)]
pub(super) struct Expectations {
    by_first: HashMap<u64, Vec<Expected>>,
    by_settlement: HashMap<Settlement, Vec<Expectation>>,
    last_number: u64,
}

impl Expectations {
    /// Counts `keys` as held from `from` until before `until`. An empty chain expects nothing.
    pub(super) fn add(
        &mut self,
        (holder, tenure): (Holder, u64),
        keys: Arc<[u64]>,
        from: Instant,
        until: Instant,
    ) -> Option<Expectation> {
        let (first, last) = (*keys.first()?, *keys.last()?);
        self.last_number += 1;
        let made = Expectation { first, number: self.last_number };
        let settlement = (holder, last);
        self.by_settlement.entry(settlement).or_default().push(made);
        let list = self.by_first.entry(first).or_default();
        if list.len() == PER_FIRST_BLOCK_MAX {
            await_no_more(&mut self.by_settlement, &list.remove(0));
        }
        list.push(Expected { number: made.number, settlement, tenure, keys, from, until });
        Some(made)
    }

    pub(super) fn withdraw(&mut self, Expectation { first, number }: Expectation) {
        let Entry::Occupied(mut list) = self.by_first.entry(first) else { return };
        if let Some(i) = list.get().iter().position(|e| e.number == number) {
            await_no_more(&mut self.by_settlement, &list.get_mut().remove(i));
        }
        if list.get().is_empty() {
            list.remove();
        }
    }

    /// Whether the holder's word on these blocks settles any.
    pub(super) fn awaits(&self, holder: Holder, told: &[u64]) -> bool {
        !self.by_settlement.is_empty()
            && told.iter().any(|key| self.by_settlement.contains_key(&(holder, *key)))
    }

    /// Drops those of which the holder itself has told, stored or evicted: from now on its word alone counts.
    pub(super) fn settle(&mut self, holder: Holder, told: &[u64]) {
        for key in told {
            let settled = self.by_settlement.get(&(holder, *key)).cloned();
            settled.into_iter().flatten().for_each(|expectation| self.withdraw(expectation));
        }
    }

    /// Drops what was not confirmed in time.
    pub(super) fn expire(&mut self, now: Instant) {
        self.by_first.retain(|_, list| {
            for overdue in list.extract_if(.., |e| now >= e.until) {
                await_no_more(&mut self.by_settlement, &overdue);
            }
            !list.is_empty()
        });
    }

    /// Tells `held` for every expectation that shares a prefix with `keys`: by whom, in which tenure, how many blocks.
    pub(super) fn lookup(&self, keys: &[u64], now: Instant, mut held: impl FnMut(Holder, u64, u32)) {
        let Some(list) = keys.first().and_then(|first| self.by_first.get(first)) else { return };
        for expected in list.iter().filter(|e| e.from <= now && now < e.until) {
            held(expected.settlement.0, expected.tenure, common_prefix(&expected.keys, keys));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_first.values().map(Vec::len).sum()
    }
}

fn await_no_more(by_settlement: &mut HashMap<Settlement, Vec<Expectation>>, gone: &Expected) {
    let Entry::Occupied(mut list) = by_settlement.entry(gone.settlement) else { return };
    list.get_mut().retain(|e| e.number != gone.number);
    if list.get().is_empty() {
        list.remove();
    }
}

/// Blocks that two chains share: a hash stands for all blocks before it too, so equality is monotone.
fn common_prefix(a: &[u64], b: &[u64]) -> u32 {
    let (mut low, mut high) = (0, a.len().min(b.len()));
    while low < high {
        let middle = low + (high - low) / 2;
        if a[middle] == b[middle] {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low as u32
}
