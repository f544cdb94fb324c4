//! What a GPU worker is given, and what that takes of the GPU.

use std::time::Duration;

use thalweg_model::config::{LayerKind, ModelConfig};

use super::abi::{BIAS_MAX, END_IDS_MAX, SPLIT_ROWS, Sampled, SlotParams};
use super::blas::WORKSPACE_BYTES;
use super::error::CudaError;
use super::kernels::{CLUSTER_ROWS, CLUSTER_TILE, GEMM_INPUTS, SMALL_ROWS, whole_tile_rows};
use super::search::PlanSearch;
use crate::backend::cpu::{BLOCK_TOKENS, KvDtype};
use crate::plan::KV_GROUPS;

/// Kinds of layers in the order of KV groups.
pub(super) const GROUP_KINDS: [LayerKind; KV_GROUPS] = [LayerKind::Full, LayerKind::Sliding];

/// Sizes of one worker's backend; all of it is allocated at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct CudaBackendConfig {
    /// Blocks per KV group: `[full, sliding]`. A group without layers takes none.
    pub kv_blocks: [usize; KV_GROUPS],
    /// How keys and values are stored.
    pub kv_dtype: KvDtype,
    /// Sequences that can hold a slot, and so rows of a step.
    pub max_slots: usize,
    /// Tokens of all rows of a step together.
    pub max_tokens_per_step: usize,
    /// Longest sequence, prompt and output.
    pub max_model_len: usize,
    /// Own kernels alone, whose results are bitwise the same in any batch.
    pub deterministic: bool,
    /// Record the common shapes of a step at start, and replay them.
    pub graphs: bool,
    /// Kernels may begin before the one ahead has ended (programmatic dependent launch).
    pub overlapped: bool,
    /// A step that takes longer hangs.
    pub step_timeout: Duration,
    /// Partial results of attention that are held at once; 0 chooses by size.
    pub partials_max: usize,
    /// What happens when the GPU fails.
    pub on_fault: OnFault,
    /// How plans of large products are found.
    pub plans: PlanSearch,
}

/// What happens when the GPU fails or hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnFault {
    /// The step's error says so.
    Report,
    /// The process ends at once with [`super::FAULT_EXIT_CODE`]: its context is lost, and giving memory back could wait for ever.
    EndProcess,
}

/// Partial results of attention that are held at once, in bytes.
const PARTIAL_BYTES_MAX: u64 = 256 << 20;
const PARTIALS_MIN: u64 = 64;
const PARTIALS_MAX: u64 = 8192;
/// Bytes of logits that are held at once, where that is at least one row.
const LOGIT_BYTES_MAX: usize = 512 << 20;
/// Rows of logits that are held at once, however small the vocabulary, unless there are more slots.
const LOGIT_ROWS: usize = 256;

/// Widths of a token's activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Widths {
    pub(super) hidden: usize,
    pub(super) query: usize,
    pub(super) qkv: usize,
    pub(super) mlp: usize,
}

impl Widths {
    pub(super) fn of(model: &ModelConfig) -> Self {
        let query = model.num_heads * model.head_dim;
        let kv = model.num_kv_heads * model.head_dim;
        Self { hidden: model.hidden_size, query, qkv: query + 2 * kv, mlp: model.intermediate_size }
    }
}

/// Refuses shapes that the kernels do not cover.
pub(super) fn check_shape(model: &ModelConfig) -> Result<(), CudaError> {
    let unsupported = |reason: String| Err(CudaError::Unsupported(reason));
    let widths = Widths::of(model);
    if whole_tile_rows(model.head_dim).is_none() {
        return unsupported(format!("heads of {}; there are kernels for 64, 128 and 256", model.head_dim));
    }
    let group = model.gqa_group();
    if group > SPLIT_ROWS {
        return unsupported(format!("{group} query heads to one KV head, more than {SPLIT_ROWS}"));
    }
    for (what, width) in [("hidden size", widths.hidden), ("query heads", widths.query), ("MLP", widths.mlp)]
    {
        if !width.is_multiple_of(GEMM_INPUTS) {
            return unsupported(format!("{what} of {width}, not a multiple of {GEMM_INPUTS}"));
        }
    }
    Ok(())
}

/// Bytes of one block of one layer's keys, or values.
pub(super) fn layer_block_bytes(model: &ModelConfig, dtype: KvDtype) -> u64 {
    (model.num_kv_heads * BLOCK_TOKENS * model.head_dim * dtype.bytes()) as u64
}

/// Rows of a product that is asked for `m`: shapes are few, so that their plans and graphs are too. Rows beyond `m` are computed
/// and never read.
pub(super) fn padded_rows(m: usize) -> usize {
    match m {
        0..=SMALL_ROWS => m,
        17..=128 => m.next_multiple_of(16),
        129..=1024 => m.next_multiple_of(64),
        _ => m.next_multiple_of(256),
    }
}

/// Rows of logits that one pass takes.
pub(super) fn logit_rows_per_pass(model: &ModelConfig, config: &CudaBackendConfig) -> usize {
    let most = LOGIT_ROWS.max(config.max_slots).min(config.max_tokens_per_step.max(1));
    (LOGIT_BYTES_MAX / (4 * model.vocab_size.max(1))).clamp(1, most)
}

/// Bytes of one partial result: sums of each query row, their maximum and weight.
pub(super) fn partial_bytes(model: &ModelConfig) -> (u64, u64) {
    let rows = (model.num_kv_heads * SPLIT_ROWS) as u64;
    (rows * model.head_dim as u64 * 4, rows * 8)
}

/// Partial results that are held at once.
pub(super) fn partials(model: &ModelConfig, config: &CudaBackendConfig) -> usize {
    if config.partials_max > 0 {
        return config.partials_max;
    }
    let (sums, weights) = partial_bytes(model);
    (PARTIAL_BYTES_MAX / (sums + weights)).clamp(PARTIALS_MIN, PARTIALS_MAX) as usize
}

/// Bytes of everything but weights and KV, without what the driver keeps for itself.
pub fn buffer_bytes(model: &ModelConfig, config: &CudaBackendConfig) -> u64 {
    let activations: u64 = ActivationBytes::of(model, config).all().iter().sum();
    let (sums, weights) = partial_bytes(model);
    let partials = partials(model, config) as u64 * (sums + weights);
    let slots = config.max_slots as u64 * slot_bytes(model).iter().sum::<u64>();
    let rope = rope_bytes(model, config.max_model_len);
    let step = super::layout::step_bytes(config) as u64;
    let results = (config.max_tokens_per_step * size_of::<Sampled>()) as u64 + vector_bytes(model, config);
    let masks = super::masks::mask_bytes(model.vocab_size, config.max_slots);
    activations + partials + slots + masks + rope + step + results + WORKSPACE_BYTES
}

/// Parameters, biases, end ids, last token, counts and sum of hidden states of one slot.
pub(super) fn slot_bytes(model: &ModelConfig) -> [u64; 6] {
    let (counts, sum) = (4 * model.vocab_size, 4 * model.hidden_size);
    [size_of::<SlotParams>(), 8 * BIAS_MAX, 4 * END_IDS_MAX, 4, counts, sum].map(|bytes| bytes as u64)
}

/// Bytes of vectors of pooled hidden states, of as many rows as a step has at most.
pub(super) fn vector_bytes(model: &ModelConfig, config: &CudaBackendConfig) -> u64 {
    (config.max_slots * model.hidden_size * 4) as u64
}

/// Bytes of cosines and sines of every position, for each kind of layer that there is.
pub(super) fn rope_bytes(model: &ModelConfig, positions: usize) -> u64 {
    let kinds = GROUP_KINDS.iter().filter(|kind| model.layers_of(**kind) > 0).count();
    (kinds * positions * model.head_dim / 2 * 8) as u64
}

/// One buffer per stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct ActivationBytes {
    pub(super) residual: u64,
    pub(super) normed: u64,
    pub(super) qkv: u64,
    pub(super) attended: u64,
    pub(super) gate_up: u64,
    pub(super) activated: u64,
    /// A projection before its own norm; 0 where there are no such norms.
    pub(super) projected: u64,
    /// Residual of the rows that are left behind the last layer's attention.
    pub(super) narrowed: u64,
    /// Sums of squares of parts of rows, between products of clusters.
    pub(super) squares: u64,
    /// Normed rows of one pass of logits.
    pub(super) last: u64,
    pub(super) logits: u64,
    /// What norms scale tokens by whose hidden states are pooled.
    pub(super) scales: u64,
}

impl ActivationBytes {
    pub(super) fn of(model: &ModelConfig, config: &CudaBackendConfig) -> Self {
        let widths = Widths::of(model);
        let tokens = padded_rows(config.max_tokens_per_step);
        let rows = padded_rows(logit_rows_per_pass(model, config));
        let by_token = |width: usize, bytes: usize| (tokens * width * bytes) as u64;
        Self {
            residual: by_token(widths.hidden, 4),
            normed: by_token(widths.hidden, 2),
            qkv: by_token(widths.qkv, 2),
            attended: by_token(widths.query, 2),
            gate_up: by_token(2 * widths.mlp, 2),
            activated: by_token(widths.mlp, 2),
            projected: if model.post_norms { by_token(widths.hidden, 4) } else { 0 },
            narrowed: (padded_rows(config.max_slots) * widths.hidden * 4) as u64,
            squares: (CLUSTER_ROWS * widths.hidden.div_ceil(CLUSTER_TILE) * 4) as u64,
            last: (rows * widths.hidden * 2) as u64,
            logits: rows as u64 * model.vocab_size as u64 * 4,
            scales: by_token(1, 4),
        }
    }

    pub(super) fn all(&self) -> [u64; 12] {
        let Self { residual, normed, qkv, attended, gate_up, activated, projected, .. } = *self;
        let Self { narrowed, squares, last, logits, scales, .. } = *self;
        [
            residual, normed, qkv, attended, gate_up, activated, projected, narrowed, squares, last, logits,
            scales,
        ]
    }
}
