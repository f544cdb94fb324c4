//! Workers and their lives: what an older life held stops matching at once and is swept later.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, AtomicUsize, Ordering};

use hashbrown::HashMap;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

use super::Holder;
use super::paged::Paged;
use super::slots::NO_LIFE;
use super::walk::Bits;

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) epoch: WorkerEpoch,
    /// Which numbering of batches within the epoch.
    pub(super) generation: u64,
    /// Last batch taken in.
    pub(super) seq: u64,
    /// The last batch, with its generation, behind which some never came: a snapshot must say more.
    pub(super) missed_after: Option<(u64, u64)>,
    /// When it last said something over the network.
    pub(super) heard: Option<Instant>,
    /// Somebody who talks to it has said which epoch is the present one. It is not merely a name in the index, of which the
    /// latest epoch is taken to be that.
    pub(super) member: bool,
    /// Under which number its blocks stand; a new one whenever all of them became void.
    pub(super) life: u16,
    suspended: bool,
    id: Option<WorkerId>,
}

impl Worker {
    fn new(epoch: WorkerEpoch, id: Option<WorkerId>) -> Self {
        Self {
            epoch,
            generation: 0,
            seq: 0,
            missed_after: None,
            heard: None,
            member: false,
            life: NO_LIFE,
            suspended: false,
            id,
        }
    }

    /// Nothing was ever heard of this epoch, or not all of it.
    pub(super) fn is_behind(&self) -> bool {
        self.missed_after.is_some() || self.is_unheard()
    }

    /// Nothing was ever heard of this epoch, of which it is known that it is the present one.
    pub(super) fn is_silent(&self) -> bool {
        self.member && self.is_unheard()
    }

    fn is_unheard(&self) -> bool {
        (self.generation, self.seq) == (0, 0)
    }
}

/// What lookups read.
#[derive(Default)]
pub(super) struct LifeView {
    /// Lives that may match, 64 an entry.
    live: Paged<AtomicU64>,
    /// Entries of `live`.
    words: AtomicUsize,
    /// Whose life it is.
    owners: Paged<AtomicU16>,
    /// One past the highest holder.
    holders: AtomicUsize,
    /// Of each holder.
    tenures: Paged<AtomicU64>,
}

/// All workers and the numbers of their lives, as their writer has them.
#[derive(Default)]
pub(super) struct Lives {
    view: Arc<LifeView>,
    workers: Vec<Worker>,
    by_id: HashMap<WorkerId, Holder>,
    vacant: Vec<Holder>,
    /// Blocks that stand under each life.
    blocks: Vec<u64>,
    unused: Vec<u16>,
    dead: Vec<u16>,
    last_tenure: u64,
}

/// The owner of each life, most of them at hand.
pub(super) struct Owners<'a> {
    first: &'a [AtomicU16],
    all: &'a Paged<AtomicU16>,
}

impl Owners<'_> {
    /// As an index of holders.
    pub(super) fn of(&self, life: u16) -> usize {
        let owner = self.first.get(usize::from(life)).or_else(|| self.all.get(life.into()));
        owner.map_or(0, |owner| owner.load(Ordering::Acquire).into())
    }
}

impl LifeView {
    /// Lives that may match now.
    pub(super) fn live(&self) -> Bits {
        // All words are on the first page.
        let words = self.live.from(0).iter().take(self.words.load(Ordering::Acquire));
        words.map(|word| word.load(Ordering::Acquire)).collect()
    }

    /// Whose lives they are, those of the first page; the others are asked for one by one.
    pub(super) fn owners(&self) -> Owners<'_> {
        Owners { first: self.owners.from(0), all: &self.owners }
    }

    /// One past the highest holder.
    pub(super) fn holders(&self) -> usize {
        self.holders.load(Ordering::Acquire)
    }

    /// None of a holder that never was.
    pub(super) fn tenure(&self, holder: Holder) -> Option<u64> {
        (usize::from(holder.0) < self.holders())
            .then(|| self.tenures.made(holder.0.into()).load(Ordering::Acquire))
    }
}

impl Lives {
    /// For lookups.
    pub(super) fn view(&self) -> Arc<LifeView> {
        Arc::clone(&self.view)
    }

    pub(super) fn worker(&self, holder: Holder) -> &Worker {
        &self.workers[usize::from(holder.0)]
    }

    pub(super) fn worker_mut(&mut self, holder: Holder) -> &mut Worker {
        &mut self.workers[usize::from(holder.0)]
    }

    /// One past the highest holder.
    pub(super) fn holders(&self) -> usize {
        self.workers.len()
    }

    /// Workers known.
    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, id: &WorkerId) -> Option<Holder> {
        self.by_id.get(id).copied()
    }

    pub(super) fn blocks(&self, holder: Holder) -> u64 {
        self.blocks.get(usize::from(self.worker(holder).life)).copied().unwrap_or(0)
    }

    pub(super) fn count(&mut self, life: u16, added: bool) {
        let blocks = &mut self.blocks[usize::from(life)];
        *blocks = if added { *blocks + 1 } else { blocks.saturating_sub(1) };
    }

    /// The worker as the index names it, known from now on, perhaps in another epoch; None when all numbers are in use.
    pub(super) fn hear(&mut self, id: &WorkerId, epoch: WorkerEpoch) -> Option<Holder> {
        match self.get(id) {
            Some(holder) if self.knows_better(holder, epoch) => Some(holder),
            _ => self.enroll(id, epoch),
        }
    }

    /// The index cannot put the worker into this epoch.
    pub(super) fn knows_better(&self, holder: Holder, epoch: WorkerEpoch) -> bool {
        let worker = self.worker(holder);
        worker.member || epoch <= worker.epoch
    }

    /// The worker in this epoch, known from now on; None when all numbers are in use.
    pub(super) fn enroll(&mut self, id: &WorkerId, epoch: WorkerEpoch) -> Option<Holder> {
        if let Some(holder) = self.get(id) {
            if epoch != self.worker(holder).epoch {
                let life = self.renew(holder)?;
                let worker = self.worker_mut(holder);
                (worker.epoch, worker.life) = (epoch, life);
                (worker.generation, worker.seq, worker.missed_after) = (0, 0, None);
            }
            return Some(holder);
        }
        let holder = self.vacant.pop().or_else(|| {
            let next = u16::try_from(self.workers.len()).ok().filter(|n| *n != NO_LIFE)?;
            self.workers.push(Worker::new(epoch, None));
            self.view.holders.store(self.workers.len(), Ordering::Release);
            Some(Holder(next))
        })?;
        let Some(life) = self.begin(holder) else {
            self.vacant.push(holder);
            return None;
        };
        self.begin_tenure(holder);
        *self.worker_mut(holder) = Worker { life, ..Worker::new(epoch, Some(id.clone())) };
        self.by_id.insert(id.clone(), holder);
        Some(holder)
    }

    /// Voids all that the worker held.
    pub(super) fn renew(&mut self, holder: Holder) -> Option<u16> {
        let suspended = self.worker(holder).suspended;
        self.end(self.worker(holder).life);
        let life = self.begin(holder);
        self.begin_tenure(holder);
        self.worker_mut(holder).life = life.unwrap_or(NO_LIFE);
        if suspended {
            life.into_iter().for_each(|life| self.set_live(life, false));
        }
        life
    }

    /// A life that matches nothing yet.
    pub(super) fn prepare(&mut self, holder: Holder) -> Option<u16> {
        let life = self.begin(holder)?;
        self.set_live(life, false);
        Some(life)
    }

    /// A prepared life takes the place of the worker's current one; what is expected of the worker stays expected.
    pub(super) fn replace(&mut self, holder: Holder, life: u16) {
        // The new one first, so that no lookup between finds neither.
        self.set_live(life, !self.worker(holder).suspended);
        self.end(self.worker(holder).life);
        self.worker_mut(holder).life = life;
    }

    /// Gives a prepared life up.
    pub(super) fn discard(&mut self, life: u16) {
        self.end(life);
    }

    /// Workers for which `wanted` holds.
    pub(super) fn ids(&self, wanted: impl Fn(&Worker) -> bool) -> Vec<WorkerId> {
        self.by_id
            .iter()
            .filter(|(_, holder)| wanted(self.worker(**holder)))
            .map(|(id, _)| id.clone())
            .collect()
    }

    /// Stops or resumes matching; what it holds is kept and goes on changing.
    pub(super) fn suspend(&mut self, holder: Holder, suspended: bool) {
        self.worker_mut(holder).suspended = suspended;
        let life = self.worker(holder).life;
        if life != NO_LIFE {
            self.set_live(life, !suspended);
        }
    }

    /// The worker is unknown from now on, its number free for another.
    pub(super) fn forget(&mut self, id: &WorkerId) {
        if let Some(holder) = self.by_id.remove(id) {
            self.end(self.worker(holder).life);
            self.begin_tenure(holder);
            let worker = self.worker_mut(holder);
            (worker.life, worker.id) = (NO_LIFE, None);
            self.vacant.push(holder);
        }
    }

    /// Lives whose blocks wait to be swept; they are the caller's from now on.
    pub(super) fn take_dead(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.dead)
    }

    /// Numbers of swept lives, to be used again.
    pub(super) fn reuse(&mut self, lives: &[u16]) {
        self.unused.extend_from_slice(lives);
    }

    /// All that was held or expected of the holder is void.
    fn begin_tenure(&mut self, holder: Holder) {
        self.last_tenure += 1;
        self.view.tenures.made(holder.0.into()).store(self.last_tenure, Ordering::Release);
    }

    fn begin(&mut self, holder: Holder) -> Option<u16> {
        let life = match self.unused.pop() {
            Some(life) => life,
            None => {
                let next = u16::try_from(self.blocks.len()).ok().filter(|n| *n != NO_LIFE)?;
                self.blocks.push(0);
                self.view.words.store(self.blocks.len().div_ceil(64), Ordering::Release);
                next
            }
        };
        self.view.owners.made(life.into()).store(holder.0, Ordering::Release);
        self.blocks[usize::from(life)] = 0;
        self.set_live(life, true);
        Some(life)
    }

    fn end(&mut self, life: u16) {
        if life != NO_LIFE {
            self.set_live(life, false);
            self.dead.push(life);
        }
    }

    fn set_live(&mut self, life: u16, live: bool) {
        let (word, bit) = (self.view.live.made(u32::from(life) / 64), 1 << (life % 64));
        if live {
            word.fetch_or(bit, Ordering::AcqRel);
        } else {
            word.fetch_and(!bit, Ordering::AcqRel);
        }
    }
}
