//! Responses within this process: the least recently used go first when there is no room.

use std::collections::BTreeMap;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use tokio::time::Instant;

/// What an entry takes beside its value, about.
const ENTRY_BYTES: usize = 256;

/// A table bounded in bytes. Time comes in as an argument.
pub(super) struct Memory {
    bytes_max: usize,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    entries: HashMap<String, Entry>,
    /// Names by when they were last used.
    order: BTreeMap<u64, String>,
    uses: u64,
    bytes: usize,
}

struct Entry {
    value: Bytes,
    lapses: Instant,
    used: u64,
}

impl Memory {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { bytes_max, table: Mutex::default() }
    }

    /// False: it is larger than all room.
    pub(super) fn set(&self, name: String, value: Bytes, lapses: Instant) -> bool {
        if value.len() + ENTRY_BYTES > self.bytes_max {
            return false;
        }
        let mut table = self.table.lock();
        table.remove(&name);
        table.bytes += value.len() + ENTRY_BYTES;
        let used = table.next_use();
        table.order.insert(used, name.clone());
        table.entries.insert(name, Entry { value, lapses, used });
        while table.bytes > self.bytes_max {
            let Some((_, oldest)) = table.order.pop_first() else { break };
            table.remove(&oldest);
        }
        true
    }

    pub(super) fn get(&self, name: &str, now: Instant) -> Option<Bytes> {
        let mut table = self.table.lock();
        let used = table.next_use();
        let entry = table.entries.get_mut(name)?;
        if entry.lapses <= now {
            table.remove(name);
            return None;
        }
        let before = std::mem::replace(&mut entry.used, used);
        let value = entry.value.clone();
        table.order.remove(&before);
        table.order.insert(used, name.to_owned());
        Some(value)
    }

    /// Whether it was there.
    pub(super) fn remove(&self, name: &str, now: Instant) -> bool {
        self.table.lock().remove(name).is_some_and(|entry| entry.lapses > now)
    }
}

impl Table {
    fn next_use(&mut self) -> u64 {
        self.uses += 1;
        self.uses
    }

    fn remove(&mut self, name: &str) -> Option<Entry> {
        let entry = self.entries.remove(name)?;
        self.order.remove(&entry.used);
        self.bytes -= entry.value.len() + ENTRY_BYTES;
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_least_recently_used_goes_first() {
        let memory = Memory::new(2 * (ENTRY_BYTES + 100));
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(10));
        let set = |name: &str, bytes: usize| memory.set(name.to_owned(), vec![0; bytes].into(), later);
        let has = |name: &str| memory.get(name, now).is_some();
        assert!(set("a", 100) && set("b", 100));
        assert!(has("a"));
        assert!(set("c", 100));
        assert!(has("a") && !has("b") && has("c"));
        assert!(set("a", 50) && has("c") && has("a"), "the same name takes its own place");
        assert!(!set("d", 1000) && has("a") && has("c"), "what never fits drives nothing out");
        assert!(set("d", 2 * 100 + ENTRY_BYTES) && !has("a") && !has("c") && has("d"));
        assert!(memory.remove("d", now) && !memory.remove("d", now));
        let table = memory.table.lock();
        assert_eq!((table.bytes, table.order.len(), table.entries.len()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn entries_lapse() {
        let memory = Memory::new(10_000);
        let lapses = Instant::now() + Duration::from_secs(10);
        for name in ["a", "b"] {
            assert!(memory.set(name.to_owned(), Bytes::from_static(b"x"), lapses));
        }
        assert!(memory.get("a", lapses - Duration::from_millis(1)).is_some());
        assert!(memory.get("a", lapses).is_none() && memory.get("a", Instant::now()).is_none());
        assert!(!memory.remove("b", lapses));
    }
}
