//! Every worker that membership names, each in its present life.

mod booking;
mod catalog;
mod conflicts;
mod connection;
mod embedding;
pub(crate) mod failures;
pub mod health;
pub(crate) mod in_flight;
mod listing;
pub mod load;
mod member;
mod room;
mod silence;
#[cfg(test)]
mod testing;
mod tokenizers;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use rand::RngExt;
use thalweg_cache_index::Replica;
use thalweg_membership::{GrpcAddress, Member};
use thalweg_proto::ids::WorkerId;
use thalweg_serve::trust::ClientTrust;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

pub use booking::Booking;
pub(crate) use embedding::{EMBED, no_embeddings};
pub use room::Room;
pub use worker::Worker;

use crate::models::{ModelEntry, Models};
use crate::policy::Speed;
use failures::{Failures, Life};
use health::{HealthEvent, HealthState};
use listing::Listing;
use load::Weight;
use tokenizers::Tokenizers;

/// The registry of workers. Reads for a pick never block.
pub struct Workers {
    router_id: String,
    connect_timeout: Duration,
    trust: ClientTrust,
    models: Arc<Models>,
    replica: Arc<Replica>,
    tokenizers: Tokenizers,
    /// Locked before `by_address` where both are needed.
    listing: Mutex<Listing>,
    mass_loss: AtomicUsize,
    /// Whether the cache index can hear nobody.
    is_index_deaf: AtomicBool,
    failures: Mutex<Failures>,
    by_address: Mutex<HashMap<GrpcAddress, Arc<Worker>>>,
    list: ArcSwap<Vec<Arc<Worker>>>,
    medians: ArcSwap<HashMap<LikeWorkers, Speed>>,
    last_booking: AtomicU64,
    room: Notify,
    /// Number of ready workers.
    ready: watch::Sender<usize>,
}

/// Workers whose speeds may be compared.
#[derive(PartialEq, Eq, Hash)]
struct LikeWorkers {
    hardware: String,
    fingerprint: Bytes,
}

impl LikeWorkers {
    fn of(worker: &Worker) -> Self {
        Self { hardware: worker.about.hardware.clone(), fingerprint: worker.about.fingerprint.clone() }
    }
}

impl Workers {
    /// No workers yet.
    pub fn new(
        router_id: String,
        connect_timeout: Duration,
        trust: ClientTrust,
        models: Arc<Models>,
        replica: Arc<Replica>,
    ) -> Self {
        Self {
            router_id: format!("{router_id}/{:016x}", rand::rng().random::<u64>()),
            connect_timeout,
            trust,
            models,
            replica,
            tokenizers: Tokenizers::default(),
            listing: Mutex::default(),
            mass_loss: AtomicUsize::new(0),
            is_index_deaf: AtomicBool::new(false),
            failures: Mutex::default(),
            by_address: Mutex::default(),
            list: ArcSwap::default(),
            medians: ArcSwap::default(),
            last_booking: AtomicU64::new(0),
            room: Notify::new(),
            ready: watch::Sender::new(0),
        }
    }

    /// How workers tell our bookings from those of other routers: by name and life, for they remember the highest number of
    /// each, and numbers begin at 1 again with every life.
    pub fn router_id(&self) -> &str {
        &self.router_id
    }

    /// All workers, whatever their state.
    pub fn list(&self) -> Arc<Vec<Arc<Worker>>> {
        self.list.load_full()
    }

    /// Books a request on a worker.
    pub fn book(self: &Arc<Self>, worker: &Arc<Worker>, weight: Weight) -> Booking {
        let number = self.last_booking.fetch_add(1, Ordering::Relaxed) + 1;
        Booking::new(Arc::clone(self), Arc::clone(worker), number, weight)
    }

    /// Workers that may be given a request of this model or adapter now.
    pub fn ready_for(&self, model: &ModelEntry) -> Vec<Arc<Worker>> {
        let list = self.list.load();
        let serves = |w: &&Arc<Worker>| w.state() == HealthState::Ready && w.serves(model);
        list.iter().filter(serves).cloned().collect()
    }

    /// How much of this model's work the ready workers would take now.
    pub fn room(&self, model: &ModelEntry) -> Room {
        room::of_model(&self.list.load(), model)
    }

    /// Waits until there may be more room, or none at all any more.
    pub async fn room_change(&self) {
        self.room.notified().await;
    }

    /// Waits until at least so many workers are ready.
    pub async fn wait_for_ready(&self, count: usize) {
        let mut ready = self.ready.subscribe();
        // The sender is ours: it cannot close.
        let _ = ready.wait_for(|ready| *ready >= count).await;
    }

    /// Tells whenever workers come, go or change their state, after the models that they serve are known.
    pub(crate) fn changes(&self) -> watch::Receiver<usize> {
        self.ready.subscribe()
    }

    /// Blocks that the cache index knows the worker to hold.
    pub fn indexed_blocks(&self, worker: &Worker) -> u64 {
        worker.holder.map_or(0, |holder| self.replica.blocks_of(holder))
    }

    /// Workers that membership lost all at once while they answer: they are kept.
    pub fn mass_loss(&self) -> usize {
        self.mass_loss.load(Ordering::Relaxed)
    }

    /// Lets time pass over every worker. For `stall` this router was not able to listen.
    pub fn tick(&self, now: Instant, stall: Duration) {
        self.measure_medians();
        self.look_for_mass_loss(now);
        let mut changed = false;
        for worker in self.list.load().iter() {
            worker.forgive(stall);
            if let Some(before) = worker.refresh(now) {
                self.state_changed(worker, before, now);
                changed = true;
            }
        }
        if changed {
            self.rebuild();
        }
    }

    pub(crate) fn room_changed(&self) {
        self.room.notify_one();
    }

    /// Takes in what membership says now.
    fn listed(&self, list: &[Member], now: Instant) {
        let mut listing = self.listing.lock();
        listing.update(list, now);
        let workers: Vec<Arc<Worker>> = self.by_address.lock().values().cloned().collect();
        let withdrawn = |worker: &Worker| listing.withdraws(&worker.address, &worker.id);
        let change = |w: &Arc<Worker>| {
            let before = w.on_health(HealthEvent::Withdrawn(withdrawn(w)), now)?;
            Some((Arc::clone(w), before))
        };
        let changed: Vec<(Arc<Worker>, HealthState)> = workers.iter().filter_map(change).collect();
        drop(listing);
        changed.iter().for_each(|(worker, before)| self.state_changed(worker, *before, now));
        if !changed.is_empty() {
            self.rebuild();
        }
    }

    /// Workers that left membership together while they answer are kept as all are whose reports go on; but somebody
    /// should know.
    fn look_for_mass_loss(&self, now: Instant) {
        let mut listing = self.listing.lock();
        let by_address = self.by_address.lock();
        let lives = |address: &GrpcAddress| {
            by_address
                .get(address)
                .is_some_and(|w| matches!(w.state(), HealthState::Ready | HealthState::Suspect))
        };
        let Some(lost) = listing.lost(now, lives) else { return };
        drop((listing, by_address));
        match (self.mass_loss.swap(lost, Ordering::Relaxed), lost) {
            (_, 0) => tracing::info!("no worker is missing from membership any more"),
            (0, lost) => tracing::warn!(lost, "membership lost workers that answer: they are kept"),
            _ => {}
        }
    }

    /// A worker that described itself at an address; the worker of before when it is still the same life. None when
    /// another listed address has that very life already.
    fn register(&self, worker: Worker) -> Option<Arc<Worker>> {
        let listing = self.listing.lock();
        let mut by_address = self.by_address.lock();
        let same = |w: &Arc<Worker>| w.id == worker.id && w.epoch == worker.epoch;
        let elsewhere = |address: &GrpcAddress| *address != worker.address && listing.has(address);
        if by_address.iter().any(|(address, w)| elsewhere(address) && same(w)) {
            return None;
        }
        if let Some(known) = by_address.get(&worker.address).filter(|w| same(w)) {
            return Some(Arc::clone(known));
        }
        let withdrawn = listing.withdraws(&worker.address, &worker.id);
        worker.on_health(HealthEvent::Withdrawn(withdrawn), Instant::now());
        let worker = Arc::new(worker);
        let former = by_address.insert(worker.address.clone(), Arc::clone(&worker));
        drop((listing, by_address));
        if let Some(former) = former {
            let now = Instant::now();
            if let Some(before) = former.on_health(HealthEvent::Replaced, now) {
                self.note_failure(&former, before, now);
            }
            self.forget_unless_known(&former.id);
        }
        self.rebuild();
        Some(worker)
    }

    /// The address is no longer a member and its report stream has ended.
    fn remove(&self, address: &GrpcAddress) {
        let Some(worker) = self.by_address.lock().remove(address) else { return };
        worker.on_health(HealthEvent::Replaced, Instant::now());
        self.forget_unless_known(&worker.id);
        self.rebuild();
    }

    /// The index keeps what a worker holds that is known at another address, or at this one in its next life.
    fn forget_unless_known(&self, id: &WorkerId) {
        let by_address = self.by_address.lock();
        if !by_address.values().any(|w| w.id == *id) {
            self.replica.forget(id);
        }
    }

    fn report(&self, worker: &Worker, report: thalweg_proto::v1::LoadReport, now: Instant) {
        let before = worker.state();
        let medians = self.medians.load();
        worker.report(report, &self.router_id, medians.get(&LikeWorkers::of(worker)), now);
        if worker.state() != before {
            self.state_changed(worker, before, now);
            self.rebuild();
        }
        self.room_changed();
    }

    /// The connection to it broke.
    pub(crate) fn lost(&self, worker: &Worker, now: Instant) {
        if let Some(before) = worker.on_health(HealthEvent::Lost, now) {
            self.state_changed(worker, before, now);
            self.rebuild();
        }
    }

    /// When a worker of these weights failed last.
    pub(crate) fn last_failure(&self, fingerprint: &[u8]) -> Option<Instant> {
        self.failures.lock().last(fingerprint)
    }

    /// Whether a worker of these weights other than `lives` failed within that time.
    pub(crate) fn failed_beside(
        &self,
        fingerprint: &[u8],
        lives: &[Life],
        (from, to): (Instant, Instant),
    ) -> bool {
        self.failures.lock().any_beside(fingerprint, lives, from, to)
    }

    fn note_failure(&self, worker: &Worker, before: HealthState, now: Instant) {
        if before == HealthState::Ready && matches!(worker.state(), HealthState::Suspect | HealthState::Gone)
        {
            self.failures.lock().add(worker.life(), worker.about.fingerprint.clone(), now);
        }
    }

    fn state_changed(&self, worker: &Worker, before: HealthState, now: Instant) {
        let state = worker.state();
        self.note_failure(worker, before, now);
        tracing::info!(worker = %worker.id, state = state.as_str(), "worker state changed");
        // One that moved is known at two addresses for a while, and shares its number in the index.
        let lives_elsewhere = |w: &Arc<Worker>| {
            w.id == worker.id && w.address != worker.address && w.state() != HealthState::Gone
        };
        if let Some(holder) = worker.holder.filter(|_| !self.list.load().iter().any(lives_elsewhere)) {
            self.replica.suspend(holder, state == HealthState::Gone);
        }
        self.room_changed();
    }

    /// What workers of like hardware and weights are known to do, and what that makes of each: all of them at once, since speeds that
    /// are bounded by different medians cannot be compared.
    fn measure_medians(&self) {
        let mut known: HashMap<LikeWorkers, Vec<Speed>> = HashMap::new();
        for worker in self.list.load().iter() {
            if let Some(speed) = worker.known_speed() {
                known.entry(LikeWorkers::of(worker)).or_default().push(speed);
            }
        }
        let median = |(like, speeds): (LikeWorkers, Vec<Speed>)| Some((like, Speed::median(&speeds)?));
        let medians: HashMap<_, _> = known.into_iter().filter_map(median).collect();
        for worker in self.list.load().iter() {
            worker.reckon_speed(medians.get(&LikeWorkers::of(worker)));
        }
        self.medians.store(Arc::new(medians));
    }

    /// Derives the list and the served models from the registered workers.
    fn rebuild(&self) {
        let by_address = self.by_address.lock();
        let mut list: Vec<Arc<Worker>> = by_address.values().cloned().collect();
        list.sort_by(|a, b| a.id.cmp(&b.id).then_with(|| a.address.cmp(&b.address)));
        let table = catalog::of_workers(&list, &self.models.table());
        self.models.replace(table, |model| list.iter().any(|w| w.serves(model)));
        let ready = list.iter().filter(|w| w.state() == HealthState::Ready).count();
        self.list.store(Arc::new(list));
        self.ready.send_replace(ready);
        drop(by_address);
        self.room_changed();
    }
}
