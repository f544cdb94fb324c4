//! The blocks that a worker holds, in the order in which it stored them: chains stay together, which is what makes a
//! router's lookups fast.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

/// Removed places are closed up when there are more of them than of blocks, and at least so many.
const HOLES_MIN: usize = 1024;

/// A set of keys in order of insertion.
#[derive(Default)]
pub(super) struct KeySet {
    places: HashMap<u64, u32>,
    order: Vec<u64>,
    held: Vec<bool>,
}

/// The keys at one time.
pub(super) struct Copied {
    order: Vec<u64>,
    held: Vec<bool>,
    count: usize,
}

impl KeySet {
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    pub(super) fn insert(&mut self, key: u64) {
        if let Entry::Vacant(place) = self.places.entry(key) {
            place.insert(self.order.len() as u32);
            self.order.push(key);
            self.held.push(true);
        }
    }

    pub(super) fn remove(&mut self, key: u64) {
        if let Some(place) = self.places.remove(&key) {
            self.held[place as usize] = false;
            if self.order.len() > 2 * self.places.len() + HOLES_MIN {
                self.close_up();
            }
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// A copy that costs two moves of memory, to be gone through without a lock.
    pub(super) fn copied(&self) -> Copied {
        Copied { order: self.order.clone(), held: self.held.clone(), count: self.len() }
    }

    fn close_up(&mut self) {
        let mut held = self.held.iter();
        self.order.retain(|_| held.next().is_some_and(|held| *held));
        self.held = vec![true; self.order.len()];
        for (place, key) in self.order.iter().enumerate() {
            self.places.insert(*key, place as u32);
        }
    }
}

impl Copied {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.order.iter().zip(&self.held).filter(|(_, held)| **held).map(|(key, _)| *key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_order_and_holes_are_closed() {
        let mut set = KeySet::default();
        (0..5_000).for_each(|key| set.insert(key));
        set.insert(7);
        (0..4_000).for_each(|key| set.remove(key));
        set.remove(3);
        set.insert(7);
        let expected: Vec<u64> = (4_000..5_000).chain([7]).collect();
        assert_eq!(set.copied().iter().collect::<Vec<_>>(), expected);
        assert_eq!((set.len(), set.copied().len()), (1_001, 1_001));
        assert!(set.order.len() < 3_200, "{} places for 1,001 keys", set.order.len());
        set.clear();
        assert_eq!((set.len(), set.copied().iter().count()), (0, 0));
    }
}
