//! What was compiled lately.

use std::collections::HashMap;

/// Least recently used goes first. One lookup in a thousand compilations' time: a scan finds the oldest.
#[derive(Debug)]
pub(super) struct Cache<V> {
    entries: HashMap<[u8; 32], (u64, V)>,
    uses: u64,
    most: usize,
}

impl<V: Clone> Cache<V> {
    pub(super) fn new(most: usize) -> Self {
        Self { entries: HashMap::new(), uses: 0, most }
    }

    pub(super) fn get(&mut self, key: &[u8; 32]) -> Option<V> {
        self.uses += 1;
        let (used, value) = self.entries.get_mut(key)?;
        *used = self.uses;
        Some(value.clone())
    }

    pub(super) fn put(&mut self, key: [u8; 32], value: V) {
        self.uses += 1;
        self.entries.insert(key, (self.uses, value));
        if self.entries.len() > self.most {
            let oldest = self.entries.iter().min_by_key(|(_, (used, _))| *used).map(|(key, _)| *key);
            oldest.map(|key| self.entries.remove(&key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_goes() {
        let mut cache = Cache::new(2);
        cache.put([1; 32], 'a');
        cache.put([2; 32], 'b');
        assert_eq!(cache.get(&[1; 32]), Some('a'));
        cache.put([3; 32], 'c');
        assert_eq!(cache.get(&[2; 32]), None);
        assert_eq!((cache.get(&[1; 32]), cache.get(&[3; 32])), (Some('a'), Some('c')));
    }
}
