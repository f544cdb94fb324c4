//! Blocks that a booked prefill is about to store.

use std::sync::Arc;

use hashbrown::HashMap;
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

struct Expected {
    number: u64,
    holder: Holder,
    tenure: u64,
    keys: Arc<[u64]>,
    from: Instant,
    until: Instant,
}

/// All expectations, by the first block of their chain: chains that share a block share all blocks before it.
#[derive(Default)]
pub(super) struct Expectations {
    by_first: HashMap<u64, Vec<Expected>>,
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
        let first = *keys.first()?;
        self.last_number += 1;
        let list = self.by_first.entry(first).or_default();
        if list.len() == PER_FIRST_BLOCK_MAX {
            list.remove(0);
        }
        list.push(Expected { number: self.last_number, holder, tenure, keys, from, until });
        Some(Expectation { first, number: self.last_number })
    }

    pub(super) fn withdraw(&mut self, expectation: Expectation) {
        self.retain(expectation.first, |e| e.number != expectation.number);
    }

    /// Drops what was not confirmed in time.
    pub(super) fn expire(&mut self, now: Instant) {
        self.by_first.retain(|_, list| {
            list.retain(|e| now < e.until);
            !list.is_empty()
        });
    }

    /// Tells `held` for every expectation that shares a prefix with `keys`: by whom, in which tenure, how many blocks.
    pub(super) fn lookup(&self, keys: &[u64], now: Instant, mut held: impl FnMut(Holder, u64, u32)) {
        let Some(list) = keys.first().and_then(|first| self.by_first.get(first)) else { return };
        for expected in list.iter().filter(|e| e.from <= now && now < e.until) {
            held(expected.holder, expected.tenure, common_prefix(&expected.keys, keys));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_first.values().map(Vec::len).sum()
    }

    fn retain(&mut self, first: u64, keep: impl FnMut(&Expected) -> bool) {
        if let Some(list) = self.by_first.get_mut(&first) {
            list.retain(keep);
            if list.is_empty() {
                self.by_first.remove(&first);
            }
        }
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
