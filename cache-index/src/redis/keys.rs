//! Names in Redis. All of one shard share a hash tag, so that a cluster keeps them on one node.

use thalweg_proto::ids::WorkerId;

/// Shards; each has one stream and the snapshots of its workers. Part of the schema.
pub(super) const SHARDS: u16 = 64;

/// Shard of a worker, the same in every build: the first 8 bytes of the BLAKE3 of its name, little-endian, modulo 64.
pub(super) fn shard_of(worker: &WorkerId) -> u16 {
    let mut head = [0; 8];
    head.copy_from_slice(&blake3::hash(worker.as_str().as_bytes()).as_bytes()[..8]);
    (u64::from_le_bytes(head) % u64::from(SHARDS)) as u16
}

/// Stream of the events of a shard's workers.
pub(super) fn stream(shard: u16) -> String {
    format!("{{tw1:{shard}}}")
}

/// Sorted set of the names of a shard's workers by when they last wrote a snapshot, Unix seconds.
pub(super) fn workers(shard: u16) -> String {
    format!("{{tw1:{shard}}}:workers")
}

/// Snapshot of one worker.
pub(super) fn snapshot(worker: &WorkerId) -> String {
    format!("{{tw1:{}}}:snapshot:{worker}", shard_of(worker))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_part_of_the_schema() {
        let worker = WorkerId::new("worker-0");
        assert_eq!(shard_of(&worker), 16);
        assert_eq!(stream(7), "{tw1:7}");
        assert_eq!(workers(7), "{tw1:7}:workers");
        assert_eq!(snapshot(&worker), format!("{{tw1:{}}}:snapshot:worker-0", shard_of(&worker)));
    }
}
