//! Keeping up with workers over a network that loses things: gaps, and the snapshots that close them.
//!
//! A gap voids nothing. What is known stays as a hint, later batches go on changing it, and the worker counts as behind
//! until a snapshot that reaches into the gap is installed: into a life that matches nothing while it is filled, and takes
//! the old one's place at once. The stream is then read again from where the snapshot joins it, so that batches are not lost
//! for good that came before anybody knew of their epoch. What the stream does not have either is a gap once more, from
//! there on, and the same snapshot is of no use a second time.

use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

use super::{Applied, BLOCKS_PER_LOCK, Holder, Replica, Table};
use crate::EventBatch;

/// A point in what a worker says. Batches are numbered from 1 within each generation, generations from 0 within each
/// epoch; a generation begins with a snapshot, its number 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Which life of the worker.
    pub epoch: WorkerEpoch,
    /// Which numbering.
    pub generation: u64,
    /// The last batch included.
    pub seq: u64,
}

/// Why a snapshot is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotInstalled {
    /// It is of another life of the worker.
    OtherLife,
    /// It includes nothing of what was missed: a later one will.
    TooOld,
    /// All that it says was known already.
    Known,
    /// No number is left for another worker or life.
    Full,
}

/// A snapshot on its way in. Dropping it unfinished leaves all as it was.
pub struct Install<'a> {
    replica: &'a Replica,
    worker: WorkerId,
    holder: Holder,
    life: Option<u16>,
    at: Position,
    now: Instant,
}

impl Replica {
    /// Takes in one batch of a stream from which batches may be missing or come again. `batch.seq` counts within
    /// `generation`.
    pub fn follow(&self, generation: u64, batch: &EventBatch, now: Instant) -> Applied {
        let (holder, applied) = match self.table.lock().advance(generation, batch, now) {
            Ok(advanced) => advanced,
            Err(refused) => return refused,
        };
        self.change_all(holder, batch);
        applied
    }

    /// Whether a snapshot is of use.
    pub fn wants(&self, worker: &WorkerId, at: Position) -> Result<(), NotInstalled> {
        let table = self.table.lock();
        match table.lives.get(worker) {
            Some(holder) if table.lives.knows_better(holder, at.epoch) => table.judge(holder, at),
            _ => Ok(()),
        }
    }

    /// Begins to take a snapshot in, if it is of use.
    pub fn install(
        &self,
        worker: &WorkerId,
        at: Position,
        now: Instant,
    ) -> Result<Install<'_>, NotInstalled> {
        let mut table = self.table.lock();
        let holder = table.lives.hear(worker, at.epoch).ok_or(NotInstalled::Full)?;
        table.judge(holder, at)?;
        let life = Some(table.lives.prepare(holder).ok_or(NotInstalled::Full)?);
        Ok(Install { replica: self, worker: worker.clone(), holder, life, at, now })
    }

    /// Workers of which nothing was ever heard in their epoch, or of which something was missed; and whether they are silent:
    /// nothing was heard, though somebody enrolled them, as opposed to names that only the index knows.
    pub fn behind(&self) -> Vec<(WorkerId, bool)> {
        let table = self.table.lock();
        let behind = table.lives.ids(|worker| worker.is_behind());
        let is_silent =
            |id: &WorkerId| table.lives.get(id).is_some_and(|holder| table.lives.worker(holder).is_silent());
        behind.into_iter().map(|id| (id.clone(), is_silent(&id))).collect()
    }

    /// Up to where the worker was followed.
    pub fn position(&self, worker: &WorkerId) -> Option<Position> {
        let table = self.table.lock();
        let known = table.lives.worker(table.lives.get(worker)?);
        Some(Position { epoch: known.epoch, generation: known.generation, seq: known.seq })
    }

    /// Forgets workers that nobody enrolled and that have said nothing since `cutoff`: left over from before this process.
    pub fn forget_strangers(&self, cutoff: Instant) -> usize {
        let stranger = |heard: Option<Instant>| heard.is_none_or(|heard| heard < cutoff);
        let strangers = self.table.lock().lives.ids(|worker| !worker.member && stranger(worker.heard));
        strangers.iter().for_each(|id| self.forget(id));
        strangers.len()
    }
}

impl Install<'_> {
    /// Adds blocks, a bounded piece under each hold of the lock.
    pub fn add(&self, keys: &[u64]) {
        let Some(life) = self.life else { return };
        for piece in keys.chunks(BLOCKS_PER_LOCK) {
            self.replica.table.lock().fill(life, piece);
        }
    }

    /// Makes the snapshot what is known of the worker, unless that has moved on meanwhile.
    pub fn finish(mut self) -> Result<(), NotInstalled> {
        let mut table = self.replica.table.lock();
        if table.lives.get(&self.worker) != Some(self.holder) {
            return Err(NotInstalled::OtherLife);
        }
        table.judge(self.holder, self.at)?;
        if let Some(life) = self.life.take() {
            table.lives.replace(self.holder, life);
            let worker = table.lives.worker_mut(self.holder);
            (worker.generation, worker.seq) = (self.at.generation, self.at.seq);
            (worker.missed_after, worker.heard) = (None, Some(self.now));
        }
        Ok(())
    }
}

impl Drop for Install<'_> {
    fn drop(&mut self) {
        if let Some(life) = self.life.take() {
            self.replica.table.lock().lives.discard(life);
        }
    }
}

impl Table {
    fn advance(
        &mut self,
        generation: u64,
        batch: &EventBatch,
        now: Instant,
    ) -> Result<(Holder, Applied), Applied> {
        let holder = self.lives.hear(&batch.worker, batch.epoch).ok_or(Applied::Full)?;
        let worker = self.lives.worker_mut(holder);
        if batch.epoch != worker.epoch || (generation, batch.seq) <= (worker.generation, worker.seq) {
            return Err(Applied::Stale);
        }
        let last = (worker.generation, worker.seq);
        let seen = if generation == worker.generation { worker.seq } else { 0 };
        let missing = (batch.seq - seen - 1).max(u64::from(generation != worker.generation));
        (worker.generation, worker.seq, worker.heard) = (generation, batch.seq, Some(now));
        if missing == 0 {
            return Ok((holder, Applied::InOrder));
        }
        worker.missed_after.get_or_insert(last);
        Ok((holder, Applied::Gap { missing }))
    }

    fn judge(&self, holder: Holder, at: Position) -> Result<(), NotInstalled> {
        let worker = self.lives.worker(holder);
        let point = (at.generation, at.seq);
        match worker.missed_after {
            _ if at.epoch != worker.epoch => Err(NotInstalled::OtherLife),
            Some(last) if point <= last => Err(NotInstalled::TooOld),
            None if point <= (worker.generation, worker.seq) => Err(NotInstalled::Known),
            _ => Ok(()),
        }
    }

    fn fill(&mut self, life: u16, keys: &[u64]) {
        for key in keys {
            if self.slots.add(*key, life) {
                self.lives.count(life, true);
            }
        }
    }
}
