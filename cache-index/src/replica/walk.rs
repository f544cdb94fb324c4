//! Along a chain of blocks: where each holder's unbroken prefix ends.

use std::sync::Arc;

use super::sets::{Members, SetView, ones};
use super::slots::{Holders, NO_LIFE, Packed, Slot, SlotView};

/// A set of lives as bits.
pub(super) type Bits = Vec<u64>;

/// Tells `ended` of each of the `live` holders of the first block at which block its prefix ends. Every block is looked at,
/// so a hole left by eviction ends a prefix; work is done only where the holders change.
pub(super) fn walk(
    slots: &SlotView,
    sets: &SetView,
    live: Bits,
    keys: &[u64],
    mut ended: impl FnMut(u16, u32),
) {
    let mut alive = live;
    let mut held_by: Option<Packed> = None;
    let (mut depth, mut guess) = (0, None);
    while depth < keys.len() {
        let begin = depth;
        let Some(first) = slots.find(keys[depth], guess) else { break };
        let mut run = slots.from(first);
        loop {
            let same = held_by.map_or(0, |holders| same(run, &keys[depth..], holders));
            depth += same;
            run = &run[same..];
            let (Some(slot), Some(key)) = (run.first(), keys.get(depth)) else { break };
            let kept = slot.held(*key).and_then(|holders| KeptBy::of(slot, *key, holders, sets));
            let Some((holders, kept)) = kept else { break };
            let report = held_by.replace(holders).is_some();
            if !narrow(&mut alive, &kept, |life| {
                if report {
                    ended(life, depth as u32)
                }
            }) {
                return;
            }
            depth += 1;
            run = &run[1..];
        }
        // What was found has changed hands meanwhile.
        if depth == begin {
            break;
        }
        // Only a page's end says nothing of the slot behind it.
        guess = run.is_empty().then(|| first + (depth - begin) as u32);
    }
    end_all(&alive, held_by.is_some(), depth as u32, &mut ended);
}

/// How many slots have these keys and just these holders.
fn same(run: &[Slot], keys: &[u64], holders: Packed) -> usize {
    run.iter().zip(keys).take_while(|(slot, key)| slot.is_held_by(**key, holders)).count()
}

/// Times that a block whose holders change meanwhile is read.
const READS_MAX: usize = 16;

/// Who holds a block, read for good.
enum KeptBy {
    Few([u16; 3]),
    Many(Arc<Members>),
}

impl KeptBy {
    /// None where the block has changed hands more often than is worth following.
    fn of(slot: &Slot, key: u64, mut holders: Packed, sets: &SetView) -> Option<(Packed, Self)> {
        for _ in 0..READS_MAX {
            let set = match holders.holders() {
                Holders::Few(lives) => return Some((holders, Self::Few(lives))),
                Holders::Many(set) => set,
            };
            let members = sets.members(set);
            // Where the block still refers to the set, the number was not another set's meanwhile.
            let before = std::mem::replace(&mut holders, slot.held(key)?);
            if let Some(members) = members.filter(|_| before == holders) {
                return Some((holders, Self::Many(members)));
            }
        }
        None
    }

    fn word(&self, j: usize) -> u64 {
        match self {
            Self::Few(lives) => lives
                .iter()
                .filter(|life| **life != NO_LIFE && usize::from(**life) / 64 == j)
                .fold(0, |word, life| word | 1 << (life % 64)),
            Self::Many(members) => members.word(j),
        }
    }
}

/// Leaves those that hold the block too, and tells the others; false if nobody is left.
fn narrow(alive: &mut Bits, kept: &KeptBy, mut lost: impl FnMut(u16)) -> bool {
    let mut any = 0;
    for (j, word) in alive.iter_mut().enumerate() {
        let kept = *word & kept.word(j);
        ones(j, *word & !kept).for_each(&mut lost);
        *word = kept;
        any |= kept;
    }
    any != 0
}

fn end_all(alive: &Bits, started: bool, depth: u32, ended: &mut impl FnMut(u16, u32)) {
    if started {
        for (j, word) in alive.iter().enumerate() {
            ones(j, *word).for_each(|life| ended(life, depth));
        }
    }
}
