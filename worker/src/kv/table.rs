//! The blocks that one sequence holds.

use super::pool::BlockRef;
use crate::plan::{BlockTable, KV_GROUPS};

/// Block tables of one sequence, one per KV group. Owns a reference to each block; goes back through
/// `KvCache::release`.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    pub(super) groups: [GroupBlocks; KV_GROUPS],
}

/// Blocks of logical numbers `first..first + blocks.len()`.
#[derive(Debug, Default)]
pub(super) struct GroupBlocks {
    pub(super) first: usize,
    pub(super) blocks: Vec<BlockRef>,
}

impl GroupBlocks {
    /// Logical number behind the last block.
    pub(super) fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// The block of a logical number.
    pub(super) fn get_mut(&mut self, logical: usize) -> Option<&mut BlockRef> {
        self.blocks.get_mut(logical.checked_sub(self.first)?)
    }

    fn table(&self) -> BlockTable {
        BlockTable { first: self.first as u32, blocks: self.blocks.iter().map(BlockRef::id).collect() }
    }
}

impl SequenceBlocks {
    /// As the runner wants them.
    pub fn tables(&self) -> [BlockTable; KV_GROUPS] {
        self.groups.each_ref().map(GroupBlocks::table)
    }

    /// Blocks held in one group.
    pub fn len(&self, group: usize) -> usize {
        self.groups[group].blocks.len()
    }

    /// Holds nothing.
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(|g| g.blocks.is_empty())
    }
}
