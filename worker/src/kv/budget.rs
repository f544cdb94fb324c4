//! How much of the cache's memory each group gets, decided once at start.

use super::{FULL, SLIDING};
use crate::plan::KV_GROUPS;

/// What there is to divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBudget {
    /// Memory for KV of all layers.
    pub bytes: u64,
    /// Bytes of one block over all layers of a group; 0 for a group without layers.
    pub bytes_per_block: [u64; KV_GROUPS],
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Tokens that sliding layers see. Set when that group has layers.
    pub sliding_window: Option<usize>,
    /// Longest sequence.
    pub max_model_len: usize,
}

/// Not even one sequence fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "one sequence of {max_model_len} tokens needs {needed} bytes of KV cache, but there are {given}: raise \
     --kv-cache-memory-bytes to at least {needed}{shorter}",
    shorter = match fitting_len {
        0 => "; not one token fits".to_owned(),
        len => format!(", or lower --max-model-len to at most {len}"),
    }
)]
pub struct KvPlanError {
    /// Tokens of the longest sequence.
    pub max_model_len: usize,
    /// Bytes that it needs.
    pub needed: u64,
    /// Bytes that there are.
    pub given: u64,
    /// Tokens that would fit.
    pub fitting_len: usize,
}

/// Windows of a sequence that the two groups are balanced for. A shorter one leaves full blocks over, a longer one
/// sliding blocks.
const REFERENCE_WINDOWS: usize = 4;

/// Blocks per group: so that sequences of four windows' length use both up at the same time, but at least what one
/// sequence of maximum length needs. With one group, it gets all.
pub fn plan_blocks(budget: &KvBudget) -> Result<[usize; KV_GROUPS], KvPlanError> {
    let least = blocks_per_sequence(budget.max_model_len, budget.block_tokens, budget.sliding_window);
    if budget.bytes_for(least) > budget.bytes {
        return Err(budget.error());
    }
    let [full_bytes, sliding_bytes] = budget.bytes_per_block;
    let reference = budget
        .sliding_window
        .map_or(budget.max_model_len, |w| budget.max_model_len.min(REFERENCE_WINDOWS * w));
    let typical = blocks_per_sequence(reference, budget.block_tokens, budget.sliding_window);
    let sequences = budget.bytes as f64 / budget.bytes_for(typical).max(1) as f64;
    let balanced = (sequences * typical[SLIDING] as f64) as u64;

    let most = |bytes: u64, each: u64| bytes.checked_div(each).unwrap_or(0);
    let full_least = least[FULL] as u64 * full_bytes;
    let sliding = balanced.min(most(budget.bytes - full_least, sliding_bytes)).max(least[SLIDING] as u64);
    let sliding = if sliding_bytes == 0 { 0 } else { sliding };
    let full = most(budget.bytes - sliding * sliding_bytes, full_bytes);
    Ok([full, sliding].map(|blocks| blocks.min(u64::from(u32::MAX) / 2) as usize))
}

/// Blocks per group that one sequence of `tokens` holds at most while it decodes.
pub fn blocks_per_sequence(
    tokens: usize,
    block_tokens: usize,
    sliding_window: Option<usize>,
) -> [usize; KV_GROUPS] {
    let full = tokens.div_ceil(block_tokens);
    let window = sliding_window.map_or(full, |window| (window - 1).div_ceil(block_tokens) + 1);
    [full, full.min(window)]
}

impl KvBudget {
    fn bytes_for(&self, blocks: [usize; KV_GROUPS]) -> u64 {
        blocks.iter().zip(self.bytes_per_block).map(|(blocks, bytes)| *blocks as u64 * bytes).sum()
    }

    fn needed(&self, tokens: usize) -> u64 {
        self.bytes_for(blocks_per_sequence(tokens, self.block_tokens, self.sliding_window))
    }

    fn error(&self) -> KvPlanError {
        let (mut fits, mut too_long) = (0, self.max_model_len);
        while fits + 1 < too_long {
            let tokens = fits.midpoint(too_long);
            if self.needed(tokens) <= self.bytes { fits = tokens } else { too_long = tokens }
        }
        KvPlanError {
            max_model_len: self.max_model_len,
            needed: self.needed(self.max_model_len),
            given: self.bytes,
            fitting_len: fits,
        }
    }
}
