//! An array that only grows and is read without a lock: its pages are made once and never move.

use std::sync::OnceLock;

/// Entries of a page.
const PAGE: usize = 4096;
/// Pages of a folder.
const FOLDER: usize = 4096;
/// Folders: together they hold every number of 32 bits.
const FOLDERS: usize = 256;

type Page<T> = OnceLock<Box<[T]>>;
type Folder<T> = OnceLock<Box<[Page<T>]>>;

/// Entries by number, each of its default value at first.
pub(super) struct Paged<T>(Box<[Folder<T>]>);

impl<T: Default> Default for Paged<T> {
    fn default() -> Self {
        Self(fresh(FOLDERS))
    }
}

impl<T: Default> Paged<T> {
    /// The entry, if any of its page was ever made.
    pub(super) fn get(&self, i: u32) -> Option<&T> {
        self.from(i).first()
    }

    /// The entry and those behind it, to the end of its page; nothing if the page was never made.
    pub(super) fn from(&self, i: u32) -> &[T] {
        let (folder, page, entry) = places(i);
        let page = self.0[folder].get().and_then(|folder| folder[page].get());
        page.map_or(&[], |page| &page[entry..])
    }

    /// The entry, made where it is not there.
    pub(super) fn made(&self, i: u32) -> &T {
        let (folder, page, entry) = places(i);
        let folder = self.0[folder].get_or_init(|| fresh(FOLDER));
        &folder[page].get_or_init(|| fresh(PAGE))[entry]
    }
}

fn places(i: u32) -> (usize, usize, usize) {
    let i = i as usize;
    (i / (PAGE * FOLDER), i / PAGE % FOLDER, i % PAGE)
}

fn fresh<T: Default>(count: usize) -> Box<[T]> {
    std::iter::repeat_with(T::default).take(count).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn entries_are_where_they_were_made() {
        let array = Paged::<AtomicU32>::default();
        let page = PAGE as u32;
        for i in [0, 1, page - 1, page, page * FOLDER as u32, u32::MAX] {
            array.made(i).store(i ^ 5, Ordering::Relaxed);
            assert_eq!(array.get(i).map(|entry| entry.load(Ordering::Relaxed)), Some(i ^ 5));
        }
        assert!(array.get(2 * page).is_none() && array.from(2 * page).is_empty());
        assert_eq!((array.from(page - 2).len(), array.from(0).len()), (2, PAGE));
    }
}
