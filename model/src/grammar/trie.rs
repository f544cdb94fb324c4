//! A vocabulary's words by their bytes, laid out for searches that fail at most children of a node.

use llguidance::toktrie::{Recognizer, SimpleVob, TokTrie, TrieNode};

/// Children of a node stand side by side, in the order of the library's trie: where that one jumps over a subtree to reach the
/// next sibling, this one reads the next byte.
pub(super) struct Trie {
    /// By node: the byte that leads to it.
    bytes: Vec<u8>,
    /// By node.
    nodes: Vec<Node>,
    /// The nodes without a parent, which come first.
    roots: Children,
}

/// Nodes that have the same parent.
#[derive(Clone, Copy, Default)]
pub(super) struct Children {
    first: u32,
    count: u32,
}

#[derive(Clone, Copy)]
struct Node {
    /// The word that ends here, or [`NO_WORD`].
    word: u32,
    children: Children,
}

const NO_WORD: u32 = u32::MAX;

impl Trie {
    pub(super) fn new(of: &TokTrie) -> Self {
        let mut trie = Self { bytes: Vec::new(), nodes: Vec::new(), roots: Children::default() };
        trie.roots = trie.add_children(of, of.root());
        trie
    }

    fn add_children(&mut self, of: &TokTrie, parent: &TrieNode) -> Children {
        let first = self.nodes.len();
        for child in of.node_children(parent) {
            let word = child.token_id().unwrap_or(NO_WORD);
            self.bytes.push(child.byte());
            self.nodes.push(Node { word, children: Children::default() });
        }
        let end = self.nodes.len();
        for (at, child) in (first..end).zip(of.node_children(parent)) {
            self.nodes[at].children = self.add_children(of, child);
        }
        Children { first: first as u32, count: (end - first) as u32 }
    }

    pub(super) fn roots(&self) -> Children {
        self.roots
    }

    /// Each child and the byte that leads to it.
    pub(super) fn each(&self, children: Children) -> impl Iterator<Item = (u32, u8)> {
        let Children { first, count } = children;
        let bytes = &self.bytes[first as usize..(first + count) as usize];
        (first..).zip(bytes.iter().copied())
    }

    pub(super) fn byte(&self, node: u32) -> u8 {
        self.bytes[node as usize]
    }

    pub(super) fn word(&self, node: u32) -> Option<u32> {
        let word = self.nodes[node as usize].word;
        (word != NO_WORD).then_some(word)
    }

    pub(super) fn children(&self, node: u32) -> Children {
        self.nodes[node as usize].children
    }

    /// Adds the words that end below a node, or in it, if the recognizer takes the byte that leads there; says whether it does.
    pub(super) fn add(&self, node: u32, recognizer: &mut impl Recognizer, into: &mut SimpleVob) -> bool {
        let is_taken = recognizer.try_push_byte(self.byte(node));
        if is_taken {
            if let Some(word) = self.word(node) {
                into.allow_token(word);
            }
            // As deep as the longest word, which has at most 255 bytes.
            for (child, _) in self.each(self.children(node)) {
                self.add(child, recognizer, into);
            }
            recognizer.pop_bytes(1);
        }
        is_taken
    }
}
