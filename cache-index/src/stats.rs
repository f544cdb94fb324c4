//! What an index counts, for metrics.

/// Counters since the start, and gauges of now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// The store of the index is out of reach or refuses: replicas stay as they were, and what is published waits.
    pub degraded: bool,
    /// The replica has taken in what was there when it first reached the store.
    pub bootstrapped: bool,
    /// Workers known here of which nothing was heard in their epoch, or of which events were missed.
    pub workers_behind: usize,
    /// Batches handed to the store.
    pub batches_published: u64,
    /// Batches given up because the store did not take them in time; a snapshot makes up for them.
    pub batches_dropped: u64,
    /// Snapshots written to the store.
    pub snapshots_written: u64,
    /// Snapshots taken into the replica.
    pub snapshots_read: u64,
    /// Times that batches of a worker were missing.
    pub gaps: u64,
    /// Connections opened after the first of each kind.
    pub reconnects: u64,
    /// Block events taken into the replica.
    pub events_applied: u64,
    /// Entries of the store that this build could not read.
    pub undecodable: u64,
    /// Age of the newest batch when it was taken in, ms; 0 while nothing comes. Includes the difference between the
    /// clock of the store and ours.
    pub lag_ms: u64,
}
