//! What a CPU worker is given, and what that takes in memory.

use thalweg_model::config::{LayerKind, ModelConfig};

use super::attention;
use super::kv_dtype::KvDtype;
use super::pooled;
use crate::plan::KV_GROUPS;

/// Tokens of a KV block.
pub const BLOCK_TOKENS: usize = 16;

/// Kinds of layers in the order of KV groups.
pub(super) const GROUP_KINDS: [LayerKind; KV_GROUPS] = [LayerKind::Full, LayerKind::Sliding];

/// Sizes of one worker's backend; all of it is allocated at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuBackendConfig {
    /// Threads that work on a step, the runner's own included.
    pub threads: usize,
    /// Blocks per KV group: `[full, sliding]`. A group without layers takes none.
    pub kv_blocks: [usize; KV_GROUPS],
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
    /// Sequences that can hold a slot, and so rows of a step.
    pub max_slots: usize,
    /// Tokens of all rows of a step together.
    pub max_tokens_per_step: usize,
}

/// Index of a kind of layer among the KV groups.
pub(super) fn group_of(kind: LayerKind) -> usize {
    match kind {
        LayerKind::Full => 0,
        LayerKind::Sliding => 1,
    }
}

/// Bytes that one block takes in each KV group, over all its layers, keys and values; 0 for a group without layers.
pub fn kv_block_bytes(model: &ModelConfig, dtype: KvDtype) -> [usize; KV_GROUPS] {
    GROUP_KINDS.map(|kind| model.layers_of(kind) * 2 * layer_block_bytes(model, dtype))
}

/// Bytes of one block of one layer's keys, or values.
pub(super) fn layer_block_bytes(model: &ModelConfig, dtype: KvDtype) -> usize {
    model.num_kv_heads * BLOCK_TOKENS * model.head_dim * dtype.bytes()
}

/// Bytes of logits that are held at once, where that is at least one row.
const LOGIT_BYTES_MAX: usize = 32 << 20;
/// Rows of logits that are held at once, however small the vocabulary.
const LOGIT_ROWS_MAX: usize = 256;

/// Rows of logits that one pass of `logits` and `sample` takes; a step with more wanted positions makes several.
pub fn logit_rows_per_pass(model: &ModelConfig) -> usize {
    (LOGIT_BYTES_MAX / (4 * model.vocab_size.max(1))).clamp(1, LOGIT_ROWS_MAX)
}

/// Bytes of activations, logits and attention's working memory for the largest step. Pages that no step has needed yet are not
/// resident.
pub fn scratch_bytes(model: &ModelConfig, config: &CpuBackendConfig) -> u64 {
    let widths = Widths::of(model);
    let per_token = 3 * widths.hidden + widths.qkv + widths.query + 3 * widths.mlp + 2 * model.head_dim;
    let prepared = widths.hidden.max(widths.query).max(widths.mlp);
    let logits = logit_rows_per_pass(model) * (model.vocab_size + widths.hidden);
    let by_token = config.max_tokens_per_step as u64 * (per_token + 2 * prepared) as u64;
    4 * (by_token + logits as u64)
        + attention::memory_bytes(config.threads, model.head_dim)
        + pooled::bytes(config.max_slots, widths.hidden)
}

/// Widths of a token's activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Widths {
    pub(super) hidden: usize,
    pub(super) query: usize,
    pub(super) kv: usize,
    pub(super) qkv: usize,
    pub(super) mlp: usize,
}

impl Widths {
    pub(super) fn of(model: &ModelConfig) -> Self {
        let query = model.num_heads * model.head_dim;
        let kv = model.num_kv_heads * model.head_dim;
        Self { hidden: model.hidden_size, query, kv, qkv: query + 2 * kv, mlp: model.intermediate_size }
    }
}
