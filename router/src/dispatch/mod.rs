//! One request from tokens to a running generation: hash, wait for room, match, pick, book, open; and again elsewhere when
//! the worker is lost, before the first token or after it.

mod attempt;
mod blame;
mod broken;
mod buffer;
mod carry;
mod channel;
mod ended;
mod generation;
mod journey;
mod lengths;
pub(crate) mod metrics;
mod place;
mod poison;
mod progress;
pub mod stage;
mod taken;
mod trial;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use thalweg_cache_index::Replica;
use thalweg_proto::code::ErrorCode;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use ended::ChoiceEnder;
pub use generation::{Generation, GenerationEvent};
pub use stage::Tokenized;
pub use taken::Taken;

use crate::admission::{Ask, Gate, Permit};
use crate::config::RouterConfig;
use crate::error::RouterError;
use crate::metrics::Metrics;
use crate::policy::Policy;
use crate::workers::Workers;
use blame::Blame;
use buffer::BufferPool;
use channel::Channels;
use journey::TryLimits;
use lengths::OutputLengths;
use poison::Poison;
use progress::Progress;
use stage::{Hashed, Streaming};

/// When a request may succeed elsewhere or later, as clients are told.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Takes requests to workers.
pub struct Dispatcher {
    policy: Policy,
    harm_weight: f64,
    limits: TryLimits,
    client_stall_timeout: Duration,
    queue_timeout: Duration,
    workers: Arc<Workers>,
    channels: Arc<Channels>,
    replica: Arc<Replica>,
    gate: Arc<Gate>,
    metrics: Arc<Metrics>,
    buffers: Arc<BufferPool>,
    lengths: Mutex<OutputLengths>,
    poison: Mutex<Poison>,
    blame: Arc<Mutex<Blame>>,
    /// Held by the one request that is tried alone.
    alone: Arc<Semaphore>,
    rng: Mutex<StdRng>,
    turn: AtomicU64,
    last_attempt: AtomicU64,
    stop: CancellationToken,
}

impl Dispatcher {
    /// A dispatcher to these workers.
    pub fn new(
        config: &RouterConfig,
        workers: Arc<Workers>,
        replica: Arc<Replica>,
        gate: Arc<Gate>,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            policy: config.policy,
            harm_weight: config.harm_weight,
            limits: TryLimits {
                attempts_max: config.limits.attempts_max,
                resumes_max: config.limits.resumes_max,
            },
            client_stall_timeout: config.timeouts.client_stall_timeout,
            queue_timeout: config.timeouts.queue_timeout,
            workers,
            channels: Arc::default(),
            replica,
            gate,
            metrics,
            buffers: BufferPool::new(config.limits.stream_buffer_bytes_max),
            lengths: Mutex::default(),
            poison: Mutex::default(),
            blame: Arc::default(),
            alone: Arc::new(Semaphore::new(1)),
            rng: Mutex::new(config.router_seed.map_or_else(rand::make_rng, StdRng::seed_from_u64)),
            turn: AtomicU64::new(0),
            last_attempt: AtomicU64::new(0),
            stop: CancellationToken::new(),
        }
    }

    /// Waits in admission, picks a worker, opens the stream, and tries elsewhere as long as no token has come. Returns
    /// with the first tokens of the worker that serves it. Dropping the future gives up.
    pub async fn dispatch(self: &Arc<Self>, request: Tokenized) -> Result<Generation, RouterError> {
        let result = tokio::select! {
            result = self.to_first_token(request.hash()) => result,
            () = self.stop.cancelled() => Err(stopping()),
        };
        let code = result.as_ref().err().map(|error| error.code);
        self.metrics.dispatch.dispatched(code);
        result.map(|streaming| {
            self.account_first_token(&streaming);
            Generation::start(self, streaming)
        })
    }

    /// Ends everything that still waits or runs with an error.
    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Generations that run.
    pub fn running(&self) -> usize {
        self.buffers.len()
    }

    /// Prompts that are refused because workers ended with them.
    pub fn poisoned(&self) -> usize {
        self.poison.lock().len(Instant::now())
    }

    /// Bytes of tokens that clients have not read yet.
    pub fn buffered_bytes(&self) -> usize {
        self.buffers.bytes()
    }

    async fn to_first_token(&self, hashed: Hashed) -> Result<Streaming, RouterError> {
        self.poison.lock().check(&hashed.prompt, Instant::now())?;
        let permit = self.enter(&hashed).await?;
        self.carry(hashed, permit).await
    }

    async fn enter(&self, hashed: &Hashed) -> Result<Permit, RouterError> {
        let request = &hashed.request;
        let output = f64::from(request.n) * self.expected_output(request);
        let ask = Ask {
            model: Arc::clone(&request.model),
            tenant: request.tenant.as_str().into(),
            tenant_limit: request.tenant_limit,
            priority: request.priority,
            tokens: request.prompt_ids.len() as u64 + output as u64,
            deadline: request.deadline,
        };
        self.gate.enter(ask).await
    }

    fn account_first_token(&self, streaming: &Streaming) {
        let (placed, actual) = (&streaming.placed, streaming.prompt.cached_tokens);
        let seconds = placed.predicted.at.elapsed().as_secs_f64();
        self.metrics.dispatch.first_token(&placed.predicted, actual, seconds);
    }

    /// What the worker had in its cache, against what the index said. A resume may find more than the prompt.
    fn account_hit(&self, streaming: &Streaming) {
        let placed = &streaming.placed;
        let prompt = placed.hashed.request.prompt_ids.len() as u32;
        let actual = streaming.prompt.cached_tokens.min(prompt);
        placed.booking.worker().observe_hit(prompt, placed.predicted.indexed_tokens, actual);
    }

    fn expected_output(&self, request: &Tokenized) -> f64 {
        self.lengths.lock().expected(&request.model.name, &request.tenant, request.sampling.max_tokens)
    }

    fn observe_lengths(&self, request: &Tokenized, progress: &Progress) {
        if request.embedding.is_some() {
            return;
        }
        let mut lengths = self.lengths.lock();
        for choice in progress.choices() {
            lengths.observe(&request.model.name, &request.tenant, choice.output_ids.len());
        }
    }

    fn next_turn(&self) -> u64 {
        self.turn.fetch_add(1, Ordering::Relaxed)
    }

    fn next_attempt(&self) -> u64 {
        self.last_attempt.fetch_add(1, Ordering::Relaxed) + 1
    }
}

fn stopping() -> RouterError {
    RouterError::new(ErrorCode::Draining, "this router shuts down; try again").retry_after(RETRY_AFTER)
}
