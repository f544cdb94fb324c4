//! What a request is at each stage. A stage's function takes the one before by value, so none can be skipped.

use std::sync::Arc;

use thalweg_proto::block_hash::{self, HashRoot};
use thalweg_proto::v1;
use tokio::time::Instant;

use super::attempt::Source;
use super::channel::Channel;
use super::journey::Journey;
use super::taken::Taken;
use super::trial::Trial;
use crate::admission::Permit;
use crate::models::ModelEntry;
use crate::policy::Cost;
use crate::workers::Booking;
use crate::workers::in_flight::PromptId;

/// Blocks that `prefix_hash` looks at: enough to tell conversations apart, few enough that their turns agree.
const PREFIX_KEY_BLOCKS: usize = 4;

/// A parsed and tokenised request: what the API hands over.
#[derive(Clone)]
pub struct Tokenized {
    /// x-request-id of the client, or ours.
    pub request_id: String,
    /// The model or adapter it asked for.
    pub model: Arc<ModelEntry>,
    /// The prompt, not empty and within the model's context.
    pub prompt_ids: Arc<[u32]>,
    /// Valid parameters; the seed is drawn.
    pub sampling: v1::SamplingParams,
    /// What every choice must be a text of.
    pub grammar: Option<Arc<v1::Grammar>>,
    /// The prompt's embedding is wanted, of this width and pooling, and no answer: `sampling.max_tokens` is 0 and `n` 1.
    pub embedding: Option<v1::EmbeddingInfo>,
    /// Choices wanted, at least 1.
    pub n: u32,
    /// Who pays and shares.
    pub tenant: String,
    /// What its tenant may have at a time, where that is not what the flags say.
    pub tenant_limit: Option<crate::admission::Usage>,
    /// Whose blocks it may reuse.
    pub scope: v1::CacheScope,
    /// Lower goes earlier; 0 is usual.
    pub priority: i32,
    /// When it is given up.
    pub deadline: Instant,
    /// W3C trace context; empty where there is none.
    pub traceparent: String,
    /// What vendors add to it.
    pub tracestate: String,
    /// Who has taken it is told here, beside the other prompts of its request.
    pub taken: Arc<Taken>,
}

/// With the keys of its prompt's blocks.
pub(super) struct Hashed {
    pub(super) request: Tokenized,
    /// Keys of the full blocks that a worker could reuse: the last prompt token is always computed.
    pub(super) keys: Arc<[u64]>,
    /// What `prefix_hash` goes by.
    pub(super) prefix_key: u64,
    /// What became of it so far.
    pub(super) journey: Journey,
    /// What it is known by where workers end with it.
    pub(super) prompt: PromptId,
    /// Its prompt is suspected of ending workers.
    pub(super) trial: Option<Trial>,
    /// A worker has had it.
    pub(super) is_taken: bool,
    /// How the worker failed that had it, until another one has taken it.
    pub(super) left_by: Option<&'static str>,
    /// Since when workers have refused it because they are full.
    pub(super) full_since: Option<Instant>,
}

/// With a worker that has been told nothing yet.
pub(super) struct Placed {
    pub(super) hashed: Hashed,
    pub(super) permit: Permit,
    pub(super) booking: Booking,
    pub(super) predicted: Predicted,
    pub(super) attempt_id: u64,
    /// Tokens that it had before, until it has brought enough new ones.
    pub(super) unproven_from: Option<usize>,
    /// By which its tokens may come.
    pub(super) channel: Option<Arc<Channel>>,
}

/// For which no worker was ready.
pub(super) struct Unplaced {
    pub(super) hashed: Hashed,
    pub(super) permit: Permit,
}

/// What the pick expected.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicted {
    pub(crate) cost: Cost,
    /// Prompt tokens that the index says the worker holds.
    pub(super) indexed_tokens: u32,
    /// The same, discounted by experience with that worker.
    pub(crate) cached_tokens: u32,
    pub(super) at: Instant,
}

/// With its first new tokens.
pub(super) struct Streaming {
    pub(super) placed: Placed,
    pub(super) source: Source,
    pub(super) prompt: v1::PromptInfo,
    pub(super) first: Vec<v1::ChoiceDelta>,
}

impl Hashed {
    /// Tokens that a worker must have before it can add one: the prompt, and what was received of open choices.
    pub(super) fn context_tokens(&self) -> u64 {
        (self.request.prompt_ids.len() + self.journey.progress.open_tokens()) as u64
    }

    /// Tokens that a choice may come to, with its prompt.
    pub(super) fn tokens_max(&self) -> u64 {
        self.request.prompt_ids.len() as u64 + u64::from(self.request.sampling.max_tokens)
    }
}

impl Tokenized {
    pub(super) fn hash(self) -> Hashed {
        let root = HashRoot {
            fingerprint: &self.model.fingerprint,
            adapter: self.model.adapter_name(),
            scope: &self.scope.scope,
            salt: &self.scope.salt,
        };
        let root = root.hash();
        // A mean is computed from the first token on, whatever a worker holds.
        let is_mean = self.embedding.is_some_and(|wanted| wanted.pooling() == v1::Pooling::Mean);
        let reusable = if is_mean { 0 } else { self.prompt_ids.len().saturating_sub(1) };
        let reusable = &self.prompt_ids[..reusable];
        let blocks = block_hash::full_blocks(root, reusable, self.model.block_tokens);
        let keys: Arc<[u64]> = blocks.iter().map(block_hash::BlockHash::index_key).collect();
        let prefix_key = match keys.get(..keys.len().min(PREFIX_KEY_BLOCKS)) {
            Some([.., last]) => *last,
            _ => block_hash::child(root, &self.prompt_ids).index_key(),
        };
        let vocab_size = self.model.tokenizer.vocab_size();
        let journey = Journey::new(self.n, self.sampling.max_tokens, vocab_size);
        let prompt = prompt_id(&self.model, &self.prompt_ids);
        Hashed {
            request: self,
            keys,
            prefix_key,
            journey,
            prompt,
            trial: None,
            is_taken: false,
            left_by: None,
            full_since: None,
        }
    }
}

/// Of weights and token ids: other weights may well survive it.
fn prompt_id(model: &ModelEntry, prompt_ids: &[u32]) -> PromptId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&model.fingerprint);
    if let Some(adapter) = &model.adapter {
        hasher.update(model.name.as_bytes());
        hasher.update(&adapter.fingerprint);
    }
    for ids in prompt_ids.chunks(256) {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        hasher.update(&bytes);
    }
    hasher.finalize()
}
