//! A step's plan, checked and flattened: what the kernels index by token, row and wanted position.

use super::config::BLOCK_TOKENS;
use super::slots::Slots;
use crate::plan::{BlockTable, KV_GROUPS, Row, RowInput, StepPlan, Want};
use crate::pooling::Pooling;

/// Metadata of the step in work. Its buffers are kept from step to step.
#[derive(Default)]
pub(super) struct Step {
    pub(super) rows: Vec<StepRow>,
    /// Input id of each token, rows one behind the other.
    pub(super) tokens: Vec<u32>,
    /// Position of each token in its sequence.
    pub(super) positions: Vec<u32>,
    /// Row of each token.
    pub(super) token_rows: Vec<u32>,
    pub(super) logit_rows: Vec<LogitRow>,
    /// Rows whose hidden states are pooled.
    pub(super) pooled: Vec<PooledRow>,
    /// Rows whose draw waits for a mask.
    pub(super) constrained: Vec<usize>,
    blocks: [Vec<u32>; KV_GROUPS],
}

/// One row.
#[derive(Clone, Copy)]
pub(super) struct StepRow {
    pub(super) slot: usize,
    /// Which of the model's adapters it is computed with.
    pub(super) adapter: Option<usize>,
    /// Its first token among the step's.
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) context: usize,
    tables: [Table; KV_GROUPS],
}

#[derive(Clone, Copy)]
struct Table {
    first: usize,
    start: usize,
    len: usize,
}

/// A position whose logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LogitRow {
    pub(super) row: usize,
    pub(super) token: usize,
    /// Prompt logprobs: the token that followed, and how many alternatives to name.
    pub(super) target: Option<(u32, u32)>,
    /// A token is drawn, as this output of its choice.
    pub(super) sample: Option<u32>,
}

/// A row whose hidden states are pooled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PooledRow {
    pub(super) row: usize,
    pub(super) pooling: Pooling,
    /// It yields the vector.
    pub(super) ends: bool,
}

/// What a plan is checked against.
pub(super) struct Limits {
    pub(super) max_tokens: usize,
    pub(super) vocab: usize,
    pub(super) blocks: [usize; KV_GROUPS],
    /// Tokens that layers of the group see behind a query, itself included; None for all, or for a group without layers.
    pub(super) windows: [Option<usize>; KV_GROUPS],
    pub(super) used: [bool; KV_GROUPS],
    /// Adapters that the model has.
    pub(super) adapters: usize,
}

impl Step {
    pub(super) fn with_capacity(rows: usize, tokens: usize) -> Self {
        Self {
            rows: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(tokens),
            positions: Vec::with_capacity(tokens),
            token_rows: Vec::with_capacity(tokens),
            logit_rows: Vec::with_capacity(rows),
            ..Self::default()
        }
    }

    /// Takes over a plan; an error says which rule it broke.
    pub(super) fn load(&mut self, plan: &StepPlan, slots: &Slots, limits: &Limits) -> Result<(), String> {
        self.rows.clear();
        self.tokens.clear();
        self.positions.clear();
        self.token_rows.clear();
        self.logit_rows.clear();
        self.pooled.clear();
        self.blocks.iter_mut().for_each(Vec::clear);
        self.constrained.clone_from(&plan.constrained);
        for (index, row) in plan.rows.iter().enumerate() {
            self.load_row(index, row, slots, limits).map_err(|reason| format!("row {index}: {reason}"))?;
        }
        if self.tokens.len() > limits.max_tokens {
            return Err(format!("{} tokens in a step, room for {}", self.tokens.len(), limits.max_tokens));
        }
        if let Some(row) =
            plan.constrained.iter().find(|row| plan.rows.get(**row).is_none_or(|r| !r.want.samples()))
        {
            return Err(format!("row {row} is constrained, yet samples nothing"));
        }
        Ok(())
    }

    fn load_row(&mut self, index: usize, row: &Row, slots: &Slots, limits: &Limits) -> Result<(), String> {
        let (start, len, context) = (self.tokens.len(), row.input.len(), row.context as usize);
        if len == 0 {
            return Err("no tokens".into());
        }
        match &row.input {
            RowInput::Tokens(ids) => self.tokens.extend_from_slice(ids),
            RowInput::LastSampled => self.tokens.push(slots.last_sampled(row.slot)?),
        }
        if let Some(id) = self.tokens[start..].iter().find(|id| **id as usize >= limits.vocab) {
            return Err(format!("token {id} of a vocabulary of {}", limits.vocab));
        }
        if row.want.samples() && slots.draw(slots.index(row.slot)?).is_none() {
            return Err(format!("slot {} was never set", row.slot.0));
        }
        let adapter = row.adapter.index();
        if adapter.is_some_and(|index| index >= limits.adapters) {
            return Err(format!("adapter {} of {}", row.adapter.0, limits.adapters));
        }
        let mut tables = [Table { first: 0, start: 0, len: 0 }; KV_GROUPS];
        for (group, table) in row.tables.iter().enumerate().filter(|(group, _)| limits.used[*group]) {
            tables[group] = self.load_table(group, table, context, len, limits)?;
        }
        self.positions.extend((context..context + len).map(|position| position as u32));
        self.token_rows.extend(std::iter::repeat_n(index as u32, len));
        self.rows.push(StepRow { slot: slots.index(row.slot)?, adapter, start, len, context, tables });
        self.load_want(index, row.want, start, len);
        Ok(())
    }

    fn load_table(
        &mut self,
        group: usize,
        table: &BlockTable,
        context: usize,
        len: usize,
        limits: &Limits,
    ) -> Result<Table, String> {
        let first = table.first as usize;
        let seen_from = limits.windows[group].map_or(0, |window| (context + 1).saturating_sub(window));
        let needed = (context + len).div_ceil(BLOCK_TOKENS);
        if first > seen_from / BLOCK_TOKENS || first + table.blocks.len() < needed {
            let end = first + table.blocks.len();
            return Err(format!(
                "group {group} has blocks {first}..{end} of {}..{needed}",
                seen_from / BLOCK_TOKENS
            ));
        }
        if let Some(block) = table.blocks.iter().find(|block| block.0 as usize >= limits.blocks[group]) {
            return Err(format!("block {} of {} in group {group}", block.0, limits.blocks[group]));
        }
        let start = self.blocks[group].len();
        self.blocks[group].extend(table.blocks.iter().map(|block| block.0));
        Ok(Table { first, start, len: table.blocks.len() })
    }

    fn load_want(&mut self, row: usize, want: Want, start: usize, len: usize) {
        let last = start + len - 1;
        match want {
            Want::Nothing => {}
            Want::Embedding { pooling, ends } => self.pooled.push(PooledRow { row, pooling, ends }),
            Want::Sample { output_index } => {
                self.logit_rows.push(LogitRow { row, token: last, target: None, sample: Some(output_index) });
            }
            Want::PromptLogprobs { top, next, output_index } => {
                for token in start..last {
                    let target = Some((self.tokens[token + 1], top));
                    self.logit_rows.push(LogitRow { row, token, target, sample: None });
                }
                let target = next.map(|id| (id, top));
                if target.is_some() || output_index.is_some() {
                    self.logit_rows.push(LogitRow { row, token: last, target, sample: output_index });
                }
            }
        }
    }

    /// Some row is computed with an adapter.
    pub(super) fn has_adapters(&self) -> bool {
        self.rows.iter().any(|row| row.adapter.is_some())
    }

    /// Adapter of a token's row.
    pub(super) fn adapter(&self, token: usize) -> Option<usize> {
        self.rows[self.token_rows[token] as usize].adapter
    }

    /// Physical block of a row's logical block.
    pub(super) fn block(&self, row: usize, group: usize, logical: usize) -> usize {
        let table = self.rows[row].tables[group];
        debug_assert!(
            (table.first..table.first + table.len).contains(&logical),
            "block {logical} of row {row}"
        );
        self.blocks[group][table.start + logical - table.first] as usize
    }

    /// Physical block of a token, and its place in it.
    pub(super) fn place(&self, token: usize, group: usize) -> (usize, usize) {
        let position = self.positions[token] as usize;
        let block = self.block(self.token_rows[token] as usize, group, position / BLOCK_TOKENS);
        (block, position % BLOCK_TOKENS)
    }

    /// Wanted positions of one pass.
    pub(super) fn logit_rows_of(&self, pass: usize, per_pass: usize) -> &[LogitRow] {
        let end = self.logit_rows.len().min((pass + 1) * per_pass);
        &self.logit_rows[pass * per_pass..end]
    }
}
