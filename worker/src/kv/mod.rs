//! Paged KV cache as bookkeeping: who owns which block, and which prefixes are held. It never sees a tensor.
//!
//! Steps run one after another, each reading and writing only its own tables' blocks. A block that is given up while step
//! N is planned may therefore be written by step N + 1, even though an earlier step that reads it is still in flight.

mod budget;
mod cache;
mod events;
mod lru;
mod pool;
mod prefix;
mod table;

pub use budget::{KvBudget, KvPlanError, blocks_per_sequence, plan_blocks};
pub use cache::{KvCache, KvConfig, PrefixHit, Usage};
pub use events::KvEventSink;
pub use pool::{BOOKKEEPING_BYTES_PER_BLOCK, BlockPool, BlockRef};
pub use prefix::Parent;
pub use table::SequenceBlocks;

/// KV group of layers that see the whole context.
pub const FULL: usize = 0;

/// KV group of layers with a sliding window.
pub const SLIDING: usize = 1;
