//! The blocks that one sequence holds.

use std::sync::Arc;

use super::pool::BlockRef;
use crate::plan::{BlockId, BlockTable, KV_GROUPS};

/// Block tables of one sequence, one per KV group. Owns a reference to each block; goes back through
/// `KvCache::release`.
#[derive(Debug, Default)]
pub struct SequenceBlocks {
    pub(super) groups: [GroupBlocks; KV_GROUPS],
}

/// Blocks of logical numbers `first..first + blocks.len()`.
#[derive(Debug, Default)]
pub(super) struct GroupBlocks {
    first: usize,
    blocks: Vec<BlockRef>,
    /// Their numbers as rows have them, until one changes.
    shared: Option<Arc<[BlockId]>>,
}

impl GroupBlocks {
    pub(super) fn new(first: usize, blocks: Vec<BlockRef>) -> Self {
        Self { first, blocks, shared: None }
    }

    /// Logical number behind the last block.
    pub(super) fn end(&self) -> usize {
        self.first + self.blocks.len()
    }

    /// The block of a logical number.
    pub(super) fn get(&self, logical: usize) -> Option<&BlockRef> {
        self.blocks.get(logical.checked_sub(self.first)?)
    }

    pub(super) fn push(&mut self, block: BlockRef) {
        self.shared = None;
        self.blocks.push(block);
    }

    /// Puts another block in the place of a logical number, which is there, and returns the one that it had.
    pub(super) fn replace(&mut self, logical: usize, block: BlockRef) -> BlockRef {
        self.shared = None;
        std::mem::replace(&mut self.blocks[logical - self.first], block)
    }

    /// Takes out those before a logical number.
    pub(super) fn pass(&mut self, logical: usize) -> impl Iterator<Item = BlockRef> + '_ {
        let passed = logical.saturating_sub(self.first).min(self.blocks.len());
        if passed > 0 {
            self.shared = None;
        }
        self.first += passed;
        self.blocks.drain(..passed)
    }

    pub(super) fn into_blocks(self) -> Vec<BlockRef> {
        self.blocks
    }

    fn table(&mut self) -> BlockTable {
        if self.blocks.is_empty() {
            return BlockTable { first: self.first as u32, ..BlockTable::default() };
        }
        let blocks = self.shared.get_or_insert_with(|| self.blocks.iter().map(BlockRef::id).collect());
        BlockTable { first: self.first as u32, blocks: blocks.clone() }
    }
}

impl SequenceBlocks {
    /// Reads something of every line of memory that a row's tables are made from.
    pub fn call_up(&self) -> usize {
        let tables = self.groups.iter().filter_map(|group| group.shared.as_ref());
        tables
            .flat_map(|table| table.iter().step_by(16))
            .fold(0, |sum, block| sum.wrapping_add(block.0 as usize))
    }

    /// As the runner wants them.
    pub fn tables(&mut self) -> [BlockTable; KV_GROUPS] {
        self.groups.each_mut().map(GroupBlocks::table)
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

#[cfg(test)]
mod tests {
    use super::super::pool::BlockPool;
    use super::super::{FULL, SLIDING};
    use super::*;

    #[test]
    fn rows_share_a_table_until_a_block_changes() {
        let mut pool = BlockPool::new(8);
        let mut block = || pool.allocate().expect("a free block").0;
        let mut sequence = SequenceBlocks::default();
        sequence.groups[FULL] = GroupBlocks::new(3, vec![block(), block()]);
        let mut before = sequence.tables();
        let mut check = |sequence: &mut SequenceBlocks, is_shared: bool, first: u32, ids: &[u32]| {
            let tables = sequence.tables();
            assert_eq!(Arc::ptr_eq(&tables[FULL].blocks, &before[FULL].blocks), is_shared, "{ids:?}");
            assert_eq!(tables[FULL].first, first);
            assert!(tables[FULL].blocks.iter().map(|block| block.0).eq(ids.iter().copied()), "{tables:?}");
            assert_eq!(tables[SLIDING], BlockTable::default());
            before = tables;
        };
        check(&mut sequence, true, 3, &[0, 1]);
        sequence.groups[FULL].push(block());
        check(&mut sequence, false, 3, &[0, 1, 2]);
        assert_eq!(sequence.groups[FULL].pass(3).count(), 0, "none stands before it");
        check(&mut sequence, true, 3, &[0, 1, 2]);
        let own = sequence.groups[FULL].replace(4, block());
        assert_eq!(
            (own.id(), sequence.groups[FULL].get(4).map(BlockRef::id)),
            (BlockId(1), Some(BlockId(3)))
        );
        check(&mut sequence, false, 3, &[0, 3, 2]);
        assert_eq!(sequence.groups[FULL].pass(5).map(|block| block.id().0).collect::<Vec<_>>(), [0, 3]);
        check(&mut sequence, false, 5, &[2]);
        assert_eq!(sequence.groups[FULL].pass(9).count(), 1);
        check(&mut sequence, false, 6, &[]);
    }
}
