//! What workers say about their blocks.

use thalweg_proto::ids::{WorkerEpoch, WorkerId};

/// Changes of one worker's block pool, numbered without gaps within an epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// Whose blocks.
    pub worker: WorkerId,
    /// Which life of it; blocks of older ones are gone.
    pub epoch: WorkerEpoch,
    /// 1, 2, 3...
    pub seq: u64,
    /// In the order in which they happened.
    pub events: Vec<BlockEvent>,
}

/// One change. Hashes are `BlockHash::index_key`s.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// These blocks can be matched now.
    Stored(Vec<u64>),
    /// These no longer.
    Removed(Vec<u64>),
    /// None at all any more.
    Cleared,
}
