//! The in-process lookup structure: which worker holds how much of a chain of blocks.
//!
//! Lookups read what one writer at a time changes, word by word, and wait for none: what they see of a change that is under
//! way may be half of it, which costs a hint and no answer.

mod expected;
mod follow;
mod lives;
mod paged;
mod sets;
mod slots;
mod sweep;
mod walk;

use std::any::Any;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

pub use expected::Expectation;
pub use follow::{Install, NotInstalled, Position};

use crate::{BlockEvent, EventBatch};
use expected::Expectations;
use lives::{LifeView, Lives};
use sets::SetView;
use slots::{NO_LIFE, SlotView, Slots};
use sweep::Sweep;

/// Blocks that change under one hold of the writers' lock: about 100 us.
const BLOCKS_PER_LOCK: usize = 512;

/// A worker as the replica numbers it; stable for as long as the replica knows the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holder(u16);

/// How many leading blocks of a chain each worker holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matches {
    blocks: Vec<u32>,
}

impl Matches {
    /// Leading blocks that this worker holds.
    pub fn blocks(&self, holder: Holder) -> u32 {
        self.blocks.get(usize::from(holder.0)).copied().unwrap_or(0)
    }
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// It was the next one.
    InOrder,
    /// It was known already, or of another epoch: nothing changed.
    Stale,
    /// Batches before it are missing, and a removal may have been among them. `apply` voids all that the worker held
    /// before; `follow` keeps it until a snapshot comes.
    Gap {
        /// How many are missing, at least.
        missing: u64,
    },
    /// No number is left for another worker: nothing changed, the worker matches nothing.
    Full,
}

/// Sizes, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaStats {
    /// Distinct blocks.
    pub blocks: usize,
    /// Distinct sets of more than three holders.
    pub sets: usize,
    /// Workers known.
    pub workers: usize,
    /// Booked prefills whose blocks are awaited.
    pub expectations: usize,
}

/// Who holds what, as far as this process was told.
pub struct Replica {
    table: Mutex<Table>,
    view: View,
    expectations: RwLock<Expectations>,
    sweep: Mutex<Sweep>,
    feed: OnceLock<Feed>,
}

/// Whatever must live for as long as its replica, to be dropped with it.
pub(crate) type Feed = Arc<dyn Any + Send + Sync>;

#[derive(Default)]
struct Table {
    lives: Lives,
    slots: Slots,
}

/// What lookups read of the table.
struct View {
    lives: Arc<LifeView>,
    slots: Arc<SlotView>,
    sets: Arc<SetView>,
}

impl Default for Replica {
    fn default() -> Self {
        let table = Table::default();
        let (lives, slots, sets) = (table.lives.view(), table.slots.view(), table.slots.sets.view());
        Self {
            table: Mutex::new(table),
            view: View { lives, slots, sets },
            expectations: RwLock::default(),
            sweep: Mutex::default(),
            feed: OnceLock::new(),
        }
    }
}

impl Replica {
    /// How much of the chain each worker holds or, once a booked prefill should have ended, is expected to hold.
    pub fn lookup(&self, keys: &[u64], now: Instant) -> Matches {
        let View { lives, slots, sets } = &self.view;
        let (live, owners) = (lives.live(), lives.owners());
        let mut blocks = vec![0; lives.holders()];
        walk::walk(slots, sets, live, keys, |life, depth| {
            // A worker has two lives for a moment when a snapshot takes the place of what was known, and a life may have
            // got a new owner.
            let most = blocks.get_mut(owners.of(life));
            most.into_iter().for_each(|most| *most = depth.max(*most));
        });
        self.expectations.read().lookup(keys, now, |holder, tenure, depth| {
            let most = blocks.get_mut(usize::from(holder.0)).filter(|_| lives.tenure(holder) == Some(tenure));
            most.into_iter().for_each(|most| *most = depth.max(*most));
        });
        Matches { blocks }
    }

    /// Makes a worker known in this epoch, and fences off whatever is said of another one until the next call: whoever talks
    /// to the worker knows, while epochs are clocks, which may go back. None when 65,535 workers and void lives are
    /// known: the worker then matches nothing.
    pub fn enroll(&self, worker: &WorkerId, epoch: WorkerEpoch) -> Option<Holder> {
        let mut table = self.table.lock();
        let holder = table.lives.enroll(worker, epoch)?;
        table.lives.worker_mut(holder).member = true;
        Some(holder)
    }

    /// The worker matches nothing until it is resumed; its blocks are kept up to date meanwhile.
    pub fn suspend(&self, holder: Holder, suspended: bool) {
        let mut table = self.table.lock();
        if usize::from(holder.0) < table.lives.holders() {
            table.lives.suspend(holder, suspended);
        }
    }

    /// The worker is gone for good: it matches nothing from now on, and its blocks are swept later.
    pub fn forget(&self, worker: &WorkerId) {
        self.table.lock().lives.forget(worker);
    }

    /// Takes one batch in.
    pub fn apply(&self, batch: &EventBatch) -> Applied {
        let (holder, applied) = match self.table.lock().accept(batch) {
            Ok(accepted) => accepted,
            Err(refused) => return refused,
        };
        self.change_all(holder, batch);
        applied
    }

    /// Counts a chain as held from `from`, the predicted end of its prefill, until before `until`, by when the worker
    /// will have said so itself. From when it does, that it evicts them again included, its own word alone counts.
    pub fn expect(
        &self,
        holder: Holder,
        keys: Arc<[u64]>,
        from: Instant,
        until: Instant,
    ) -> Option<Expectation> {
        let tenure = self.view.lives.tenure(holder)?;
        self.expectations.write().add((holder, tenure), keys, from, until)
    }

    /// The prefill will not happen there.
    pub fn withdraw(&self, expectation: Expectation) {
        self.expectations.write().withdraw(expectation);
    }

    /// A piece of the work that nobody waits for: overdue expectations, and about `blocks` blocks looked at for void
    /// holders. True while there is more to sweep.
    pub fn tidy(&self, now: Instant, blocks: usize) -> bool {
        self.expectations.write().expire(now);
        self.sweep.lock().run(&self.table, blocks)
    }

    /// Blocks that the worker said it holds.
    pub fn blocks_of(&self, holder: Holder) -> u64 {
        let table = self.table.lock();
        if usize::from(holder.0) < table.lives.holders() { table.lives.blocks(holder) } else { 0 }
    }

    /// Sizes.
    pub fn stats(&self) -> ReplicaStats {
        let table = self.table.lock();
        ReplicaStats {
            blocks: table.slots.len(),
            sets: table.slots.sets.len(),
            workers: table.lives.len(),
            expectations: self.expectations.read().len(),
        }
    }

    /// Keeps what brings the news alive; the first call counts.
    pub(crate) fn fed_by(&self, feed: Feed) {
        // A replica is fed where it is made, and only there.
        drop(self.feed.set(feed));
    }

    fn change_all(&self, holder: Holder, batch: &EventBatch) {
        for event in &batch.events {
            match event {
                BlockEvent::Stored(keys) => self.change(holder, batch.epoch, keys, true),
                BlockEvent::Removed(keys) => self.change(holder, batch.epoch, keys, false),
                BlockEvent::Cleared => self.table.lock().clear(holder, batch.epoch),
            }
        }
    }

    fn change(&self, holder: Holder, epoch: WorkerEpoch, keys: &[u64], stored: bool) {
        for piece in keys.chunks(BLOCKS_PER_LOCK) {
            self.table.lock().change(holder, epoch, piece, stored);
        }
        let awaited = self.expectations.read().awaits(holder, keys);
        if awaited {
            self.expectations.write().settle(holder, keys);
        }
    }
}

impl Table {
    /// Decides whether a batch is news, and moves the worker's sequence forward.
    fn accept(&mut self, batch: &EventBatch) -> Result<(Holder, Applied), Applied> {
        let holder = self.lives.hear(&batch.worker, batch.epoch).ok_or(Applied::Full)?;
        let worker = self.lives.worker_mut(holder);
        if batch.epoch != worker.epoch || batch.seq <= worker.seq {
            return Err(Applied::Stale);
        }
        let missing = batch.seq - worker.seq - 1;
        worker.seq = batch.seq;
        if missing == 0 {
            return Ok((holder, Applied::InOrder));
        }
        self.lives.renew(holder);
        Ok((holder, Applied::Gap { missing }))
    }

    fn change(&mut self, holder: Holder, epoch: WorkerEpoch, keys: &[u64], stored: bool) {
        let Some(life) = self.current_life(holder, epoch) else { return };
        for key in keys {
            let changed = if stored { self.slots.add(*key, life) } else { self.slots.remove(*key, life) };
            if changed {
                self.lives.count(life, stored);
            }
        }
    }

    fn clear(&mut self, holder: Holder, epoch: WorkerEpoch) {
        if self.current_life(holder, epoch).is_some() {
            self.lives.renew(holder);
        }
    }

    /// None when another epoch overtook the batch, or when no number was left.
    fn current_life(&self, holder: Holder, epoch: WorkerEpoch) -> Option<u16> {
        let worker = self.lives.worker(holder);
        (worker.epoch == epoch && worker.life != NO_LIFE).then_some(worker.life)
    }
}
