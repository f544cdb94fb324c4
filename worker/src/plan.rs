//! One step as plain data: what the scheduler decides, the runner executes and a remote rank could be sent.

use std::sync::Arc;

use smallvec::SmallVec;
use thalweg_model::grammar::TokenMask;

use crate::pooling::Pooling;
use crate::sampling::SamplingParams;

/// One block of the paged KV cache, within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A place on the device for one running sequence's state: last token, sampling parameters, penalty counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// Which LoRA adapter a row is computed with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterSlot(pub u32);

impl AdapterSlot {
    /// The model as it is.
    pub const BASE: Self = Self(0);

    /// Its place among the adapters that were loaded; None for the model as it is.
    pub fn index(self) -> Option<usize> {
        self.0.checked_sub(1).map(|index| index as usize)
    }
}

/// Layers that share block tables: those that see the whole context, and those that slide. Indexes `Row::tables`.
pub const KV_GROUPS: usize = 2;

/// Number of a submitted step; they complete in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepId(pub u64);

/// Everything that one step does, in this order: slots are set, rows run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// Slots that a new sequence takes over.
    pub slots: Vec<SlotInit>,
    /// Ragged rows, each a run of tokens of one sequence. A sequence has one row a step at most.
    pub rows: Vec<Row>,
    /// Rows, ascending, whose draw waits for [`StepMasks`]: they depend on tokens of steps in flight.
    pub constrained: Vec<usize>,
}

/// What may be drawn in a step's constrained rows, one per entry of `StepPlan::constrained`. None: whatever is drawn is
/// dropped, since its sequence has ended meanwhile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepMasks(pub Vec<Option<TokenMask>>);

/// State that a slot starts with.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotInit {
    /// The slot.
    pub slot: SlotId,
    /// How its tokens are drawn.
    pub sampling: Arc<SamplingParams>,
    /// Which choice of the request it is; with the seed, the key of its random numbers.
    pub choice: u32,
    /// Prompt, for the repetition penalty.
    pub prompt: Arc<[u32]>,
    /// Tokens put out before, for penalties: a resumed or preempted sequence has some.
    pub output: Vec<u32>,
}

/// A run of consecutive tokens of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Whose.
    pub slot: SlotId,
    /// Changes to the model's products.
    pub adapter: AdapterSlot,
    /// The tokens.
    pub input: RowInput,
    /// Tokens of this sequence that stand in the KV cache before this row: the position of its first token.
    pub context: u32,
    /// Block table per KV group: `[full, sliding]`. A group without layers has an empty one.
    pub tables: [BlockTable; KV_GROUPS],
    /// What to take from the last hidden states.
    pub want: Want,
}

/// Where a row's tokens come from.
#[derive(Clone, Debug, PartialEq)]
pub enum RowInput {
    /// Known ids (prompt, or output recomputed).
    Tokens(Vec<u32>),
    /// The token that the slot sampled last, perhaps in a step still in flight. One token.
    LastSampled,
}

impl RowInput {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::Tokens(ids) => ids.len(),
            Self::LastSampled => 1,
        }
    }

    /// Never so in a valid plan.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Blocks of one sequence in one KV group, covering its context and this row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockTable {
    /// Logical index of the first entry: blocks before it have left a sliding window.
    pub first: u32,
    /// Physical blocks of logical blocks `first..`. Shared by the steps between which they did not change.
    pub blocks: Arc<[BlockId]>,
}

/// What a row yields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Only KV: a chunk before the prompt's last.
    Nothing,
    /// A token sampled behind the row's last position, as output number `output_index` of its choice.
    Sample {
        /// Counter of the random numbers; also what min_tokens is held against.
        output_index: u32,
    },
    /// Logprobs of the row's own tokens as targets (prompt logprobs): position p predicts token p + 1, of which the last
    /// is `next` (None: the last position is not wanted); and a sampled token when `output_index` is set.
    PromptLogprobs {
        /// Alternatives beside each token.
        top: u32,
        /// Target of the row's last position.
        next: Option<u32>,
        /// As in `Sample`.
        output_index: Option<u32>,
    },
    /// Hidden states of the row's tokens behind the final norm, pooled with those of the rows before; no token.
    Embedding {
        /// Which of them. A mean's first row has no context: the prompt is computed from its first token on.
        pooling: Pooling,
        /// The row is the prompt's last, and yields the vector.
        ends: bool,
    },
}

impl Want {
    /// A token is sampled.
    pub fn samples(self) -> bool {
        matches!(self, Self::Sample { .. } | Self::PromptLogprobs { output_index: Some(_), .. })
    }

    /// Hidden states are pooled.
    pub fn pools(self) -> bool {
        matches!(self, Self::Embedding { .. })
    }
}

/// What a step produced, rows in the plan's order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One per row of the plan.
    pub rows: Vec<RowOutput>,
    /// Seconds that the step took on the device.
    pub seconds: f64,
}

/// What one row yielded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowOutput {
    /// Sampled tokens: none or one today, more with speculation.
    pub sampled: SmallVec<[Logprobs; 1]>,
    /// Prompt logprobs, one per target.
    pub prompt: Vec<Logprobs>,
    /// The prompt's embedding, of length 1, from the row that ends it.
    pub embedding: Option<Vec<f32>>,
}

/// A token, how likely it was, and what stood beside it. Logprobs are of the raw logits: before temperature, penalties and
/// masks.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability; NaN when the request did not ask for logprobs.
    pub logprob: f32,
    /// 1 for the most likely; 0 when not asked for.
    pub rank: u32,
    /// The most likely tokens, most likely first, ties to the lower id.
    pub top: Vec<(u32, f32)>,
}
