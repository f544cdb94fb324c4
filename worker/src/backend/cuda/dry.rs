//! What the host does for a step, without a GPU: for measuring the engine's thread, in `examples/host_speed`.

use std::collections::VecDeque;

use super::abi::{Sampled, bytes_of};
use super::kernels::PREFILL_ROWS;
use super::layout::Layout;
use super::results::outputs;
use super::shape::StepShape;
use super::slots::SlotState;
use super::staging::fill;
use super::step::{Limits, Step, Wanted, Ways, load_slots};
use crate::backend::BackendError;
use crate::engine::EngineConfig;
use crate::plan::{StepId, StepMasks, StepOutput, StepPlan};
use crate::runner::Runner;

/// Takes plans apart as for an H200 and a model of 32 query and 8 KV heads, and draws the same token for a row each time.
#[derive(Debug)]
pub struct DryRunner {
    step: Step,
    slots: Vec<SlotState>,
    limits: Limits,
    /// Stands for the memory that a step is copied from.
    sent: Vec<u8>,
    drawn: Vec<Sampled>,
    in_flight: VecDeque<(StepId, usize, Vec<Wanted>)>,
    submitted: u64,
}

/// Multiprocessors of an H200.
const MULTIPROCESSORS: usize = 132;
/// Partial results of a group.
const PARTIALS: usize = 8192;

impl DryRunner {
    /// For steps of an engine of this configuration.
    pub fn new(config: &EngineConfig) -> Self {
        let (heads, kv_heads) = (32, 8);
        let ways = Ways {
            whole_rows: PREFILL_ROWS,
            prefill: true,
            runs: Some((2 * MULTIPROCESSORS).div_ceil(kv_heads)),
            shared: Some(MULTIPROCESSORS / kv_heads),
        };
        let limits = Limits {
            max_tokens: config.max_num_batched_tokens,
            max_slots: config.max_num_seqs,
            max_model_len: config.max_model_len,
            vocab: config.vocab_size,
            blocks: config.kv_blocks,
            windows: [None, config.sliding_window],
            used: config.has_group,
            gqa_group: heads / kv_heads,
            ways,
            partials: PARTIALS,
            tables: usize::MAX,
        };
        let token = |row: usize| (1 + row * 7919 % (config.vocab_size - 1)) as i32;
        let drawn = |row| Sampled { token: token(row), ..Sampled::default() };
        Self {
            step: Step::default(),
            slots: vec![SlotState::default(); config.max_num_seqs],
            limits,
            sent: Vec::new(),
            drawn: (0..config.max_num_batched_tokens).map(drawn).collect(),
            in_flight: VecDeque::new(),
            submitted: 0,
        }
    }
}

impl Runner for DryRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        self.step.load(&plan, &mut self.slots, &self.limits).map_err(failure)?;
        if !self.step.pooled.is_empty() {
            return Err(failure("no embeddings".into()));
        }
        let slots = load_slots(&plan.slots, self.limits.vocab);
        let mut shape = StepShape::of(&self.step, usize::MAX);
        shape.capacities.tables = self.step.tables.len();
        shape.capacities.starts = super::transfer::capacities(&slots);
        let layout = Layout::new(&shape.capacities);
        self.sent.resize(self.sent.len().max(layout.bytes as usize), 0);
        fill(&mut self.sent, &layout, &self.step, &slots);
        let id = StepId(self.submitted);
        self.submitted += 1;
        let wanted = std::mem::take(&mut self.step.wanted);
        self.in_flight.push_back((id, plan.rows.len(), wanted));
        Ok(id)
    }

    fn provide_masks(&mut self, _: StepId, _: StepMasks) -> Result<(), BackendError> {
        Err(failure("no grammars".into()))
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        let oldest = self.in_flight.pop_front().filter(|(id, ..)| *id == step);
        let (_, rows, wanted) = oldest.ok_or_else(|| failure("not the oldest step".into()))?;
        Ok(StepOutput { rows: outputs(rows, &wanted, bytes_of(&self.drawn)), seconds: 0.01 })
    }
}

fn failure(reason: String) -> BackendError {
    BackendError { device: "dry".into(), reason }
}
