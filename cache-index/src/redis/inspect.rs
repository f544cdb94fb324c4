//! What Redis holds, for people who look: snapshots, and the events behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thalweg_proto::ids::WorkerId;

use super::RedisIndexError;
use super::keys::{self, SHARDS};
use super::link::{ANSWER_WITHIN, Link, RedisConfig, transfer_time};
use super::wire::{EntryId, HEADER_BYTES, Header, decode_batch};
use crate::BlockEvent;
use crate::replica::Position;

/// Entries of a stream in one answer.
const PAGE: usize = 512;

/// A worker as its last snapshot shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerSummary {
    /// Which.
    pub worker: WorkerId,
    /// Up to where the snapshot goes.
    pub at: Position,
    /// Blocks held then.
    pub blocks: u64,
    /// Since when, by the clocks of the worker and of this machine.
    pub age: Duration,
}

/// What could be read, and what could not: a key that holds something else hides no other.
#[derive(Debug, Default)]
pub struct Found<T> {
    /// Of all readable keys.
    pub read: T,
    /// Keys that hold what this version cannot read, and why.
    pub unreadable: BTreeMap<String, RedisIndexError>,
}

/// All workers with a snapshot, in no order. Costs Redis 57 bytes a worker.
pub async fn workers(config: &RedisConfig) -> Result<Found<Vec<WorkerSummary>>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let mut found = Found::<Vec<_>>::default();
    for shard in 0..SHARDS {
        for worker in members(&mut link, shard, &mut found.unreadable).await? {
            let key = keys::snapshot(&worker);
            let head = head_of(&mut link, &key).await;
            let Some(header) = noted(head, key, &mut found.unreadable)?.flatten() else { continue };
            let age = Duration::from_millis(now_ms.saturating_sub(header.written_ms));
            found.read.push(WorkerSummary { worker, at: header.at, blocks: header.count, age });
        }
    }
    Ok(found)
}

/// How many of `blocks` each worker holds now, and which: events behind the snapshots included. Reads all snapshots.
pub async fn holders(
    config: &RedisConfig,
    blocks: &BTreeSet<u64>,
) -> Result<Found<BTreeMap<WorkerId, BTreeSet<u64>>>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    let mut found = Found::<BTreeMap<_, _>>::default();
    for shard in 0..SHARDS {
        for worker in members(&mut link, shard, &mut found.unreadable).await? {
            let held = held_by(&mut link, &worker, |key| blocks.contains(&key)).await;
            let held = held.or_else(|error| match error {
                RedisIndexError::Key { key, source } => {
                    noted::<()>(Err(*source), key, &mut found.unreadable).map(|_| None)
                }
                error => Err(error),
            })?;
            found.read.extend(held.filter(|held| !held.is_empty()).map(|held| (worker, held)));
        }
    }
    Ok(found)
}

/// The blocks that one worker holds now; None if Redis knows no such worker.
pub async fn blocks_of(
    config: &RedisConfig,
    worker: &WorkerId,
) -> Result<Option<BTreeSet<u64>>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    held_by(&mut link, worker, |_| true).await
}

/// The workers of a shard; names that cannot be read are noted.
async fn members(
    link: &mut Link,
    shard: u16,
    unreadable: &mut BTreeMap<String, RedisIndexError>,
) -> Result<Vec<WorkerId>, RedisIndexError> {
    let key = keys::workers(shard);
    let names: Result<Vec<Vec<u8>>, _> =
        link.run(redis::cmd("ZRANGE").arg(&key).arg(0).arg(-1), ANSWER_WITHIN).await;
    let names = noted(names, key.clone(), unreadable)?.unwrap_or_default();
    let all = names.len();
    let names: Vec<_> = names
        .into_iter()
        .filter_map(|name| String::from_utf8(name).ok().filter(|name| !name.is_empty()))
        .map(WorkerId::new)
        .collect();
    if names.len() < all {
        unreadable.insert(key, RedisIndexError::Undecodable("a worker's name"));
    }
    Ok(names)
}

/// The header of a snapshot; None where there is none.
async fn head_of(link: &mut Link, key: &str) -> Result<Option<Header>, RedisIndexError> {
    let mut command = redis::cmd("GETRANGE");
    command.arg(key).arg(0).arg(HEADER_BYTES - 1);
    let head: Vec<u8> = link.run(&command, ANSWER_WITHIN).await?;
    if head.is_empty() { Ok(None) } else { Header::decode(&head).map(|(header, _)| Some(header)) }
}

/// Notes what is wrong with one key; what is wrong with Redis ends the look.
fn noted<T>(
    result: Result<T, RedisIndexError>,
    key: String,
    unreadable: &mut BTreeMap<String, RedisIndexError>,
) -> Result<Option<T>, RedisIndexError> {
    match result {
        Err(error) if error.is_of_one_key() => {
            unreadable.insert(key, error);
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Those of a worker's blocks that are wanted. An error about a key names it.
async fn held_by(
    link: &mut Link,
    worker: &WorkerId,
    wanted: impl Fn(u64) -> bool,
) -> Result<Option<BTreeSet<u64>>, RedisIndexError> {
    let key = keys::snapshot(worker);
    let (header, mut held) = match snapshot(link, &key, &wanted).await {
        Ok(Some(found)) => found,
        Ok(None) => return Ok(None),
        Err(error) => return Err(error.of_key(key)),
    };
    let replayed = replay(link, worker, header.at, header.behind, |event| match event {
        BlockEvent::Stored(keys) => held.extend(keys.into_iter().filter(|key| wanted(*key))),
        BlockEvent::Removed(keys) => held.retain(|key| !keys.contains(key)),
        BlockEvent::Cleared => held.clear(),
    });
    replayed.await.map_err(|error| error.of_key(keys::stream(keys::shard_of(worker))))?;
    Ok(Some(held))
}

/// A whole snapshot, of its keys those that are wanted.
async fn snapshot(
    link: &mut Link,
    key: &str,
    wanted: impl Fn(u64) -> bool,
) -> Result<Option<(Header, BTreeSet<u64>)>, RedisIndexError> {
    let length: usize = link.run(redis::cmd("STRLEN").arg(key), ANSWER_WITHIN).await?;
    let bytes: Vec<u8> = link.run(redis::cmd("GET").arg(key), ANSWER_WITHIN + transfer_time(length)).await?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let (header, rest) = Header::decode(&bytes)?;
    let held =
        header.keys(rest)?.iter().map(|key| u64::from_le_bytes(*key)).filter(|key| wanted(*key)).collect();
    Ok(Some((header, held)))
}

/// Tells the events of a worker that a snapshot does not include.
async fn replay(
    link: &mut Link,
    worker: &WorkerId,
    at: Position,
    behind: EntryId,
    mut tell: impl FnMut(BlockEvent),
) -> Result<(), RedisIndexError> {
    let stream = keys::stream(keys::shard_of(worker));
    let mut next = behind;
    loop {
        let mut command = redis::cmd("XRANGE");
        command.arg(&stream).arg(next.to_string()).arg("+").arg("COUNT").arg(PAGE);
        let entries: Vec<(String, Vec<Vec<u8>>)> = link.run(&command, 2 * ANSWER_WITHIN).await?;
        for (_, fields) in &entries {
            let Ok((generation, batch)) = decode_batch(fields.get(1).map_or(&[], Vec::as_slice)) else {
                continue;
            };
            let point = Position { epoch: batch.epoch, generation, seq: batch.seq };
            if batch.worker == *worker && batch.epoch == at.epoch && point > at {
                batch.events.into_iter().for_each(&mut tell);
            }
        }
        match entries.last() {
            Some((id, _)) if entries.len() == PAGE => {
                let last: EntryId = id.parse()?;
                next = EntryId { number: last.number + 1, ..last };
            }
            _ => return Ok(()),
        }
    }
}
