//! What the block pool tells the cache index.

use thalweg_cache_index::event::BlockEvent;

/// Takes note of changes, in the order in which they happened. Called on the engine's thread: must not block.
pub trait KvEventSink: Send {
    /// Blocks of the published group that can be matched now, or no longer.
    fn record(&mut self, event: BlockEvent);
}
