//! A step's plan, checked and flattened to what the kernels read. Pure: no GPU is needed.

use super::abi::{LogitRow, PooledRow, RowMeta, TOP_MAX};
use super::items::Items;
use super::slots::{SlotArrays, SlotState, index_of};
use crate::backend::cpu::BLOCK_TOKENS;
use crate::plan::{BlockTable, KV_GROUPS, Row, RowInput, SlotInit, StepPlan, Want};
use crate::pooling::Pooling;

/// Arrays of the step in work, kept from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Step {
    pub(super) token_src: Vec<i32>,
    pub(super) positions: Vec<i32>,
    /// Block * 16 + offset of each token, in each group; -1 in one without layers.
    pub(super) places: [Vec<i32>; KV_GROUPS],
    pub(super) rows: Vec<RowMeta>,
    pub(super) logit_rows: Vec<LogitRow>,
    pub(super) pooled: Vec<PooledRow>,
    pub(super) items: [Items; KV_GROUPS],
    pub(super) tables: Vec<i32>,
    /// What becomes of each logit row's result.
    pub(super) wanted: Vec<Wanted>,
    /// Row of the plan that each vector of pooled states goes to.
    pub(super) embedded: Vec<usize>,
    /// Masks that it waits for.
    pub(super) masks: usize,
    /// Slots as they were before, for a step that is refused.
    before: Vec<SlotState>,
}

/// How a result is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Row of the plan.
    pub(super) row: usize,
    /// Prompt logprob of this token, with so many alternatives.
    pub(super) target: Option<(u32, u32)>,
    /// A sampled token, with logprobs of so many alternatives if any.
    pub(super) sample: Option<Option<u32>>,
}

/// How attention of rows is divided into items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ways {
    /// Query rows of a whole item.
    pub(super) whole_rows: usize,
    /// Whole items need no chunks, and the longest go first.
    pub(super) prefill: bool,
    /// Decoding rows of all are cut into about so many runs of keys; None: each is split over chunks.
    pub(super) runs: Option<usize>,
    /// Keys that decoding rows share are cut into about so many items, of as many rows as a whole item has; None: each reads them itself.
    pub(super) shared: Option<usize>,
}

/// What a plan is checked against.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Limits {
    pub(super) max_tokens: usize,
    pub(super) max_slots: usize,
    pub(super) max_model_len: usize,
    pub(super) vocab: usize,
    pub(super) blocks: [usize; KV_GROUPS],
    /// Tokens that layers of the group see behind a query, itself included; None for all.
    pub(super) windows: [Option<usize>; KV_GROUPS],
    /// Which groups have layers.
    pub(super) used: [bool; KV_GROUPS],
    /// Query heads per KV head.
    pub(super) gqa_group: usize,
    /// How attention is divided.
    pub(super) ways: Ways,
    /// Partial results of a group.
    pub(super) partials: usize,
    /// Entries of all tables.
    pub(super) tables: usize,
}

impl Limits {
    /// Items of keys that decoding rows of a group share; None: they never do.
    pub(super) fn shared(&self, group: usize) -> Option<usize> {
        self.ways.shared.filter(|_| self.used[group] && self.windows[group].is_none())
    }
}

impl Step {
    /// Takes over a plan. An error says which rule it broke; the slots are then as they were.
    pub(super) fn load(
        &mut self,
        plan: &StepPlan,
        slots: &mut [SlotState],
        limits: &Limits,
    ) -> Result<(), String> {
        self.clear();
        self.before.clear();
        self.before.extend_from_slice(slots);
        // What is wanted goes with the step in flight.
        self.wanted.reserve(plan.rows.len());
        let loaded = self.try_load(plan, slots, limits);
        if loaded.is_err() {
            slots.copy_from_slice(&self.before);
        }
        loaded
    }

    fn clear(&mut self) {
        self.token_src.clear();
        self.positions.clear();
        self.places.iter_mut().for_each(Vec::clear);
        self.rows.clear();
        self.logit_rows.clear();
        self.pooled.clear();
        self.tables.clear();
        self.wanted.clear();
        self.embedded.clear();
        self.masks = 0;
        self.items.iter_mut().for_each(Items::clear);
    }

    fn try_load(&mut self, plan: &StepPlan, slots: &mut [SlotState], limits: &Limits) -> Result<(), String> {
        for init in &plan.slots {
            super::slots::check(init)?;
            let has_last = !init.output.is_empty();
            let logprobs = init.sampling.logprobs;
            slots[index_of(init.slot, slots.len())?] = SlotState { is_set: true, has_last, logprobs };
        }
        for (index, row) in plan.rows.iter().enumerate() {
            self.load_row(row, slots, limits).map_err(|reason| format!("row {index}: {reason}"))?;
        }
        self.load_masks(&plan.constrained)?;
        for (group, items) in self.items.iter_mut().enumerate() {
            items.finish(group, (&self.rows, &self.tables), limits);
        }
        let (tokens, tables) = (self.token_src.len(), self.tables.len());
        if tokens > limits.max_tokens {
            return Err(format!("{tokens} tokens in a step, room for {}", limits.max_tokens));
        }
        if plan.rows.len() > limits.max_slots || tables > limits.tables {
            let (rows, slots) = (plan.rows.len(), limits.max_slots);
            return Err(format!("{rows} rows and {tables} blocks, room for {slots} and {}", limits.tables));
        }
        Ok(())
    }

    fn load_row(&mut self, row: &Row, slots: &mut [SlotState], limits: &Limits) -> Result<(), String> {
        let (start, len, context) = (self.token_src.len(), row.input.len(), row.context as usize);
        let slot = index_of(row.slot, slots.len())?;
        if len == 0 {
            return Err("no tokens".into());
        }
        if context + len > limits.max_model_len {
            return Err(format!("{} tokens of a sequence, room for {}", context + len, limits.max_model_len));
        }
        match &row.input {
            RowInput::Tokens(ids) => {
                if let Some(id) = ids.iter().find(|id| **id as usize >= limits.vocab) {
                    return Err(format!("token {id} of a vocabulary of {}", limits.vocab));
                }
                self.token_src.extend(ids.iter().map(|id| *id as i32));
            }
            RowInput::LastSampled if slots[slot].has_last => self.token_src.push(-(slot as i32 + 1)),
            RowInput::LastSampled => return Err(format!("slot {slot} has sampled nothing yet")),
        }
        let samples =
            matches!(row.want, Want::Sample { .. } | Want::PromptLogprobs { output_index: Some(_), .. });
        if samples && !slots[slot].is_set {
            return Err(format!("slot {slot} was never set"));
        }
        let mut meta = RowMeta {
            start: start as i32,
            len: len as i32,
            context: context as i32,
            slot: slot as i32,
            ..RowMeta::default()
        };
        self.positions.extend((context..context + len).map(|position| position as i32));
        for (group, table) in row.tables.iter().enumerate() {
            self.load_table(group, table, (context, len), &mut meta, limits)?;
        }
        self.rows.push(meta);
        self.load_want(row.want, (slot, slots[slot].logprobs), start, len)?;
        slots[slot].has_last |= samples;
        Ok(())
    }

    /// Gives each constrained row's draw its mask.
    fn load_masks(&mut self, constrained: &[usize]) -> Result<(), String> {
        for (mask, row) in constrained.iter().enumerate() {
            let draw = self.wanted.iter().position(|wanted| wanted.row == *row && wanted.sample.is_some());
            let draw = draw.ok_or_else(|| format!("row {row} is constrained, yet samples nothing"))?;
            self.logit_rows[draw].mask = mask as i32;
        }
        self.masks = constrained.len();
        Ok(())
    }

    fn load_table(
        &mut self,
        group: usize,
        table: &BlockTable,
        (context, len): (usize, usize),
        meta: &mut RowMeta,
        limits: &Limits,
    ) -> Result<(), String> {
        if !limits.used[group] {
            self.places[group].extend(std::iter::repeat_n(-1, len));
            return Ok(());
        }
        let first = table.first as usize;
        let seen_from = limits.windows[group].map_or(0, |window| (context + 1).saturating_sub(window));
        let needed = (context + len).div_ceil(BLOCK_TOKENS);
        if first > seen_from / BLOCK_TOKENS || first + table.blocks.len() < needed {
            let end = first + table.blocks.len();
            let from = seen_from / BLOCK_TOKENS;
            return Err(format!("group {group} has blocks {first}..{end} of {from}..{needed}"));
        }
        // Tables are most of a step: their largest entry is found many at a time, the first wrong one is not.
        let largest = table.blocks.iter().map(|block| block.0).max();
        if let Some(block) = largest.filter(|block| *block as usize >= limits.blocks[group]) {
            return Err(format!("block {block} of {} in group {group}", limits.blocks[group]));
        }
        meta.table_offset[group] = self.tables.len() as i32;
        meta.table_first[group] = table.first as i32;
        // Blocks beyond the row are not read.
        self.tables.extend(table.blocks[..needed - first].iter().map(|block| block.0 as i32));
        self.places[group].extend((context..context + len).map(|position| {
            let block = table.blocks[position / BLOCK_TOKENS - first].0 as usize;
            (block * BLOCK_TOKENS + position % BLOCK_TOKENS) as i32
        }));
        self.items[group].push(self.rows.len(), (context, len), limits.windows[group], limits);
        Ok(())
    }

    fn load_want(
        &mut self,
        want: Want,
        (slot, logprobs): (usize, Option<u32>),
        start: usize,
        len: usize,
    ) -> Result<(), String> {
        let row = self.rows.len() - 1;
        let last = start + len - 1;
        match want {
            Want::Nothing => {}
            Want::Embedding { pooling, ends } => self.push_pooled(slot, (start, len), pooling, ends),
            Want::Sample { output_index } => {
                self.push_wanted(
                    slot,
                    last,
                    Wanted { row, target: None, sample: Some(logprobs) },
                    output_index,
                )?;
            }
            Want::PromptLogprobs { top, next, output_index } => {
                for token in start..last {
                    let target = Some((self.token_src[token + 1] as u32, top));
                    self.push_wanted(slot, token, Wanted { row, target, sample: None }, 0)?;
                }
                let target = next.map(|id| (id, top));
                let sample = output_index.map(|_| logprobs);
                if target.is_some() || sample.is_some() {
                    let wanted = Wanted { row, target, sample };
                    self.push_wanted(slot, last, wanted, output_index.unwrap_or(0))?;
                }
            }
        }
        Ok(())
    }

    /// A last token's state is a sum of one. Of a row that does not end its prompt it is nobody's.
    fn push_pooled(&mut self, slot: usize, (start, len): (usize, usize), pooling: Pooling, ends: bool) {
        let row = self.rows.len() - 1;
        let (start, len, goes_on) = match pooling {
            Pooling::Last if !ends => return,
            Pooling::Last => (start + len - 1, 1, false),
            Pooling::Mean => (start, len, self.rows[row].context > 0),
        };
        let vector = if ends { self.embedded.len() as i32 } else { -1 };
        self.pooled.push(PooledRow {
            start: start as i32,
            len: len as i32,
            slot: slot as i32,
            goes_on: i32::from(goes_on),
            vector,
        });
        self.embedded.extend(ends.then_some(row));
    }

    fn push_wanted(
        &mut self,
        slot: usize,
        token: usize,
        wanted: Wanted,
        output_index: u32,
    ) -> Result<(), String> {
        let of_target = wanted.target.map(|(_, top)| top);
        let top = of_target.max(wanted.sample.flatten());
        if top.is_some_and(|top| top as usize > TOP_MAX) {
            return Err(format!("{} alternatives wanted, {TOP_MAX} are kept", top.unwrap_or(0)));
        }
        self.logit_rows.push(LogitRow {
            token: token as i32,
            slot: slot as i32,
            target: wanted.target.map_or(-1, |(id, _)| id as i32),
            top: top.map_or(-1, |top| top as i32),
            output_index: if wanted.sample.is_some() { output_index as i32 } else { -1 },
            mask: -1,
        });
        self.wanted.push(wanted);
        Ok(())
    }
}

/// Slots of a plan in pieces whose tokens fit one copy each, in order.
pub(super) fn slot_pieces(inits: &[SlotInit], tokens_max: usize) -> Vec<&[SlotInit]> {
    let (mut pieces, mut begin, mut tokens) = (Vec::new(), 0, 0);
    for (index, init) in inits.iter().enumerate() {
        let more = super::slots::start_tokens(init);
        if tokens + more > tokens_max && index > begin {
            pieces.push(&inits[begin..index]);
            (begin, tokens) = (index, 0);
        }
        tokens += more;
    }
    pieces.push(&inits[begin..]);
    pieces
}

/// New slots of one piece.
pub(super) fn load_slots(inits: &[SlotInit], vocab: usize) -> SlotArrays {
    let mut arrays = SlotArrays::default();
    inits.iter().for_each(|init| arrays.push(init, vocab));
    arrays
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
