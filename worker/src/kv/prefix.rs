//! Which prefixes are held: a tree of full blocks, found by hash and confirmed by content.

use hashbrown::HashMap;
use thalweg_proto::block_hash::BlockHash;

use crate::plan::{BlockId, KV_GROUPS};

/// What a block stands behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// The prompt's start, under this `h_0`: model, adapter, scope and salt.
    Root(BlockHash),
    /// Another block.
    Node(NodeId),
}

/// Identity of one node; never used again, so that a node cannot pass for another one that had its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeId(u64);

/// One full block of tokens behind a parent, and where each group holds its KV. Lives while any group does.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    parent: Parent,
    tokens: Box<[u32]>,
    pub(super) blocks: [Option<BlockId>; KV_GROUPS],
}

/// Nodes by hash.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    nodes: HashMap<BlockHash, Node>,
    last_id: u64,
}

impl PrefixIndex {
    /// The node of this hash, when it holds exactly these tokens behind exactly this parent. Two prefixes of one hash
    /// therefore never pass for each other.
    pub(super) fn find(&self, hash: BlockHash, parent: Parent, tokens: &[u32]) -> Option<&Node> {
        self.nodes.get(&hash).filter(|node| node.parent == parent && *node.tokens == *tokens)
    }

    /// Whatever node has this hash.
    pub(super) fn get_mut(&mut self, hash: BlockHash) -> Option<&mut Node> {
        self.nodes.get_mut(&hash)
    }

    /// A node without blocks, in place of any other of this hash.
    pub(super) fn insert(&mut self, hash: BlockHash, parent: Parent, tokens: &[u32]) -> &mut Node {
        self.last_id += 1;
        let node =
            Node { id: NodeId(self.last_id), parent, tokens: tokens.into(), blocks: [None; KV_GROUPS] };
        self.nodes.entry(hash).insert(node).into_mut()
    }

    pub(super) fn remove(&mut self, hash: BlockHash) -> Option<Node> {
        self.nodes.remove(&hash)
    }

    /// The group's block of this hash is gone.
    pub(super) fn drop_block(&mut self, hash: BlockHash, group: usize) {
        if let Some(node) = self.nodes.get_mut(&hash) {
            node.blocks[group] = None;
            if node.blocks == [None; KV_GROUPS] {
                self.nodes.remove(&hash);
            }
        }
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = Node> + '_ {
        self.nodes.drain().map(|(_, node)| node)
    }
}
