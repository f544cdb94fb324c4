//! What this router counts, in the text format of Prometheus.

mod index;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hashbrown::HashSet;
use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use thalweg_membership::MembershipStats;
use thalweg_proto::code::ErrorCode;
use tokio::time::Instant;

use self::index::IndexMetrics;
use crate::dispatch::metrics::ResumeMetrics;
use crate::dispatch::stage::Predicted;
use crate::workers::health::HealthState;
use crate::workers::load::LoadView;
use crate::workers::{Worker, Workers};

/// Behind `thalweg_` in the name of nearly every family.
const OURS: &str = "router";

/// The families of this router and the registry that shows them.
pub struct Metrics {
    registry: Mutex<Registry>,
    /// Of the way from admission to the first token.
    pub(crate) dispatch: DispatchMetrics,
    /// Of answers that went from one worker to another.
    pub(crate) resumes: ResumeMetrics,
    /// Of each worker, as this router sees it.
    workers: WorkerMetrics,
    /// Of the cache index.
    pub(crate) index: IndexMetrics,
    /// Of this router as a whole.
    pub(crate) gauges: RouterGauges,
}

impl Metrics {
    /// All families registered, at zero.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("thalweg");
        let mass_loss = Gauge::default();
        let help = "Workers that left membership all at once and are kept because they answer; 0 is well";
        registry.register("membership_mass_loss", help, mass_loss.clone());
        let ours = registry.sub_registry_with_prefix(OURS);
        let dispatch = DispatchMetrics::register(ours);
        let resumes = ResumeMetrics::register(ours);
        let workers = WorkerMetrics::register(ours);
        let index = IndexMetrics::register(ours);
        let gauges = RouterGauges::register(ours, mass_loss);
        Self { registry: Mutex::new(registry), dispatch, resumes, workers, index, gauges }
    }

    /// Lets another module add its own families.
    pub fn register<T>(&self, families: impl FnOnce(&mut Registry) -> T) -> T {
        families(self.registry.lock().sub_registry_with_prefix(OURS))
    }

    /// The text that /metrics serves, with the membership's own lines.
    pub fn encode(&self, membership: &MembershipStats) -> String {
        let mut text = String::new();
        let written = encode_registry(&mut text, &self.registry.lock())
            .and_then(|()| text.write_str(&membership.exposition()))
            .and_then(|()| encode_eof(&mut text));
        if let Err(error) = written {
            tracing::error!(%error, "metrics could not be written");
        }
        text
    }

    /// Brings what is told of every worker up to date; a worker that left takes its own with it.
    pub(crate) fn show_workers(&self, workers: &Workers) {
        self.workers.show(workers);
        self.dispatch.forget_picks_but_of(&workers.list());
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// From admission to the first token.
pub(crate) struct DispatchMetrics {
    dispatched: Family<CodeLabel, Counter>,
    broken: Family<CodeLabel, Counter>,
    retries: Family<ReasonLabel, Counter>,
    room_waits: Counter,
    picks: Family<WorkerLabel, Counter>,
    /// Workers that have a counter there.
    picked: Mutex<HashSet<String>>,
    predicted_cached_tokens: Counter,
    actual_cached_tokens: Counter,
    predicted_first_token: Histogram,
    first_token: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabel {
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    worker: String,
    state: &'static str,
}

/// One millisecond to two minutes.
fn seconds_histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 18))
}

/// Why requests are taken from a worker, so that a rate has its zero.
pub(crate) const FAILURES: [&str; 7] =
    ["connection", "connect", "gone", "ended_early", "nonsense", "draining", "unavailable"];

impl DispatchMetrics {
    fn register(registry: &mut Registry) -> Self {
        let this = Self {
            dispatched: Family::default(),
            broken: Family::default(),
            retries: Family::default(),
            room_waits: Counter::default(),
            picks: Family::default(),
            picked: Mutex::default(),
            predicted_cached_tokens: Counter::default(),
            actual_cached_tokens: Counter::default(),
            predicted_first_token: seconds_histogram(),
            first_token: seconds_histogram(),
        };
        // Codes are few, and a rate needs its zero.
        for code in ErrorCode::ALL.map(ErrorCode::as_str) {
            this.dispatched.get_or_create_owned(&CodeLabel { code });
            this.broken.get_or_create_owned(&CodeLabel { code });
        }
        this.dispatched.get_or_create_owned(&CodeLabel { code: "ok" });
        for reason in FAILURES {
            this.retries.get_or_create_owned(&ReasonLabel { reason });
        }
        registry.register(
            "requests",
            "Prompts dispatched, by code at the first token",
            this.dispatched.clone(),
        );
        registry.register(
            "streams_broken",
            "Generations that failed after their first token",
            this.broken.clone(),
        );
        let help = "Requests that another worker took before their first token, by how the one before failed";
        registry.register("retries", help, this.retries.clone());
        let help = "Requests that waited for room because workers refused them as full or leaving";
        registry.register("room_waits", help, this.room_waits.clone());
        let help = "Times that a worker took a request, anew or for another worker";
        registry.register("picks", help, this.picks.clone());
        let help = "Prompt tokens expected in the picked worker's cache";
        registry.register("predicted_cached_tokens", help, this.predicted_cached_tokens.clone());
        let help = "Prompt tokens found in the picked worker's cache";
        registry.register("actual_cached_tokens", help, this.actual_cached_tokens.clone());
        let help = "Seconds from pick to first token, as predicted";
        registry.register("predicted_time_to_first_token_seconds", help, this.predicted_first_token.clone());
        let help = "Seconds from pick to first token";
        registry.register("time_to_first_token_seconds", help, this.first_token.clone());
        this
    }

    /// A request got its first token, or failed before it.
    pub(crate) fn dispatched(&self, failed: Option<ErrorCode>) {
        let code = failed.map_or("ok", ErrorCode::as_str);
        self.dispatched.get_or_create(&CodeLabel { code }).inc();
    }

    /// A generation failed after its first token.
    pub(crate) fn broken(&self, code: ErrorCode) {
        self.broken.get_or_create(&CodeLabel { code: code.as_str() }).inc();
    }

    /// Another worker has taken a request that has no token yet.
    pub(crate) fn retried(&self, reason: &'static str) {
        self.retries.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Workers refused a request for want of room: counted once, however often it asks meanwhile.
    pub(crate) fn waits_for_room(&self) {
        self.room_waits.inc();
    }

    /// A worker took a request.
    pub(crate) fn picked(&self, worker: &str) {
        self.picks.get_or_create(&WorkerLabel { worker: worker.to_owned() }).inc();
        self.picked.lock().get_or_insert_with(worker, str::to_owned);
    }

    fn forget_picks_but_of(&self, workers: &[Arc<Worker>]) {
        let known: HashSet<&str> = workers.iter().map(|worker| worker.id.as_str()).collect();
        let left = self.picked.lock().extract_if(|name| !known.contains(name.as_str())).collect::<Vec<_>>();
        for worker in left {
            self.picks.remove(&WorkerLabel { worker });
        }
    }

    /// What became of a prediction: both are told of the same requests.
    pub(crate) fn first_token(&self, predicted: &Predicted, actual_cached: u32, seconds: f64) {
        self.predicted_cached_tokens.inc_by(u64::from(predicted.cached_tokens));
        self.predicted_first_token.observe(predicted.cost.first_token());
        self.actual_cached_tokens.inc_by(u64::from(actual_cached));
        self.first_token.observe(seconds);
    }
}

/// Gauges of each worker; never histograms, of which there would be too many.
struct WorkerMetrics {
    state: Family<StateLabel, Gauge>,
    figures: [(Family<WorkerLabel, Figure>, FigureOf, Together); 8],
}

/// What a worker has to do and has room for; one that is gone has neither, whatever it said last.
fn of_load(worker: &Worker, figure: fn(&LoadView) -> f64) -> f64 {
    if worker.state() == HealthState::Gone { 0.0 } else { figure(&worker.load()) }
}

type Figure = Gauge<f64, AtomicU64>;
type FigureOf = fn(&Workers, &Worker) -> f64;
/// What two workers of one id come to: a worker that moves is at two addresses for a while.
type Together = fn(f64, f64) -> f64;

impl WorkerMetrics {
    fn register(registry: &mut Registry) -> Self {
        let state = Family::default();
        registry.register(
            "worker_state",
            "Workers of this id in this state: one in one of them, as a rule",
            Family::clone(&state),
        );
        let mut figure = |name: &str, help: &str, together: Together, of: FigureOf| {
            let family = Family::<WorkerLabel, Figure>::default();
            registry.register(name, help, family.clone());
            (family, of, together)
        };
        let sum: Together = |a, b| a + b;
        let figures = [
            figure("worker_running", "Sequences that decode", sum, |_, w| {
                of_load(w, |load| f64::from(load.running))
            }),
            figure("worker_waiting", "Sequences that wait or were booked", sum, |_, w| {
                of_load(w, |load| f64::from(load.waiting))
            }),
            figure("worker_prefill_tokens_ahead", "Prompt tokens to compute", sum, |_, w| {
                of_load(w, |load| load.prefill_tokens_ahead as f64)
            }),
            figure("worker_kv_blocks_available", "KV blocks that are free or only cached", sum, |_, w| {
                of_load(w, |load| load.kv_blocks_available as f64)
            }),
            figure("worker_bookings", "Requests of this router on the worker", sum, |_, w| {
                w.open_bookings() as f64
            }),
            figure(
                "worker_hit_confidence",
                "Actual over predicted cached tokens, 0 to 1",
                f64::min,
                |_, w| w.confidence().ratio(),
            ),
            figure("worker_indexed_blocks", "Blocks that the cache index knows of", f64::max, |all, w| {
                all.indexed_blocks(w) as f64
            }),
            figure(
                "worker_index_silent",
                "1: it serves prompts, and the cache index knows no block",
                f64::max,
                |all, w| f64::from(u8::from(all.is_index_silent(w, Instant::now()))),
            ),
        ];
        Self { state, figures }
    }

    fn show(&self, workers: &Workers) {
        self.state.clear();
        self.figures.iter().for_each(|(family, ..)| family.clear());
        for namesakes in workers.list().chunk_by(|a, b| a.id == b.id) {
            let name = || namesakes[0].id.as_str().to_owned();
            for state in HealthState::ALL {
                let label = StateLabel { worker: name(), state: state.as_str() };
                let count = namesakes.iter().filter(|worker| worker.state() == state).count();
                self.state.get_or_create(&label).set(count as i64);
            }
            for (family, of, together) in &self.figures {
                let figures = namesakes.iter().map(|worker| of(workers, worker));
                let figure = figures.reduce(together).unwrap_or_default();
                family.get_or_create(&WorkerLabel { worker: name() }).set(figure);
            }
        }
    }
}

/// The router as a whole.
pub(crate) struct RouterGauges {
    pub(crate) queue_depth: Gauge,
    pub(crate) streams: Gauge,
    pub(crate) stream_buffer_bytes: Gauge,
    pub(crate) index_blocks: Gauge,
    pub(crate) poisoned_prompts: Gauge,
    pub(crate) mass_loss: Gauge,
    pub(crate) full_listeners: Gauge,
    pub(crate) accept_errors: Counter,
}

impl RouterGauges {
    fn register(registry: &mut Registry, mass_loss: Gauge) -> Self {
        let accept_errors = Counter::default();
        let help = "Times that a connection could not be accepted, mostly for want of file descriptors";
        registry.register("accept_errors", help, accept_errors.clone());
        let mut gauge = |name: &str, help: &str| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            gauge
        };
        Self {
            queue_depth: gauge("queue_depth", "Requests that wait in this router"),
            streams: gauge("streams", "Generations that run"),
            stream_buffer_bytes: gauge("stream_buffer_bytes", "Bytes of tokens that clients have not read"),
            index_blocks: gauge("index_blocks", "Distinct blocks in the cache index"),
            poisoned_prompts: gauge(
                "poisoned_prompts",
                "Prompts refused because three workers ended abnormally with them",
            ),
            mass_loss,
            full_listeners: gauge(
                "full_listeners",
                "Listeners that accept nobody now, because this process has as many connections as it may",
            ),
            accept_errors,
        }
    }
}
