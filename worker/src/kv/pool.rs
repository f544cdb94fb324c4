//! Blocks of one KV group: free, cached or in use, and nothing else.

use thalweg_proto::block_hash::BlockHash;

use super::lru::LruList;
use crate::plan::BlockId;

/// One reference to a block. Given out by the pool and handed back to it: neither copied nor cloned, so that a table
/// cannot give a block back twice.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a reference that is not released leaks its block"]
pub struct BlockRef(BlockId);

impl BlockRef {
    /// Which block.
    pub fn id(&self) -> BlockId {
        self.0
    }
}

/// What it takes to keep count of a block, its name's place in the index of prefixes included.
pub const BOOKKEEPING_BYTES_PER_BLOCK: usize = 256;

/// Reference counts of a fixed number of blocks. A block whose content has a name is kept as cached when its last
/// reference goes, and given up, least recently used first, when no block is free.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    cached: LruList,
    in_use: usize,
}

#[derive(Clone, Debug, Default)]
struct Block {
    references: u32,
    name: Option<BlockHash>,
}

impl BlockPool {
    /// All blocks free; low numbers are given out first.
    pub fn new(blocks: usize) -> Self {
        Self {
            blocks: vec![Block::default(); blocks],
            free: (0..blocks as u32).rev().map(BlockId).collect(),
            cached: LruList::new(blocks),
            in_use: 0,
        }
    }

    /// A block of unknown content, and the name that it had until now when it had to be taken from the cached ones. None
    /// when all are in use.
    pub fn allocate(&mut self) -> Option<(BlockRef, Option<BlockHash>)> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => BlockId(self.cached.pop()?),
        };
        let block = &mut self.blocks[id.0 as usize];
        block.references = 1;
        self.in_use += 1;
        Some((BlockRef(id), block.name.take()))
    }

    /// Another reference to a block that is cached or in use.
    pub fn retain(&mut self, id: BlockId) -> BlockRef {
        let block = &mut self.blocks[id.0 as usize];
        if block.references == 0 {
            assert!(self.cached.remove(id.0), "block {} is free and cannot be shared", id.0);
            self.in_use += 1;
        }
        block.references += 1;
        BlockRef(id)
    }

    /// Gives a reference back.
    pub fn release(&mut self, reference: BlockRef) {
        let BlockRef(id) = reference;
        let block = &mut self.blocks[id.0 as usize];
        block.references -= 1;
        if block.references > 0 {
            return;
        }
        self.in_use -= 1;
        match block.name {
            Some(_) => self.cached.push(id.0),
            None => self.free.push(id),
        }
    }

    /// Names the content of a block in use, so that it outlives its references.
    pub fn name(&mut self, reference: &BlockRef, name: BlockHash) {
        self.blocks[reference.0.0 as usize].name = Some(name);
    }

    /// The content is no longer to be found: once without references, the block is free.
    pub fn forget(&mut self, id: BlockId) {
        self.blocks[id.0 as usize].name = None;
        if self.cached.remove(id.0) {
            self.free.push(id);
        }
    }

    /// All blocks.
    pub fn total(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that hold nothing.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks with a name and without references.
    pub fn cached(&self) -> usize {
        self.cached.len()
    }

    /// Blocks with references.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Blocks that `allocate` can give.
    pub fn available(&self) -> usize {
        self.free() + self.cached()
    }

    /// No sequence uses this block, yet it is kept.
    pub fn is_cached(&self, id: BlockId) -> bool {
        self.cached.contains(id.0)
    }

    /// The invariant of every step: each block is free, cached or in use.
    pub fn adds_up(&self) -> bool {
        self.free() + self.cached() + self.in_use() == self.total()
    }
}
