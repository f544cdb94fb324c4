//! The only place where blocks of tokens are hashed: router and workers must agree to the bit.
//!
//! `h_i = BLAKE3-128(h_{i-1}, tokens of block i)`, little-endian; `h_0` is the root, from everything that makes the
//! KV of equal tokens differ, each field length-prefixed.

use std::fmt;

/// Version of the scheme below; part of every root.
pub const HASH_VERSION: u32 = 1;

/// Tokens of a block, unless configured otherwise.
pub const BLOCK_TOKENS: usize = 16;

/// Identity of one full block of tokens, its whole prefix included.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 16]);

impl BlockHash {
    /// The 64 bits that the cache index keeps.
    pub fn index_key(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// What two requests must share before they may share a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashRoot<'a> {
    /// Fingerprint of the weights and of everything else that changes KV values.
    pub fingerprint: &'a [u8],
    /// LoRA adapter, empty for the base model.
    pub adapter: &'a str,
    /// Tenant, or `shared`.
    pub scope: &'a str,
    /// The client's `cache_salt`, empty if none.
    pub salt: &'a str,
}

impl HashRoot<'_> {
    /// `h_0`.
    pub fn hash(&self) -> BlockHash {
        let mut hasher = blake3::Hasher::new();
        let version = HASH_VERSION.to_le_bytes();
        for field in [
            &version[..],
            self.fingerprint,
            self.adapter.as_bytes(),
            self.scope.as_bytes(),
            self.salt.as_bytes(),
        ] {
            hasher.update(&(field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        truncate(&hasher)
    }
}

/// Hash of one full block behind `parent`.
pub fn child(parent: BlockHash, tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.0);
    let mut bytes = [0u8; 4 * 64];
    for part in tokens.chunks(64) {
        for (to, token) in bytes.chunks_exact_mut(4).zip(part) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(&bytes[..4 * part.len()]);
    }
    truncate(&hasher)
}

/// Hashes of all full blocks of `tokens`, in order; a last part block has none.
pub fn full_blocks(root: BlockHash, tokens: &[u32], block_tokens: usize) -> Vec<BlockHash> {
    let mut parent = root;
    tokens
        .chunks_exact(block_tokens)
        .map(|block| {
            parent = child(parent, block);
            parent
        })
        .collect()
}

fn truncate(hasher: &blake3::Hasher) -> BlockHash {
    let mut hash = [0; 16];
    hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    BlockHash(hash)
}
