//! What a pick looks at.

use std::sync::Arc;

use super::Speed;

/// The request's side.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Choices wanted.
    pub choices: u32,
    /// Output tokens expected of each choice, never more than max_tokens.
    pub expected_output: f64,
    /// Key of the prompt's first blocks, for `prefix_hash`.
    pub prefix_key: u64,
    /// Weight of the delay brought to others.
    pub harm_weight: f64,
}

/// A worker's side: its last report, with the bookings that the report does not include yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Hash of the worker's name, for `prefix_hash`.
    pub name_hash: u64,
    /// Sequences that decode.
    pub running: u32,
    /// Sequences that wait or were booked, as far as this request would stand behind them.
    pub waiting: u32,
    /// Most sequences that it had lately, fading; never less than it has now.
    pub recent_sequences: f64,
    /// Sequences that it runs at once at most.
    pub max_num_seqs: u32,
    /// Prompt tokens to compute before this request's turn.
    pub prefill_tokens_ahead: u64,
    /// Context tokens of all running sequences.
    pub running_context_tokens: u64,
    /// KV blocks that are free, or cached and so could be.
    pub kv_blocks_available: u64,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// Prompt tokens that it probably holds.
    pub cached_tokens: u32,
    /// How fast it is.
    pub speed: Arc<Speed>,
}

impl Candidate {
    /// Sequences that it was given and has not finished.
    pub fn sequences(&self) -> u32 {
        self.running.saturating_add(self.waiting)
    }

    /// The same worker with nothing in its cache.
    pub(super) fn without_cache(&self) -> Self {
        Self { cached_tokens: 0, ..self.clone() }
    }
}
