//! What a replica makes of batches that are missing, and of the snapshots that make up for them.
#![allow(clippy::unwrap_used, reason = "a test's helpers may panic")]

use std::sync::Arc;
use std::time::Duration;

use thalweg_cache_index::{Applied, BlockEvent, EventBatch, NotInstalled, Position, Replica};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

/// One replica that follows one worker.
struct Follower {
    replica: Replica,
    worker: WorkerId,
    start: Instant,
}

fn at(epoch: u64, generation: u64, seq: u64) -> Position {
    Position { epoch: WorkerEpoch(epoch), generation, seq }
}

impl Follower {
    fn new() -> Self {
        Self { replica: Replica::default(), worker: WorkerId::new("w"), start: Instant::now() }
    }

    fn follow(&self, at: Position, events: Vec<BlockEvent>) -> Applied {
        let batch = EventBatch { worker: self.worker.clone(), epoch: at.epoch, seq: at.seq, events };
        self.replica.follow(at.generation, &batch, self.start)
    }

    fn stored(&self, at: Position, keys: &[u64]) -> Applied {
        self.follow(at, vec![BlockEvent::Stored(keys.to_vec())])
    }

    fn install(&self, at: Position, keys: &[u64]) -> Result<(), NotInstalled> {
        let install = self.replica.install(&self.worker, at, self.start)?;
        install.add(keys);
        install.finish()
    }

    fn matched(&self, epoch: u64, keys: &[u64]) -> u32 {
        let holder = self.replica.enroll(&self.worker, WorkerEpoch(epoch)).unwrap();
        self.replica.lookup(keys, self.start).blocks(holder)
    }

    fn is_behind(&self) -> bool {
        self.replica.behind().iter().any(|(worker, _)| *worker == self.worker)
    }
}

#[test]
fn a_gap_keeps_what_is_known_until_a_snapshot_that_reaches_into_it() {
    // cache-index-02.
    let f = Follower::new();
    assert_eq!(f.stored(at(1, 0, 1), &[1, 2, 3]), Applied::InOrder);
    assert!(!f.is_behind());
    assert_eq!(f.stored(at(1, 0, 5), &[4]), Applied::Gap { missing: 3 });
    assert!(f.is_behind());
    assert_eq!(f.stored(at(1, 0, 6), &[5]), Applied::InOrder, "the tail goes on");
    assert_eq!(f.matched(1, &[1, 2, 3, 4, 5]), 5, "what was known is a hint");
    assert_eq!(f.stored(at(1, 0, 4), &[9]), Applied::Stale, "too late: its place is uncertain");
    assert_eq!(f.install(at(1, 0, 1), &[1]), Err(NotInstalled::TooOld), "it has nothing of what is missing");
    assert_eq!(
        f.install(at(1, 0, 3), &[1, 2, 4]),
        Ok(()),
        "the stream, read again from there, may have the rest"
    );
    assert!(!f.is_behind());
    assert_eq!(f.stored(at(1, 0, 5), &[3]), Applied::Gap { missing: 1 }, "it does not");
    assert_eq!(f.stored(at(1, 0, 9), &[5]), Applied::Gap { missing: 3 });
    assert_eq!(f.install(at(1, 0, 3), &[1]), Err(NotInstalled::TooOld), "each is of use once");
    assert_eq!(f.install(at(1, 0, 4), &[1, 2]), Ok(()), "it has all that the stream had not");
    assert!(!f.is_behind());
    assert_eq!(f.matched(1, &[1, 2, 3]), 2, "3 was removed meanwhile");
    assert_eq!(f.stored(at(1, 0, 5), &[3]), Applied::InOrder, "the tail is read again from there");
    assert_eq!(f.matched(1, &[1, 2, 3]), 3);
    assert_eq!(f.install(at(1, 0, 5), &[]), Err(NotInstalled::Known));
    assert_eq!(f.install(at(1, 0, 9), &[7]), Ok(()), "ahead of what was followed");
    assert_eq!(f.replica.position(&f.worker), Some(at(1, 0, 9)));
}

#[test]
fn a_new_generation_needs_its_snapshot_and_a_new_epoch_none() {
    let f = Follower::new();
    f.stored(at(1, 0, 1), &[1]);
    assert_eq!(f.stored(at(1, 1, 1), &[2]), Applied::Gap { missing: 1 });
    assert_eq!(f.stored(at(1, 0, 2), &[3]), Applied::Stale, "of the generation that was given up");
    assert_eq!(f.install(at(1, 0, 1), &[]), Err(NotInstalled::TooOld));
    assert_eq!(f.install(at(1, 1, 0), &[7]), Ok(()));
    assert_eq!(f.stored(at(2, 0, 1), &[8]), Applied::InOrder);
    assert_eq!(f.install(at(1, 5, 5), &[9]), Err(NotInstalled::OtherLife));
    assert_eq!(f.stored(at(1, 9, 9), &[9]), Applied::Stale);
    assert_eq!((f.matched(2, &[8]), f.matched(2, &[7])), (1, 0));
    let f = Follower::new();
    assert_eq!(f.stored(at(2, 0, 1), &[8]), Applied::InOrder);
    assert_eq!(f.install(at(3, 0, 4), &[9]), Ok(()), "a snapshot may be the first of an epoch");
    assert_eq!((f.matched(3, &[9]), f.matched(3, &[8])), (1, 0));
}

#[test]
fn whoever_talks_to_the_worker_knows_its_epoch_though_its_clock_went_back() {
    let f = Follower::new();
    assert_eq!(f.stored(at(5, 0, 1), &[1, 2]), Applied::InOrder);
    assert_eq!(f.matched(5, &[1, 2]), 2);
    assert_eq!(f.matched(3, &[1, 2]), 0, "nothing of its former life");
    assert_eq!(f.stored(at(5, 0, 2), &[1]), Applied::Stale, "said by the former life, read late");
    assert_eq!(f.replica.wants(&f.worker, at(5, 0, 9)), Err(NotInstalled::OtherLife));
    assert_eq!(f.install(at(5, 0, 9), &[1]), Err(NotInstalled::OtherLife));
    assert!(f.is_behind());
    assert_eq!(f.stored(at(3, 0, 1), &[1]), Applied::InOrder);
    assert_eq!(f.install(at(3, 0, 2), &[1, 2, 3]), Ok(()));
    assert_eq!(f.stored(at(4, 0, 1), &[9]), Applied::Stale, "of a life that nobody has met yet");
    assert_eq!(f.matched(3, &[1, 2, 3]), 3);
    assert_eq!(f.stored(at(3, 0, 3), &[4]), Applied::InOrder);
    assert_eq!(f.matched(4, &[1]), 0, "met");
    assert_eq!(f.stored(at(4, 0, 2), &[9]), Applied::Gap { missing: 1 });
}

#[test]
fn a_snapshot_shows_all_at_once_or_not_at_all() {
    let f = Follower::new();
    f.stored(at(1, 0, 1), &[1]);
    f.stored(at(1, 0, 3), &[]);
    let keys: Vec<u64> = (10..3_000).collect();
    let install = f.replica.install(&f.worker, at(1, 0, 3), f.start).unwrap();
    install.add(&keys);
    assert_eq!((f.matched(1, &keys), f.matched(1, &[1])), (0, 1), "not yet");
    drop(install);
    assert_eq!((f.matched(1, &keys), f.matched(1, &[1])), (0, 1), "given up");
    let install = f.replica.install(&f.worker, at(1, 0, 3), f.start).unwrap();
    install.add(&keys);
    install.finish().unwrap();
    assert_eq!((f.matched(1, &keys), f.matched(1, &[1])), (2_990, 0), "all at once");
    while f.replica.tidy(f.start, 1_000) {}
    assert_eq!(f.replica.stats().blocks, 2_990, "what was given up or replaced is swept");

    f.stored(at(1, 0, 9), &[]);
    let install = f.replica.install(&f.worker, at(1, 0, 9), f.start).unwrap();
    install.add(&[1]);
    assert_eq!(f.matched(2, &[1]), 0, "the worker starts again while its snapshot is read");
    assert_eq!(install.finish(), Err(NotInstalled::OtherLife));
    let install = f.replica.install(&f.worker, at(2, 0, 9), f.start).unwrap();
    f.replica.forget(&f.worker);
    assert_eq!(install.finish(), Err(NotInstalled::OtherLife));
}

#[test]
fn a_snapshot_keeps_suspension_and_expectations() {
    let f = Follower::new();
    f.stored(at(1, 0, 2), &[1]);
    let holder = f.replica.enroll(&f.worker, WorkerEpoch(1)).unwrap();
    let later = f.start + Duration::from_secs(5);
    f.replica.expect(holder, Arc::from([5, 6]), f.start, later).unwrap();
    f.replica.suspend(holder, true);
    f.install(at(1, 0, 2), &[1, 2]).unwrap();
    assert_eq!(f.matched(1, &[1, 2]), 0, "still suspended");
    f.replica.suspend(holder, false);
    assert_eq!((f.matched(1, &[1, 2]), f.matched(1, &[5, 6])), (2, 2), "still expected");
}

#[test]
fn only_workers_that_nobody_enrolled_are_forgotten_for_their_silence() {
    let f = Follower::new();
    f.stored(at(1, 0, 1), &[1]);
    let member = WorkerId::new("member");
    f.replica.enroll(&member, WorkerEpoch(1)).unwrap();
    assert_eq!(f.replica.behind(), [(member.clone(), true)]);
    let missing = EventBatch { worker: member.clone(), epoch: WorkerEpoch(1), seq: 2, events: vec![] };
    assert_eq!(f.replica.follow(0, &missing, f.start), Applied::Gap { missing: 1 });
    assert_eq!(f.replica.behind(), [(member.clone(), false)], "behind, but not silent");
    assert_eq!(f.replica.forget_strangers(f.start), 0, "heard of just then");
    assert_eq!(f.replica.forget_strangers(f.start + Duration::from_secs(1)), 1);
    assert_eq!(f.replica.position(&f.worker), None);
    assert!(f.replica.position(&member).is_some());
}
