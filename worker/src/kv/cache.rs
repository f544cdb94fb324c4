//! Pools of both groups and the prefixes in them: find, acquire, reserve, slide, remember, release.

use std::collections::VecDeque;

use thalweg_cache_index::event::BlockEvent;
use thalweg_proto::block_hash::BlockHash;

use super::pool::BlockPool;
use super::prefix::{Parent, PrefixIndex};
use super::table::{GroupBlocks, SequenceBlocks};
use super::{FULL, SLIDING};
use crate::plan::{BlockId, KV_GROUPS};

/// Shape of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvConfig {
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Blocks per group.
    pub blocks: [usize; KV_GROUPS],
    /// Groups that have layers; the others have empty tables.
    pub has_group: [bool; KV_GROUPS],
    /// Tokens that the sliding group sees, the current one included.
    pub sliding_window: Option<usize>,
    /// Reuse blocks of equal prefixes.
    pub prefix_caching: bool,
}

/// Blocks of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// All.
    pub total: usize,
    /// Hold nothing.
    pub free: usize,
    /// Hold a prefix that nobody uses.
    pub cached: usize,
    /// Held by sequences.
    pub in_use: usize,
}

/// A held prefix, valid until the cache changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixHit {
    /// Full blocks.
    pub blocks: usize,
    /// What the next block stands behind.
    pub parent: Parent,
    /// Blocks to take over per group, the group's last ones.
    held: [Vec<BlockId>; KV_GROUPS],
}

impl PrefixHit {
    /// Nothing is held.
    pub fn none(root: BlockHash) -> Self {
        Self { blocks: 0, parent: Parent::Root(root), held: Default::default() }
    }
}

/// All KV blocks of a worker.
#[derive(Debug)]
pub struct KvCache {
    config: KvConfig,
    pools: [BlockPool; KV_GROUPS],
    index: PrefixIndex,
    /// Stored in a step that has not completed: matchable by later steps, not yet told.
    unpublished: VecDeque<(u64, BlockHash)>,
    events: Vec<BlockEvent>,
}

impl KvCache {
    /// All blocks free.
    pub fn new(config: KvConfig) -> Self {
        let pools = config.blocks.map(BlockPool::new);
        Self {
            config,
            pools,
            index: PrefixIndex::default(),
            unpublished: VecDeque::new(),
            events: Vec::new(),
        }
    }

    /// The longest held prefix of at most `blocks_max` blocks: all full-group blocks, and of the sliding group those that
    /// the next token still sees. `hashes` and `tokens` begin at the prompt's start.
    pub fn find(
        &self,
        root: BlockHash,
        hashes: &[BlockHash],
        tokens: &[u32],
        blocks_max: usize,
    ) -> PrefixHit {
        let mut parent = Parent::Root(root);
        let mut path = Vec::new();
        let mut best = PrefixHit::none(root);
        let mut sliding_run = 0;
        for (hash, block) in hashes.iter().zip(tokens.chunks_exact(self.config.block_tokens)).take(blocks_max)
        {
            let Some(node) = self.index.find(*hash, parent, block) else { break };
            if self.config.has_group[FULL] && node.blocks[FULL].is_none() {
                break;
            }
            parent = Parent::Node(node.id);
            path.push(node);
            sliding_run = if node.blocks[SLIDING].is_some() { sliding_run + 1 } else { 0 };
            if !self.config.has_group[SLIDING] || sliding_run >= self.window_blocks().min(path.len()) {
                (best.blocks, best.parent) = (path.len(), parent);
            }
        }
        let visible = best.blocks - self.window_blocks().min(best.blocks);
        best.held[FULL] = path[..best.blocks].iter().filter_map(|n| n.blocks[FULL]).collect();
        best.held[SLIDING] = path[visible..best.blocks].iter().filter_map(|n| n.blocks[SLIDING]).collect();
        best
    }

    /// Whether a group can give `blocks` more beside those of a hit.
    pub fn fits(&self, hit: &PrefixHit, group: usize, blocks: usize) -> bool {
        let pool = &self.pools[group];
        let revived = hit.held[group].iter().filter(|id| pool.is_cached(**id)).count();
        !self.config.has_group[group] || pool.available() >= blocks + revived
    }

    /// Takes a hit's blocks over.
    pub fn acquire(&mut self, hit: &PrefixHit) -> SequenceBlocks {
        let mut sequence = SequenceBlocks::default();
        for (group, held) in hit.held.iter().enumerate() {
            let first = if self.config.has_group[group] { hit.blocks - held.len() } else { 0 };
            let blocks = held.iter().map(|id| self.pools[group].retain(*id)).collect();
            sequence.groups[group] = GroupBlocks::new(first, blocks);
        }
        sequence
    }

    /// Tokens, counted from the prompt's start, that the sequence's blocks can cover with all that is available.
    pub fn room(&self, sequence: &SequenceBlocks) -> usize {
        let blocks = |group: usize| sequence.groups[group].end() + self.pools[group].available();
        let groups = (0..KV_GROUPS).filter(|group| self.config.has_group[*group]);
        groups.map(blocks).min().unwrap_or(0) * self.config.block_tokens
    }

    /// Makes a group's blocks cover `tokens`, counted from the prompt's start. The caller has asked for `room`.
    pub fn reserve(&mut self, sequence: &mut SequenceBlocks, group: usize, tokens: usize) {
        if !self.config.has_group[group] {
            return;
        }
        let needed = tokens.div_ceil(self.config.block_tokens);
        while sequence.groups[group].end() < needed {
            let (block, evicted) = self.pools[group].allocate().expect("room was asked for");
            if let Some(hash) = evicted {
                self.index.drop_block(hash, group);
                self.unpublish(hash, group);
            }
            sequence.groups[group].push(block);
        }
    }

    /// Gives up sliding blocks that no token from position `context` on sees.
    pub fn slide(&mut self, sequence: &mut SequenceBlocks, context: usize) {
        let Some(window) = self.config.sliding_window else { return };
        let first_seen = (context + 1).saturating_sub(window) / self.config.block_tokens;
        for block in sequence.groups[SLIDING].pass(first_seen) {
            self.pools[SLIDING].release(block);
        }
    }

    /// Makes the sequence's full block number `logical`, written by `step` at the latest, findable. Where the same block
    /// is already held, the sequence takes that one and gives up its own. Returns what the next block stands behind.
    pub fn remember(
        &mut self,
        sequence: &mut SequenceBlocks,
        logical: usize,
        (parent, hash, tokens): (Parent, BlockHash, &[u32]),
        step: u64,
    ) -> Parent {
        if self.index.find(hash, parent, tokens).is_none() {
            self.forget(hash);
            self.index.insert(hash, parent, tokens);
        }
        let node = self.index.get_mut(hash).expect("it was found or inserted");
        let id = node.id;
        for group in 0..KV_GROUPS {
            let table = &mut sequence.groups[group];
            let Some(own) = table.get(logical) else { continue };
            let pool = &mut self.pools[group];
            match node.blocks[group] {
                Some(held) if held == own.id() => {}
                Some(held) => {
                    let own = table.replace(logical, pool.retain(held));
                    pool.release(own);
                }
                None => {
                    node.blocks[group] = Some(own.id());
                    pool.name(own, hash);
                    if group == self.config.published_group() {
                        self.unpublished.push_back((step, hash));
                    }
                }
            }
        }
        Parent::Node(id)
    }

    /// Gives all blocks back, the last ones first: a prefix outlives what stands behind it.
    pub fn release(&mut self, sequence: SequenceBlocks) {
        for (group, table) in sequence.groups.into_iter().enumerate() {
            table.into_blocks().into_iter().rev().for_each(|block| self.pools[group].release(block));
        }
    }

    /// Step `step` and all before it have completed: what they stored may be told.
    pub fn step_completed(&mut self, step: u64) {
        let mut stored = Vec::new();
        self.unpublished.retain(|(written_by, hash)| {
            let done = *written_by <= step;
            if done {
                stored.push(hash.index_key());
            }
            !done
        });
        if !stored.is_empty() {
            self.events.push(BlockEvent::Stored(stored));
        }
    }

    /// Forgets every prefix; blocks in use stay with their sequences.
    pub fn clear(&mut self) {
        for node in self.index.drain() {
            for (group, block) in node.blocks.iter().enumerate() {
                block.iter().for_each(|id| self.pools[group].forget(*id));
            }
        }
        self.unpublished.clear();
        self.events.push(BlockEvent::Cleared);
    }

    /// Changes to tell since the last call, in order.
    pub fn take_events(&mut self) -> Vec<BlockEvent> {
        std::mem::take(&mut self.events)
    }

    /// Blocks of one group.
    pub fn usage(&self, group: usize) -> Usage {
        let pool = &self.pools[group];
        Usage { total: pool.total(), free: pool.free(), cached: pool.cached(), in_use: pool.in_use() }
    }

    /// Shape of the cache.
    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    /// The invariant of every step, in every group.
    pub fn adds_up(&self) -> bool {
        self.pools.iter().all(BlockPool::adds_up)
    }

    /// Sliding blocks before the next token that it sees, at a block's boundary.
    fn window_blocks(&self) -> usize {
        self.config.window_blocks()
    }

    fn forget(&mut self, hash: BlockHash) {
        let Some(node) = self.index.remove(hash) else { return };
        for (group, block) in node.blocks.iter().enumerate() {
            if let Some(id) = block {
                self.pools[group].forget(*id);
                self.unpublish(hash, group);
            }
        }
    }

    fn unpublish(&mut self, hash: BlockHash, group: usize) {
        if group != self.config.published_group() {
            return;
        }
        match self.unpublished.iter().position(|(_, stored)| *stored == hash) {
            Some(at) => drop(self.unpublished.remove(at)),
            None => self.tell_removed(hash.index_key()),
        }
    }

    fn tell_removed(&mut self, key: u64) {
        match self.events.last_mut() {
            Some(BlockEvent::Removed(keys)) => keys.push(key),
            _ => self.events.push(BlockEvent::Removed(vec![key])),
        }
    }
}

impl KvConfig {
    /// The group whose blocks the cache index learns of: full attention, or sliding where the model has only that.
    pub fn published_group(&self) -> usize {
        if self.has_group[FULL] { FULL } else { SLIDING }
    }

    /// Sliding blocks that a token at a block's boundary sees before itself.
    pub fn window_blocks(&self) -> usize {
        self.sliding_window.map_or(0, |window| (window - 1).div_ceil(self.block_tokens))
    }
}
