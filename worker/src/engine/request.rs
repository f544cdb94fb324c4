//! What the engine is asked, and what it answers.

use std::sync::Arc;

use smallvec::SmallVec;
use thalweg_proto::block_hash::BlockHash;
use thalweg_proto::ids::AttemptId;

use crate::plan::{AdapterSlot, Logprobs};
use crate::pooling::Pooling;
use crate::sampling::SamplingParams;
pub use crate::scheduler::FinishReason;

/// One prompt and the choices to continue. All that the worker knows of a request is a function of this.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineRequest {
    /// The client's or router's name for it; need not be unique.
    pub request_id: String,
    /// Which try of the request.
    pub attempt: AttemptId,
    /// Token ids, at least one.
    pub prompt: Arc<[u32]>,
    /// How tokens are drawn and which end a choice.
    pub sampling: Arc<SamplingParams>,
    /// Output tokens of each choice at most, those of `ChoiceState::output` included; 0 where nothing is to follow the prompt.
    /// The engine stops earlier where the context ends.
    pub max_tokens: u32,
    /// Logprobs of the prompt's own tokens, with this many alternatives each.
    pub prompt_logprobs: Option<u32>,
    /// The prompt's embedding is wanted, and no output: `max_tokens` is 0, and there is one choice.
    pub pooling: Option<Pooling>,
    /// One per choice; at least one is not finished.
    pub choices: Vec<ChoiceState>,
    /// `h_0` of the block hashes: model, adapter and cache scope.
    pub root: BlockHash,
    /// The same adapter's place on the device.
    pub adapter: AdapterSlot,
    /// Lower runs earlier.
    pub priority: i32,
    /// Who booked the request and the number of that booking, echoed in `LoadSnapshot::booked`.
    pub booking: Option<(String, u64)>,
}

/// Where a choice stands: new ones have no output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChoiceState {
    /// Which choice; with the seed, the key of its random numbers.
    pub index: u32,
    /// Tokens already put out, by this worker or another.
    pub output: Vec<u32>,
    /// Nothing to do.
    pub finished: bool,
}

/// Something new about a request. At most one per step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineEvent {
    /// In the first event alone.
    pub prompt: Option<Box<PromptInfo>>,
    /// At most one per choice.
    pub deltas: SmallVec<[ChoiceDelta; 1]>,
}

/// What became of the prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptInfo {
    /// Prompt tokens whose KV was found in the prefix cache: a multiple of the block size, below the prompt's length.
    pub cached_tokens: u32,
    /// Seconds from arrival to the first step that held the request.
    pub queue_seconds: f64,
    /// Of the prompt's second token and on, one fewer than the prompt has tokens; None when not asked for.
    pub prompt_logprobs: Option<Vec<Logprobs>>,
    /// The prompt's embedding when asked for, else empty.
    pub embedding: Vec<f32>,
}

/// New tokens of one choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceDelta {
    /// Which choice.
    pub index: u32,
    /// In order, each exactly once.
    pub tokens: SmallVec<[u32; 1]>,
    /// One per token when asked for, else empty.
    pub logprobs: Vec<Logprobs>,
    /// Set in the choice's last delta.
    pub finish: Option<FinishReason>,
}
