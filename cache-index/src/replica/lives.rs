//! Workers and their lives: what an older life held stops matching at once and is swept later.

use hashbrown::HashMap;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

use super::Holder;
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
    /// What a snapshot must include, generation and batch, to make up for batches that never came.
    pub(super) missed: Option<(u64, u64)>,
    /// When it last said something over the network.
    pub(super) heard: Option<Instant>,
    /// A member of the cluster, and not merely a name in the index.
    pub(super) member: bool,
    /// Changes whenever all that was held or expected became void.
    pub(super) tenure: u64,
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
            missed: None,
            heard: None,
            member: false,
            tenure: 0,
            life: NO_LIFE,
            suspended: false,
            id,
        }
    }

    /// Nothing was ever heard of this epoch, or not all of it.
    pub(super) fn is_behind(&self) -> bool {
        self.missed.is_some() || (self.generation, self.seq) == (0, 0)
    }
}

/// All workers and the numbers of their lives.
#[derive(Default)]
pub(super) struct Lives {
    workers: Vec<Worker>,
    by_id: HashMap<WorkerId, Holder>,
    vacant: Vec<Holder>,
    /// Whose life it is.
    owners: Vec<Holder>,
    /// Blocks that stand under it.
    blocks: Vec<u64>,
    /// Lives that may match.
    live: Bits,
    unused: Vec<u16>,
    dead: Vec<u16>,
    last_tenure: u64,
}

impl Lives {
    pub(super) fn live(&self) -> &Bits {
        &self.live
    }

    pub(super) fn owner(&self, life: u16) -> Holder {
        self.owners[usize::from(life)]
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

    /// The worker in this epoch, known from now on; None when all numbers are in use.
    pub(super) fn enroll(&mut self, id: &WorkerId, epoch: WorkerEpoch) -> Option<Holder> {
        if let Some(holder) = self.get(id) {
            if epoch > self.worker(holder).epoch {
                let life = self.renew(holder)?;
                let worker = self.worker_mut(holder);
                (worker.epoch, worker.life) = (epoch, life);
                (worker.generation, worker.seq, worker.missed) = (0, 0, None);
            }
            return Some(holder);
        }
        let holder = self.vacant.pop().or_else(|| {
            let next = u16::try_from(self.workers.len()).ok().filter(|n| *n != NO_LIFE)?;
            self.workers.push(Worker::new(epoch, None));
            Some(Holder(next))
        })?;
        let Some(life) = self.begin(holder) else {
            self.vacant.push(holder);
            return None;
        };
        let tenure = self.next_tenure();
        *self.worker_mut(holder) = Worker { life, tenure, ..Worker::new(epoch, Some(id.clone())) };
        self.by_id.insert(id.clone(), holder);
        Some(holder)
    }

    /// Voids all that the worker held.
    pub(super) fn renew(&mut self, holder: Holder) -> Option<u16> {
        let suspended = self.worker(holder).suspended;
        self.end(self.worker(holder).life);
        let life = self.begin(holder);
        let tenure = self.next_tenure();
        let worker = self.worker_mut(holder);
        (worker.life, worker.tenure) = (life.unwrap_or(NO_LIFE), tenure);
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
        self.end(self.worker(holder).life);
        let worker = self.worker_mut(holder);
        worker.life = life;
        let live = !worker.suspended;
        self.set_live(life, live);
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
            let tenure = self.next_tenure();
            let worker = self.worker_mut(holder);
            (worker.life, worker.id, worker.tenure) = (NO_LIFE, None, tenure);
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

    fn next_tenure(&mut self) -> u64 {
        self.last_tenure += 1;
        self.last_tenure
    }

    fn begin(&mut self, holder: Holder) -> Option<u16> {
        let life = match self.unused.pop() {
            Some(life) => life,
            None => {
                let next = u16::try_from(self.owners.len()).ok().filter(|n| *n != NO_LIFE)?;
                self.owners.push(holder);
                self.blocks.push(0);
                self.live.resize(self.owners.len().div_ceil(64), 0);
                next
            }
        };
        self.owners[usize::from(life)] = holder;
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
        let (word, bit) = (&mut self.live[usize::from(life) / 64], 1 << (life % 64));
        *word = if live { *word | bit } else { *word & !bit };
    }
}
