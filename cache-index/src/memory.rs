//! The index of one process: workers and routers that share an address space.

use std::sync::Arc;

use crate::{CacheIndex, EventBatch, Replica};

/// Applies batches to the replica where they are published.
#[derive(Default)]
pub struct MemoryIndex {
    replica: Arc<Replica>,
}

impl MemoryIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }
}

impl CacheIndex for MemoryIndex {
    fn publish(&self, batch: EventBatch) {
        self.replica.apply(&batch);
    }

    fn replica(&self) -> Arc<Replica> {
        Arc::clone(&self.replica)
    }
}
