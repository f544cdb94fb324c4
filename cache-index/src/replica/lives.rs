//! Workers and their lives: what an older life held stops matching at once and is swept later.

use hashbrown::HashMap;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};

use super::Holder;
use super::slots::NO_LIFE;
use super::walk::Bits;

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) epoch: WorkerEpoch,
    /// Last batch taken in.
    pub(super) seq: u64,
    /// Under which number its blocks stand; a new one whenever all of them became void.
    pub(super) life: u16,
    suspended: bool,
    id: Option<WorkerId>,
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
                (worker.epoch, worker.seq, worker.life) = (epoch, 0, life);
            }
            return Some(holder);
        }
        let holder = self.vacant.pop().or_else(|| {
            let next = u16::try_from(self.workers.len()).ok().filter(|n| *n != NO_LIFE)?;
            self.workers.push(Worker { epoch, seq: 0, life: NO_LIFE, suspended: false, id: None });
            Some(Holder(next))
        })?;
        let Some(life) = self.begin(holder) else {
            self.vacant.push(holder);
            return None;
        };
        *self.worker_mut(holder) = Worker { epoch, seq: 0, life, suspended: false, id: Some(id.clone()) };
        self.by_id.insert(id.clone(), holder);
        Some(holder)
    }

    /// Voids all that the worker held.
    pub(super) fn renew(&mut self, holder: Holder) -> Option<u16> {
        let suspended = self.worker(holder).suspended;
        self.end(self.worker(holder).life);
        let life = self.begin(holder);
        self.worker_mut(holder).life = life.unwrap_or(NO_LIFE);
        if suspended {
            life.into_iter().for_each(|life| self.set_live(life, false));
        }
        life
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
