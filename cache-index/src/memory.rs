//! The index of one process: workers and routers that share an address space.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{CacheIndex, EventBatch, Replica};

/// Applies batches to the replica where they are published.
#[derive(Default)]
pub struct MemoryIndex {
    replica: Arc<Replica>,
    /// Somebody publishes here.
    is_used: AtomicBool,
}

impl MemoryIndex {
    /// An empty index.
    pub fn new() -> Self {
        Self::default()
    }
}

impl CacheIndex for MemoryIndex {
    fn publish(&self, batch: EventBatch) {
        self.is_used.store(true, Ordering::Relaxed);
        self.replica.apply(&batch);
    }

    /// Workers of other processes have no way here; those of this one announce themselves at their start.
    fn hears(&self) -> bool {
        self.is_used.load(Ordering::Relaxed)
    }

    fn replica(&self) -> Arc<Replica> {
        Arc::clone(&self.replica)
    }
}
