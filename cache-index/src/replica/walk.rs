//! Along a chain of blocks: where each holder's unbroken prefix ends.

use super::sets::ones;
use super::slots::{Holders, NO_LIFE, Slots};

/// A set of lives as bits.
pub(super) type Bits = Vec<u64>;

/// Tells `ended` of each live holder of the first block at which block its prefix ends. Every block is looked at, so a
/// hole left by eviction ends a prefix; work is done only where the holders change.
pub(super) fn walk(slots: &Slots, live: &Bits, keys: &[u64], mut ended: impl FnMut(u16, u32)) {
    let mut alive: Bits = live.clone();
    let mut held_by: Option<Holders> = None;
    let mut guess = slots.end();
    for (depth, key) in keys.iter().enumerate() {
        let Some(slot) = slots.find(*key, guess) else {
            return end_all(&alive, held_by.is_some(), depth as u32, &mut ended);
        };
        guess = slot + 1;
        let holders = slots.holders(slot);
        if held_by == Some(holders) {
            continue;
        }
        let report = held_by.replace(holders).is_some();
        let mut any = 0;
        for (j, word) in alive.iter_mut().enumerate() {
            let kept = *word & word_of(slots, holders, j);
            if report {
                ones(j, *word & !kept).for_each(|life| ended(life, depth as u32));
            }
            *word = kept;
            any |= kept;
        }
        if any == 0 {
            return;
        }
    }
    end_all(&alive, held_by.is_some(), keys.len() as u32, &mut ended);
}

fn end_all(alive: &Bits, started: bool, depth: u32, ended: &mut impl FnMut(u16, u32)) {
    if started {
        for (j, word) in alive.iter().enumerate() {
            ones(j, *word).for_each(|life| ended(life, depth));
        }
    }
}

fn word_of(slots: &Slots, holders: Holders, j: usize) -> u64 {
    match holders {
        Holders::Few(lives) => lives
            .iter()
            .filter(|life| **life != NO_LIFE && usize::from(**life) / 64 == j)
            .fold(0, |word, life| word | 1 << (life % 64)),
        Holders::Many(set) => slots.sets.members(set).word(j),
    }
}
