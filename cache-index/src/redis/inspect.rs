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

/// All workers with a snapshot, in no order. Costs Redis 57 bytes a worker.
pub async fn workers(config: &RedisConfig) -> Result<Vec<WorkerSummary>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
    let mut summaries = Vec::new();
    for shard in 0..SHARDS {
        for worker in members(&mut link, shard).await? {
            let mut command = redis::cmd("GETRANGE");
            command.arg(keys::snapshot(&worker)).arg(0).arg(HEADER_BYTES - 1);
            let head: Vec<u8> = link.run(&command, ANSWER_WITHIN).await?;
            if head.is_empty() {
                continue;
            }
            let (header, _) = Header::decode(&head)?;
            let age = Duration::from_millis(now_ms.saturating_sub(header.written_ms));
            summaries.push(WorkerSummary { worker, at: header.at, blocks: header.count, age });
        }
    }
    Ok(summaries)
}

/// How many of `blocks` each worker holds now, and which: events behind the snapshots included. Reads all snapshots.
pub async fn holders(
    config: &RedisConfig,
    blocks: &BTreeSet<u64>,
) -> Result<BTreeMap<WorkerId, BTreeSet<u64>>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    let mut holders = BTreeMap::new();
    for shard in 0..SHARDS {
        for worker in members(&mut link, shard).await? {
            let wanted = |key: u64| blocks.contains(&key);
            if let Some(held) = held_by(&mut link, &worker, wanted).await? {
                holders.insert(worker, held);
            }
        }
    }
    holders.retain(|_, held| !held.is_empty());
    Ok(holders)
}

/// The blocks that one worker holds now; None if Redis knows no such worker.
pub async fn blocks_of(
    config: &RedisConfig,
    worker: &WorkerId,
) -> Result<Option<BTreeSet<u64>>, RedisIndexError> {
    let mut link = Link::connect(config).await?;
    held_by(&mut link, worker, |_| true).await
}

async fn members(link: &mut Link, shard: u16) -> Result<Vec<WorkerId>, RedisIndexError> {
    let mut command = redis::cmd("ZRANGE");
    command.arg(keys::workers(shard)).arg(0).arg(-1);
    let names: Vec<String> = link.run(&command, ANSWER_WITHIN).await?;
    Ok(names.into_iter().filter(|name| !name.is_empty()).map(WorkerId::new).collect())
}

/// Those of a worker's blocks that are wanted.
async fn held_by(
    link: &mut Link,
    worker: &WorkerId,
    wanted: impl Fn(u64) -> bool,
) -> Result<Option<BTreeSet<u64>>, RedisIndexError> {
    let key = keys::snapshot(worker);
    let length: usize = link.run(redis::cmd("STRLEN").arg(&key), ANSWER_WITHIN).await?;
    let bytes: Vec<u8> = link.run(redis::cmd("GET").arg(&key), ANSWER_WITHIN + transfer_time(length)).await?;
    if bytes.is_empty() {
        return Ok(None);
    }
    let (header, rest) = Header::decode(&bytes)?;
    let keys_held = header.keys(rest)?.iter().map(|key| u64::from_le_bytes(*key));
    let mut held: BTreeSet<u64> = keys_held.filter(|key| wanted(*key)).collect();
    replay(link, worker, header.at, header.behind, |event| match event {
        BlockEvent::Stored(keys) => held.extend(keys.into_iter().filter(|key| wanted(*key))),
        BlockEvent::Removed(keys) => held.retain(|key| !keys.contains(key)),
        BlockEvent::Cleared => held.clear(),
    })
    .await?;
    Ok(Some(held))
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
