//! Requests in, token streams out: one thread that plans steps, runs them two deep and hands out what they yield.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

mod bookings;
mod channel;
mod core;
mod handle;
mod inbox;
mod ledger;
mod live;
mod load;
mod queue;
mod rates;
mod request;
mod thread;

pub use channel::{ChannelEvent, ChannelReader, EventChannel};
pub use handle::{EngineHandle, EngineStream, Refusal};
pub use load::{Counters, DecodeRate, KvUsage, LoadSnapshot, OBSERVATIONS_MAX, Observations, Rates};
pub use request::{ChoiceDelta, ChoiceState, EngineEvent, EngineRequest, FinishReason, PromptInfo};

use self::core::EngineCore;
use crate::kv::{self, FULL, KvConfig, KvEventSink, SLIDING};
use crate::plan::KV_GROUPS;
use crate::runner::Runner;
use crate::scheduler::SchedulerConfig;
use handle::RequestLimits;
use inbox::Inbox;
use queue::QueueLimits;
use thread::EngineThread;

/// What an engine is started with.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// Blocks per KV group, `[full, sliding]`; see `kv::plan_blocks`. 0 for a group without layers.
    pub kv_blocks: [usize; KV_GROUPS],
    /// Which groups have layers.
    pub has_group: [bool; KV_GROUPS],
    /// Tokens that sliding layers see, the current one included. Set when `has_group[1]`.
    pub sliding_window: Option<usize>,
    /// Longest sequence, prompt and output.
    pub max_model_len: usize,
    /// Sequences that run at once; also the number of slots.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// The same of a step in which many sequences decode.
    pub max_num_mixed_tokens: usize,
    /// Sequences that wait at most; more are refused as overloaded.
    pub max_waiting: usize,
    /// Reuse blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Prompt tokens per second to assume until they are measured. 0: not known, and what waits is bounded by `max_waiting`
    /// alone.
    pub prefill_rate: f64,
}

/// Default of `EngineConfig::max_waiting`.
pub const MAX_WAITING_DEFAULT: usize = 1024;

/// The engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting is out of bounds.
    #[error("{setting}: {reason}")]
    Config {
        /// Which.
        setting: &'static str,
        /// What is wrong, and what would be right.
        reason: String,
    },
    /// Not even one sequence fits.
    #[error(
        "one sequence of {max_model_len} tokens needs {needed} KV blocks of {block_tokens} tokens in group {group}, but \
         there are {given}: raise --kv-cache-memory-bytes or lower --max-model-len"
    )]
    KvTooSmall {
        /// Longest sequence.
        max_model_len: usize,
        /// Tokens of a block.
        block_tokens: usize,
        /// `full` or `sliding`.
        group: &'static str,
        /// Blocks that it needs.
        needed: usize,
        /// Blocks that there are.
        given: usize,
    },
    /// No thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Checks the configuration and starts the engine's thread. `events` hears of every block that can be matched, or no
    /// longer; it must not block.
    pub fn start(
        config: EngineConfig,
        runner: Box<dyn Runner>,
        events: Option<Box<dyn KvEventSink>>,
    ) -> Result<EngineHandle, EngineError> {
        config.check()?;
        let core = EngineCore::new(&config);
        let inbox = Arc::new(Inbox::new(QueueLimits {
            waiting_max: config.max_waiting,
            running_max: config.max_num_seqs,
            prefill_rate: config.prefill_rate,
        }));
        let (load, watch) = watch::channel(core.snapshot());
        let load = Arc::new(load);
        let drain = Arc::downgrade(&load);
        let observations = Arc::new(Mutex::default());
        let limits = RequestLimits {
            max_model_len: config.max_model_len,
            vocab_size: config.vocab_size,
            choices_max: config.max_waiting,
        };
        let thread = EngineThread {
            core,
            runner,
            inbox: inbox.clone(),
            kv_events: events,
            load,
            observations: observations.clone(),
            started: Instant::now(),
            in_flight: VecDeque::new(),
        };
        std::thread::Builder::new().name("engine".into()).spawn(move || thread.run())?;
        Ok(EngineHandle::new(inbox, limits, watch, drain, observations))
    }
}

impl EngineConfig {
    fn check(&self) -> Result<(), EngineError> {
        let wrong = |setting, reason: &str| Err(EngineError::Config { setting, reason: reason.into() });
        if self.block_tokens == 0 || self.max_num_seqs == 0 || self.max_waiting == 0 {
            return wrong("block_tokens, --max-num-seqs, max_waiting", "must be at least 1");
        }
        if self.max_model_len < 2 {
            return wrong("--max-model-len", "must be at least 2: a token of prompt and one of output");
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return wrong(
                "--max-num-batched-tokens",
                "must be at least --max-num-seqs, so that all can decode at once",
            );
        }
        if self.max_num_mixed_tokens < self.max_num_seqs {
            return wrong(
                "--max-num-mixed-tokens",
                "must be at least --max-num-seqs, so that prompts go on while all others decode",
            );
        }
        if self.has_group[SLIDING] && self.sliding_window.is_none_or(|window| window == 0) {
            return wrong("sliding_window", "must be at least 1 where layers slide");
        }
        self.check_blocks()
    }

    fn check_blocks(&self) -> Result<(), EngineError> {
        let least = kv::blocks_per_sequence(self.max_model_len, self.block_tokens, self.sliding_window);
        for (group, name) in [(FULL, "full"), (SLIDING, "sliding")] {
            let (needed, given) = (least[group], self.kv_blocks[group]);
            if self.has_group[group] && given < needed {
                let (max_model_len, block_tokens) = (self.max_model_len, self.block_tokens);
                return Err(EngineError::KvTooSmall {
                    max_model_len,
                    block_tokens,
                    group: name,
                    needed,
                    given,
                });
            }
        }
        Ok(())
    }

    fn scheduler(&self) -> SchedulerConfig {
        SchedulerConfig {
            kv: KvConfig {
                block_tokens: self.block_tokens,
                blocks: self.kv_blocks,
                has_group: self.has_group,
                sliding_window: self.sliding_window.filter(|_| self.has_group[SLIDING]),
                prefix_caching: self.enable_prefix_caching,
            },
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_mixed_tokens: self.max_num_mixed_tokens,
        }
    }
}
