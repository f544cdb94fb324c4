//! Workers of which something is missing, and when to look for their snapshots.

use std::time::Duration;

use hashbrown::HashMap;
use thalweg_proto::ids::WorkerId;
use tokio::time::Instant;

use super::RedisIndexError;
use super::health::Health;
use super::keys;
use super::link::{ANSWER_WITHIN, Link, transfer_time};
use super::wire::{EntryId, HEADER_BYTES, Header};
use crate::replica::Replica;

/// Waits between looks for a snapshot that is not there yet or too old: a publisher writes one at once when it notices,
/// and within a minute when it does not.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LAST_WAIT: Duration = Duration::from_secs(2);
/// A member of the cluster of which nothing was heard for so long probably publishes elsewhere, or nothing.
const SILENT: Duration = Duration::from_secs(8);
/// Keys taken in before others on the thread have their turn: about a millisecond.
const KEYS_PER_TURN: usize = 4_096;

/// What became of a look for a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fetched {
    /// It is in the replica; later events stand behind this entry.
    Installed(EntryId),
    /// It says nothing new, or not enough.
    Useless(EntryId),
    /// There is none that can be read.
    Absent,
}

/// Who is behind, by shard; one worker of a shard is looked after at a time.
#[derive(Default)]
pub(super) struct Recovery {
    behind: HashMap<WorkerId, Turn>,
}

struct Turn {
    shard: u16,
    due: Instant,
    wait: Duration,
    /// Since when it is silent.
    since: Instant,
    told: bool,
}

impl Turn {
    fn new(worker: &WorkerId, now: Instant) -> Self {
        Self { shard: keys::shard_of(worker), due: now, wait: FIRST_WAIT, since: now, told: false }
    }
}

impl Recovery {
    /// Exactly these workers are behind, silent or not. Returns those that have been silent for too long, each once.
    pub(super) fn set(&mut self, workers: Vec<(WorkerId, bool)>, now: Instant) -> Vec<WorkerId> {
        let mut before = std::mem::take(&mut self.behind);
        let mut silent = Vec::new();
        for (worker, is_silent) in workers {
            let mut turn = before.remove(&worker).unwrap_or_else(|| Turn::new(&worker, now));
            if !is_silent {
                (turn.since, turn.told) = (now, false);
            } else if !turn.told && now.duration_since(turn.since) > SILENT {
                turn.told = true;
                silent.push(worker.clone());
            }
            self.behind.insert(worker, turn);
        }
        silent
    }

    /// Something was missing just now, so that a snapshot may have been written.
    pub(super) fn hurry(&mut self, worker: &WorkerId, now: Instant) {
        let turn = self.behind.entry(worker.clone()).or_insert_with(|| Turn::new(worker, now));
        (turn.due, turn.wait) = (now, FIRST_WAIT);
    }

    /// With a new connection everybody's turn has come.
    pub(super) fn hurry_all(&mut self, now: Instant) {
        self.behind.values_mut().for_each(|turn| (turn.due, turn.wait) = (now, FIRST_WAIT));
    }

    /// Whether nobody is behind.
    pub(super) fn is_empty(&self) -> bool {
        self.behind.is_empty()
    }

    /// Whether anybody's turn has come.
    pub(super) fn is_busy(&self) -> bool {
        let now = Instant::now();
        self.behind.values().any(|turn| turn.due <= now)
    }

    /// Whose turn it is in a shard; it comes again after a wait.
    pub(super) fn next(&mut self, shard: u16, now: Instant) -> Option<WorkerId> {
        let due = |turn: &Turn| turn.shard == shard && turn.due <= now;
        let waiting = self.behind.iter_mut().filter(|(_, turn)| due(turn));
        let (worker, turn) = waiting.min_by_key(|(_, turn)| turn.due)?;
        turn.due = now + turn.wait;
        turn.wait = (turn.wait * 2).min(LAST_WAIT);
        Some(worker.clone())
    }

    /// The worker has caught up.
    pub(super) fn done(&mut self, worker: &WorkerId) {
        self.behind.remove(worker);
    }
}

/// Takes a worker's snapshot into the replica, if it is of use; looks at its head first.
pub(super) async fn fetch(
    link: &mut Link,
    worker: &WorkerId,
    replica: &Replica,
    health: &Health,
) -> Result<Fetched, RedisIndexError> {
    let key = keys::snapshot(worker);
    let mut command = redis::cmd("GETRANGE");
    command.arg(&key).arg(0).arg(HEADER_BYTES - 1);
    let head: Vec<u8> = link.run(&command, ANSWER_WITHIN).await?;
    if head.is_empty() {
        return Ok(Fetched::Absent);
    }
    let Ok((header, _)) = Header::decode(&head) else {
        health.undecodable.add(1);
        return Ok(Fetched::Absent);
    };
    if replica.wants(worker, header.at).is_err() {
        return Ok(Fetched::Useless(header.behind));
    }
    let within = ANSWER_WITHIN + transfer_time(8 * header.count as usize);
    let bytes: Vec<u8> = link.run(redis::cmd("GET").arg(&key), within).await?;
    install(&bytes, worker, replica, health).await
}

async fn install(
    bytes: &[u8],
    worker: &WorkerId,
    replica: &Replica,
    health: &Health,
) -> Result<Fetched, RedisIndexError> {
    let decoded = Header::decode(bytes).and_then(|(header, rest)| Ok((header, header.keys(rest)?)));
    let Ok((header, keys)) = decoded else {
        health.undecodable.add(1);
        return Ok(Fetched::Absent);
    };
    let Ok(install) = replica.install(worker, header.at, Instant::now()) else {
        return Ok(Fetched::Useless(header.behind));
    };
    let mut piece = Vec::with_capacity(KEYS_PER_TURN);
    for packed in keys.chunks(KEYS_PER_TURN) {
        piece.clear();
        piece.extend(packed.iter().map(|key| u64::from_le_bytes(*key)));
        install.add(&piece);
        tokio::task::yield_now().await;
    }
    if install.finish().is_err() {
        return Ok(Fetched::Useless(header.behind));
    }
    health.snapshots_read.add(1);
    Ok(Fetched::Installed(header.behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_silence_is_told_once() {
        let (mut recovery, start) = (Recovery::default(), Instant::now());
        let (worker, stranger) = (WorkerId::new("w"), WorkerId::new("s"));
        let at = |ms| start + Duration::from_millis(ms);
        let shard = keys::shard_of(&worker);
        let behind = || vec![(worker.clone(), true), (stranger.clone(), false)];
        assert_eq!(recovery.set(behind(), start), []);
        let mut due = Vec::new();
        for ms in (0..8_000).step_by(50) {
            recovery.set(behind(), at(ms));
            due.extend(recovery.next(shard, at(ms)).map(|_| ms));
        }
        assert_eq!(due, [0, 250, 750, 1_750, 3_750, 5_750, 7_750]);
        assert_eq!(recovery.set(behind(), at(8_001)), std::slice::from_ref(&worker));
        assert_eq!(recovery.set(behind(), at(20_000)), []);
        recovery.hurry(&worker, at(8_100));
        assert_eq!(recovery.next(shard, at(8_100)), Some(worker.clone()));
        assert_eq!(recovery.next(shard, at(8_300)), None);
        recovery.set(vec![(worker.clone(), false)], at(30_000));
        assert_eq!(recovery.set(behind(), at(38_000)), [], "something was heard meanwhile, of another epoch");
        assert_eq!(recovery.set(behind(), at(38_001)), std::slice::from_ref(&worker));
        recovery.done(&worker);
        assert_eq!(recovery.next(shard, at(60_000)), None);
    }
}
