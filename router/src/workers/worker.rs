//! One life of a worker: what it said of itself, how it is, and what was booked on it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_cache_index::{Confidence, Holder};
use thalweg_membership::GrpcAddress;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_serve::trust::TrustedChannel;
use tokio::sync::watch;
use tokio::time::Instant;

use super::failures::Life;
use super::health::{Health, HealthEvent, HealthState};
use super::in_flight::{InFlight, OnWorker};
use super::load::{LoadBook, LoadView, Weight};
use super::tokenizers::TextSide;
use crate::models::{ModelEntry, Weights};
use crate::policy::Speed;

/// A (worker, epoch). After a restart there is another one, so that nothing of the old life counts for the new.
pub struct Worker {
    /// Its name.
    pub id: WorkerId,
    /// When it began.
    pub epoch: WorkerEpoch,
    /// Since when this router knows it.
    pub(crate) since: Instant,
    /// Where it listens.
    pub address: GrpcAddress,
    /// What it said of itself.
    pub about: v1::DescribeResponse,
    /// Its number in the cache index; None when the index is full.
    pub holder: Option<Holder>,
    /// How its model's texts become tokens.
    pub(super) text: Arc<TextSide>,
    offers: HashMap<String, Weights>,
    client: WorkerClient<TrustedChannel>,
    state: watch::Sender<HealthState>,
    inner: Mutex<Inner>,
}

struct Inner {
    health: Health,
    load: LoadBook,
    in_flight: InFlight,
    confidence: Confidence,
    /// When it began the first prompt that fills a block.
    fills_blocks_since: Option<Instant>,
    speed: Arc<Speed>,
}

impl Worker {
    /// It says that it knows this part of the protocol.
    pub(crate) fn has_feature(&self, name: &str) -> bool {
        self.about.features.iter().any(|feature| feature == name)
    }

    pub(super) fn new(
        about: v1::DescribeResponse,
        text: Arc<TextSide>,
        address: GrpcAddress,
        client: WorkerClient<TrustedChannel>,
        holder: Option<Holder>,
        now: Instant,
    ) -> Self {
        let health = Health::new(now);
        let speed = Arc::new(Speed::choose(None, about.profile.as_ref(), None));
        Self {
            id: WorkerId::new(about.worker_id.as_str()),
            epoch: WorkerEpoch(about.epoch),
            since: now,
            address,
            holder,
            text,
            offers: offers(&about),
            client,
            state: watch::Sender::new(health.state(now)),
            inner: Mutex::new(Inner {
                health,
                load: LoadBook::new(about.kv_blocks_total),
                in_flight: InFlight::default(),
                confidence: Confidence::default(),
                fills_blocks_since: None,
                speed,
            }),
            about,
        }
    }

    /// Name and epoch.
    pub(crate) fn life(&self) -> Life {
        (self.id.clone(), self.epoch)
    }

    /// A handle to its gRPC service; all handles share one connection.
    pub fn client(&self) -> WorkerClient<TrustedChannel> {
        self.client.clone()
    }

    /// Where it stands.
    pub fn state(&self) -> HealthState {
        *self.state.borrow()
    }

    /// Tells every change of state.
    pub fn watch_state(&self) -> watch::Receiver<HealthState> {
        self.state.subscribe()
    }

    /// Its load, later bookings included.
    pub fn load(&self) -> LoadView {
        self.inner.lock().load.view(Instant::now())
    }

    /// Its last report.
    pub fn last_report(&self) -> v1::LoadReport {
        self.inner.lock().load.last_report().clone()
    }

    /// Bookings of this router on it.
    pub fn open_bookings(&self) -> usize {
        self.inner.lock().load.open_bookings()
    }

    /// How fast it is.
    pub fn speed(&self) -> Arc<Speed> {
        Arc::clone(&self.inner.lock().speed)
    }

    /// How far predicted hits on it come true.
    pub fn confidence(&self) -> Confidence {
        self.inner.lock().confidence
    }

    /// Takes in what became of a request's predicted hit.
    pub fn observe_hit(&self, prompt_tokens: u32, indexed_tokens: u32, actual_tokens: u32) {
        let mut inner = self.inner.lock();
        if prompt_tokens >= self.about.block_size {
            inner.fills_blocks_since.get_or_insert_with(Instant::now);
        }
        inner.confidence.observe(indexed_tokens, actual_tokens);
    }

    /// Since when it has had blocks of this router's prompts to tell of.
    pub(super) fn fills_blocks_since(&self) -> Option<Instant> {
        self.inner.lock().fills_blocks_since
    }

    /// Serves this model, or has this adapter on it, with the very weights that the name stands for.
    pub fn serves(&self, model: &ModelEntry) -> bool {
        self.offers.get(&model.name).is_some_and(|weights| *weights == model.weights())
    }

    /// What its names stand for, adapters included.
    pub(super) fn offers(&self) -> &HashMap<String, Weights> {
        &self.offers
    }

    /// What it calls this model, or the model that this adapter is on.
    pub(crate) fn name_of<'a>(&'a self, model: &'a ModelEntry) -> &'a str {
        match &model.adapter {
            None => &model.name,
            Some(adapter) => self.about.models.first().unwrap_or(&adapter.base),
        }
    }

    pub(super) fn book(&self, number: u64, weight: Weight) {
        self.inner.lock().load.book(number, weight, Instant::now());
    }

    pub(super) fn unbook(&self, number: u64) {
        let mut inner = self.inner.lock();
        inner.load.unbook(number, Instant::now());
        inner.in_flight.remove(number);
    }

    pub(super) fn add_in_flight(&self, number: u64, prompt: OnWorker) {
        self.inner.lock().in_flight.add(number, prompt);
    }

    pub(super) fn proven(&self, number: u64) {
        self.inner.lock().in_flight.proven(number);
    }

    /// Whether such a request of this router is in flight on it.
    pub(crate) fn runs(&self, is_it: impl Fn(&OnWorker) -> bool) -> bool {
        self.inner.lock().in_flight.any(is_it)
    }

    /// It ended abnormally: what this router had in flight on it, for the first that notices.
    pub(crate) fn exit(&self, now: Instant) -> Option<Vec<OnWorker>> {
        self.inner.lock().in_flight.exit(now)
    }

    /// Takes in a report; `median` is the measured speed of workers on the same hardware.
    pub(super) fn report(
        &self,
        report: v1::LoadReport,
        router_id: &str,
        median: Option<&Speed>,
        now: Instant,
    ) {
        let event = HealthEvent::Report {
            draining: report.state() == v1::WorkerState::Draining,
            steps: report.steps,
            busy: report.running + report.waiting > 0,
        };
        self.inner.lock().load.report(report, router_id, now);
        self.reckon_speed(median);
        self.on_health(event, now);
    }

    /// Its speed by its last report, beside such a median.
    pub(super) fn reckon_speed(&self, median: Option<&Speed>) {
        let mut inner = self.inner.lock();
        let measured = inner.load.last_report().rates.as_ref();
        inner.speed = Arc::new(Speed::choose(measured, self.about.profile.as_ref(), median));
    }

    /// The state before, if the event has changed it.
    pub(super) fn on_health(&self, event: HealthEvent, now: Instant) -> Option<HealthState> {
        self.inner.lock().health.on(event, now);
        self.refresh(now)
    }

    /// For this long this router did not listen to anybody.
    pub(super) fn forgive(&self, stall: Duration) {
        self.inner.lock().health.forgive(stall);
    }

    /// Lets time pass; the state before, if it has changed.
    pub(super) fn refresh(&self, now: Instant) -> Option<HealthState> {
        let inner = self.inner.lock();
        let state = inner.health.state(now);
        let mut before = None;
        self.state.send_if_modified(|current| {
            before = (*current != state).then(|| std::mem::replace(current, state));
            before.is_some()
        });
        before
    }

    /// What it measured itself, where it has samples enough, else the profile that it came with.
    pub(super) fn known_speed(&self) -> Option<Speed> {
        let measured = self.inner.lock().load.last_report().rates.as_ref().and_then(Speed::measured);
        measured.or_else(|| self.about.profile.as_ref().and_then(Speed::of_table))
    }
}

fn offers(about: &v1::DescribeResponse) -> HashMap<String, Weights> {
    let weights = |adapter| Weights { model: about.fingerprint.clone(), adapter };
    // An older version does not tell fingerprints.
    let fingerprints = about.adapter_fingerprints.iter().cloned().chain(std::iter::repeat(Bytes::new()));
    let adapters = about.adapters.iter().zip(fingerprints);
    let adapters = adapters.map(|(name, fingerprint)| (name.clone(), weights(Some(fingerprint))));
    adapters.chain(about.models.iter().map(|name| (name.clone(), weights(None)))).collect()
}
