//! Takes void lives out of the blocks' holders, a bounded piece at a time.

use parking_lot::Mutex;

use super::{BLOCKS_PER_LOCK, Table};

/// One pass over all slots, for the lives that were void when it began.
#[derive(Default)]
pub(super) struct Sweep {
    lives: Vec<u16>,
    next: u32,
}

impl Sweep {
    /// Looks at up to `budget` slots; true while there is more to do.
    pub(super) fn run(&mut self, table: &Mutex<Table>, budget: usize) -> bool {
        if self.lives.is_empty() {
            self.lives = table.lock().lives.take_dead();
            self.next = 0;
        }
        let mut left = budget as u32;
        while left > 0 && !self.lives.is_empty() {
            let mut table = table.lock();
            let piece = left.min(BLOCKS_PER_LOCK as u32);
            let end = table.slots.end().min(self.next + piece);
            for slot in self.next..end {
                for life in &self.lives {
                    table.slots.remove_at(slot, *life);
                }
            }
            self.next = end;
            left -= piece;
            if end == table.slots.end() {
                table.lives.reuse(&std::mem::take(&mut self.lives));
            }
        }
        !self.lives.is_empty()
    }
}
