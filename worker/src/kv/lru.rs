//! An order of last use over block numbers: append, take out anywhere and take the oldest, each in constant time.

/// Doubly linked list through two vectors; the last index is the ring's anchor.
#[derive(Debug)]
pub(super) struct LruList {
    next: Vec<u32>,
    previous: Vec<u32>,
    len: usize,
}

/// `next` of what is not in the list.
const ABSENT: u32 = u32::MAX;

impl LruList {
    /// For numbers below `capacity`.
    pub(super) fn new(capacity: usize) -> Self {
        let mut list =
            Self { next: vec![ABSENT; capacity + 1], previous: vec![ABSENT; capacity + 1], len: 0 };
        let anchor = list.anchor();
        list.link(anchor, anchor);
        list
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn contains(&self, item: u32) -> bool {
        self.next[item as usize] != ABSENT
    }

    /// Appends as the most recent.
    pub(super) fn push(&mut self, item: u32) {
        assert!(!self.contains(item), "block {item} is already in the list");
        let anchor = self.anchor();
        let newest = self.previous[anchor as usize];
        self.link(newest, item);
        self.link(item, anchor);
        self.len += 1;
    }

    /// Takes one out; false when it was not in.
    pub(super) fn remove(&mut self, item: u32) -> bool {
        if !self.contains(item) {
            return false;
        }
        self.link(self.previous[item as usize], self.next[item as usize]);
        self.next[item as usize] = ABSENT;
        self.len -= 1;
        true
    }

    /// Takes the least recent out.
    pub(super) fn pop(&mut self) -> Option<u32> {
        let oldest = self.next[self.anchor() as usize];
        (oldest != self.anchor() && self.remove(oldest)).then_some(oldest)
    }

    fn anchor(&self) -> u32 {
        (self.next.len() - 1) as u32
    }

    fn link(&mut self, left: u32, right: u32) {
        self.next[left as usize] = right;
        self.previous[right as usize] = left;
    }
}
