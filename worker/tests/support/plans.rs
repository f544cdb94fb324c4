//! Steps as the engine plans them, of sequences that have a slot and blocks of their own each.

use std::sync::Arc;

use thalweg_worker::plan::{
    AdapterSlot, BlockId, BlockTable, Row, RowInput, RowOutput, SlotId, SlotInit, StepPlan, Want,
};
use thalweg_worker::pooling::Pooling;
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;

/// Blocks of each slot: slot i has those from i * this on.
pub(crate) const SLOT_BLOCKS: usize = 64;

/// Runs one step.
pub(crate) fn run(runner: &mut impl Runner, slots: Vec<SlotInit>, rows: Vec<Row>) -> Vec<RowOutput> {
    let step = runner.submit(StepPlan { slots, rows, ..StepPlan::default() }).expect("a plan in order");
    runner.collect(step).expect("a step that succeeds").rows
}

/// A row of the sequence in a slot.
pub(crate) fn row(slot: usize, input: RowInput, context: usize, want: Want) -> Row {
    // Physical blocks run backwards, so that nothing hangs on their order.
    let blocks = (0..SLOT_BLOCKS).rev().map(|block| BlockId((slot * SLOT_BLOCKS + block) as u32)).collect();
    let table = BlockTable { first: 0, blocks };
    let (slot, adapter) = (SlotId(slot as u32), AdapterSlot::BASE);
    Row { slot, adapter, input, context: context as u32, tables: [table.clone(), table], want }
}

/// A slot for a new sequence.
pub(crate) fn start(slot: usize, sampling: SamplingParams) -> SlotInit {
    let (prompt, output) = (Arc::from([]), Vec::new());
    SlotInit { slot: SlotId(slot as u32), sampling: Arc::new(sampling), choice: 0, prompt, output }
}

/// One way to embed a prompt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Embed {
    /// Tokens of a row.
    pub(crate) piece: usize,
    /// Sequences beside it, a token a step each: every second one decodes, the others are embedded.
    pub(crate) mates: usize,
    pub(crate) adapter: AdapterSlot,
}

impl Embed {
    /// In one piece.
    pub(crate) fn alone(adapter: AdapterSlot) -> Self {
        Self { piece: usize::MAX, mates: 0, adapter }
    }

    /// On a device with a slot for each mate and one more.
    pub(crate) fn run(&self, runner: &mut impl Runner, ids: &[u32], pooling: Pooling) -> Vec<f32> {
        let mut slots: Vec<_> = (0..=self.mates).map(|slot| start(slot, SamplingParams::greedy())).collect();
        let (mut context, mut embedding) = (0, None);
        for (step, piece) in ids.chunks(self.piece.min(ids.len())).enumerate() {
            let ends = context + piece.len() == ids.len();
            let want = match pooling {
                Pooling::Last if !ends => Want::Nothing,
                _ => Want::Embedding { pooling, ends },
            };
            let mut rows: Vec<Row> = (0..self.mates).map(|slot| mate(slot, step)).collect();
            let own = row(self.mates, RowInput::Tokens(piece.to_vec()), context, want);
            rows.insert(self.mates / 2, Row { adapter: self.adapter, ..own });
            let outputs = run(runner, std::mem::take(&mut slots), rows);
            let own = &outputs[self.mates / 2];
            assert_eq!(own.embedding.is_some(), ends, "with the prompt's end, and not before");
            assert!(own.sampled.is_empty() && own.prompt.is_empty(), "nothing is drawn");
            embedding = own.embedding.clone();
            context += piece.len();
        }
        let embedding = embedding.expect("the last row yields it");
        let length: f64 = embedding.iter().map(|x| f64::from(*x).powi(2)).sum();
        assert!((length - 1.0).abs() < 1e-5, "of length 1, not {length}");
        embedding
    }
}

fn mate(slot: usize, step: usize) -> Row {
    let decodes = slot % 2 == 1;
    let input = match decodes && step > 0 {
        true => RowInput::LastSampled,
        false => RowInput::Tokens(vec![(7 * slot + step) as u32 % 300]),
    };
    let want = match decodes {
        true => Want::Sample { output_index: step as u32 },
        false => Want::Embedding { pooling: Pooling::Mean, ends: true },
    };
    row(slot, input, step, want)
}

/// A vector to the bit.
pub(crate) fn bits(vector: &[f32]) -> Vec<u32> {
    vector.iter().map(|x| x.to_bits()).collect()
}
