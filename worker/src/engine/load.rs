//! What the engine tells of itself: its load, its speed and what it has done.

use std::collections::BTreeMap;
use std::sync::Arc;

/// State of the engine after one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LoadSnapshot {
    /// New work is refused.
    pub draining: bool,
    /// Sequences with a slot.
    pub running: u32,
    /// Sequences that wait for one, preempted ones included.
    pub waiting: u32,
    /// Of these, those that a request which came now would wait for.
    pub waiting_ahead: u32,
    /// Tokens that wait for prefill or are in the midst of it, without those that were held in the prefix cache when
    /// their request came.
    pub prefill_tokens_ahead: u64,
    /// Tokens in the KV cache, summed over running sequences.
    pub running_context_tokens: u64,
    /// Blocks of the group that is published: full attention, or sliding where the model has only that.
    pub kv: KvUsage,
    /// Steps completed.
    pub steps: u64,
    /// Measured speed.
    pub rates: Rates,
    /// Per router the highest booking number that these figures include.
    pub booked: Arc<BTreeMap<String, u64>>,
    /// What has happened since start.
    pub counters: Counters,
}

/// Blocks of one KV group: `free + cached + in use == total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvUsage {
    /// All blocks.
    pub total: u64,
    /// Hold nothing.
    pub free: u64,
    /// Hold a prefix that no sequence uses; given up when blocks are needed.
    pub cached: u64,
}

/// Work per busy second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// 0 until there are samples.
    pub prefill_tokens_per_second: f64,
    /// Steps that the figure rests on.
    pub prefill_samples: u32,
    /// Ascending by batch; only those with samples.
    pub decode: Vec<DecodeRate>,
}

/// Time of one decode step at batches of up to `batch` sequences and above half of it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DecodeRate {
    /// A power of two.
    pub batch: u32,
    /// Seconds.
    pub step_seconds: f64,
    /// Steps that the figure rests on.
    pub samples: u32,
}

/// Cumulative since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Prompt tokens of requests that got to their first token, cached ones included.
    pub prompt_tokens: u64,
    /// Tokens put out.
    pub generation_tokens: u64,
    /// Prompt tokens that were looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Of these, found.
    pub prefix_hits: u64,
    /// Sequences that had to give up their blocks and be computed again.
    pub preemptions: u64,
    /// Requests aborted: cut by the client, or by the worker's end.
    pub aborted: u64,
    /// Choices ended by a stop id.
    pub finished_stop: u64,
    /// Choices ended by max_tokens or the context's end.
    pub finished_length: u64,
    /// Choices aborted.
    pub finished_abort: u64,
    /// Steps after which the block count did not add up: a fault of ours, always 0.
    pub invariant_violations: u64,
}

/// Samples for histograms since the last time they were taken, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Observations {
    /// Arrival to first token, per request.
    pub time_to_first_token: Vec<f64>,
    /// First to last token over tokens after the first, per choice of two tokens or more.
    pub time_per_output_token: Vec<f64>,
    /// Arrival to the last choice's end, per request that was not aborted.
    pub end_to_end: Vec<f64>,
    /// Arrival to the first step that held the request.
    pub queue: Vec<f64>,
}

/// Samples of one kind that are kept until taken; later ones are dropped.
pub const OBSERVATIONS_MAX: usize = 16_384;
