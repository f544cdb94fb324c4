//! From a worker's batches to Redis: what is held is kept here in full, so that whatever Redis loses can be written anew.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rand::RngExt;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::health::Health;
use super::keys;
use super::keyset::{Copied, KeySet};
use super::link::{ANSWER_WITHIN, Link, RedisConfig, transfer_time};
use super::retry::Backoff;
use super::wire::{EntryId, Header, encode_batch, event_keys};
use super::{Limits, RedisIndexError};
use crate::replica::Position;
use crate::{BlockEvent, EventBatch};

/// Keys of one entry of a stream; a larger batch becomes several, so that no entry blocks Redis or a reader for long.
const ENTRY_KEYS_MAX: usize = 2_048;
/// Entries sent before their answers are awaited.
const PIPELINE_ENTRIES: usize = 64;
/// Time between signs of life, which also show whether the snapshot is still there and still joins the stream.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// Snapshots of workers that write none any more are collected; live ones are written again long before.
pub(super) const SNAPSHOT_TTL: Duration = Duration::from_secs(600);
/// The same for the streams of shards without workers.
const STREAM_TTL: Duration = Duration::from_secs(3_600);
/// Entries that a shard's stream keeps, at most.
const STREAM_ENTRIES_MAX: u64 = 8_192;
/// Entries that it keeps at least, however large they are.
const STREAM_ENTRIES_MIN: u64 = 256;
/// Bytes that it keeps, about: 64 shards make 256 MiB.
const STREAM_BYTES: u64 = 4 << 20;
/// Weight of the newest entry in the mean size of entries.
const ENTRY_BYTES_ALPHA: f64 = 0.05;

/// One worker of this process.
pub(super) struct Publisher {
    worker: WorkerId,
    limits: Limits,
    health: Arc<Health>,
    state: Mutex<State>,
    news: Notify,
}

struct State {
    at: Position,
    keys: KeySet,
    /// Encoded batches that wait, oldest first; `Limits::pending_bytes` bounds them.
    pending: VecDeque<Vec<u8>>,
    pending_bytes: usize,
    /// Block events since the last snapshot.
    unsaved: u64,
    /// A snapshot is needed at once.
    snapshot_due: bool,
}

impl Publisher {
    pub(super) fn new(worker: WorkerId, limits: Limits, health: Arc<Health>) -> Self {
        let state = State {
            at: Position { epoch: WorkerEpoch(0), generation: 0, seq: 0 },
            keys: KeySet::default(),
            pending: VecDeque::new(),
            pending_bytes: 0,
            unsaved: 0,
            snapshot_due: true,
        };
        Self { worker, limits, health, state: Mutex::new(state), news: Notify::new() }
    }

    /// Takes a batch in without waiting for anything but its own bookkeeping. Batches of an older epoch are ignored.
    pub(super) fn publish(&self, batch: EventBatch) {
        let mut state = self.state.lock();
        if batch.epoch < state.at.epoch {
            return;
        }
        if batch.epoch > state.at.epoch {
            state.begin(batch.epoch);
        }
        for events in pieces(batch.events) {
            state.note(&events);
            state.at.seq += 1;
            let bytes = encode_batch(&self.worker, state.at, &events);
            state.pending_bytes += bytes.len();
            state.pending.push_back(bytes);
        }
        if state.pending_bytes > self.limits.pending_bytes {
            self.health.batches_dropped.add(state.overflow());
        }
        drop(state);
        self.news.notify_one();
    }

    /// Keeps Redis up to date for as long as it is polled.
    pub(super) async fn run(&self, config: &RedisConfig) {
        let part = format!("publisher of {}", self.worker);
        let mut backoff = Backoff::default();
        let mut connected_before = false;
        loop {
            let error = match Link::connect(config).await {
                Ok(link) => {
                    if std::mem::replace(&mut connected_before, true) {
                        self.health.reconnects.add(1);
                    }
                    let works = || {
                        self.health.works(&part, Instant::now());
                    };
                    Session::new(self, link).run(works, &mut backoff).await
                }
                Err(error) => error,
            };
            self.health.fails(&part, &error, Instant::now());
            backoff.wait().await;
        }
    }
}

impl State {
    fn begin(&mut self, epoch: WorkerEpoch) {
        self.at = Position { epoch, generation: 0, seq: 0 };
        self.keys.clear();
        self.pending.clear();
        self.pending_bytes = 0;
        self.snapshot_due = true;
    }

    fn note(&mut self, events: &[BlockEvent]) {
        for event in events {
            match event {
                BlockEvent::Stored(keys) => keys.iter().for_each(|key| self.keys.insert(*key)),
                BlockEvent::Removed(keys) => keys.iter().for_each(|key| self.keys.remove(*key)),
                BlockEvent::Cleared => self.keys.clear(),
            }
            self.unsaved += event_keys(event).len().max(1) as u64;
        }
    }

    /// Gives up what waits; a new generation begins with a snapshot. Returns how many batches were given up.
    fn overflow(&mut self) -> u64 {
        let dropped = self.pending.len() as u64;
        self.pending.clear();
        self.pending_bytes = 0;
        self.at = Position { generation: self.at.generation + 1, seq: 0, ..self.at };
        self.snapshot_due = true;
        dropped
    }

    fn take_pending(&mut self) -> Vec<Vec<u8>> {
        let count = self.pending.len().min(PIPELINE_ENTRIES);
        let taken: Vec<_> = self.pending.drain(..count).collect();
        self.pending_bytes -= taken.iter().map(Vec::len).sum::<usize>();
        taken
    }

    /// What the snapshot of now says, and the marker behind it: a batch without events, by which readers learn of a
    /// snapshot's position even when nothing else happens.
    fn snapshot(&mut self, worker: &WorkerId) -> (Position, Copied) {
        self.snapshot_due = false;
        self.unsaved = 0;
        let at = self.at;
        self.at.seq += 1;
        let marker = encode_batch(worker, self.at, &[]);
        self.pending_bytes += marker.len();
        self.pending.push_back(marker);
        (at, self.keys.copied())
    }
}

/// What is done over one connection.
struct Session<'a> {
    publisher: &'a Publisher,
    link: Link,
    stream: String,
    shard: u16,
    /// The newest entry of the stream when it was last looked at or written to.
    newest: EntryId,
    /// Where the last snapshot joins the stream.
    joined: EntryId,
    entry_bytes: f64,
}

impl<'a> Session<'a> {
    fn new(publisher: &'a Publisher, link: Link) -> Self {
        let shard = keys::shard_of(&publisher.worker);
        let (newest, joined) = (EntryId::default(), EntryId::default());
        Self { publisher, link, stream: keys::stream(shard), shard, newest, joined, entry_bytes: 0.0 }
    }

    /// Goes on until something fails. The batches that failed are void, for the next session begins with a snapshot.
    async fn run(mut self, works: impl Fn(), backoff: &mut Backoff) -> RedisIndexError {
        match self.keep_up(works, backoff).await {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    async fn keep_up(
        &mut self,
        works: impl Fn(),
        backoff: &mut Backoff,
    ) -> Result<std::convert::Infallible, RedisIndexError> {
        let publisher = self.publisher;
        self.newest = self.last_entry().await?;
        // What every heartbeat will ask for is asked for at once: refused later, the session would seem to work until then.
        self.check_snapshot().await?;
        publisher.state.lock().snapshot_due = true;
        let mut heartbeat = tokio::time::interval(HEARTBEAT);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        heartbeat.tick().await;
        let mut rewrite_at = Instant::now();
        loop {
            let more = self.send_pending().await?;
            let snapshot = publisher.snapshot_is_due(rewrite_at);
            if snapshot {
                self.write_snapshot().await?;
                rewrite_at = Instant::now() + jittered(publisher.limits.snapshot_interval);
            }
            // A snapshot alone proves nothing: its marker is still to be sent, and whoever lets keys be set may refuse entries.
            if more || !snapshot {
                works();
                backoff.reset();
            }
            if more || snapshot {
                continue;
            }
            tokio::select! {
                () = publisher.news.notified() => {}
                () = tokio::time::sleep_until(rewrite_at) => {}
                _ = heartbeat.tick() => self.check_snapshot().await?,
            }
        }
    }

    /// Sends some of what waits; true while there may be more.
    async fn send_pending(&mut self) -> Result<bool, RedisIndexError> {
        let entries = self.publisher.state.lock().take_pending();
        if entries.is_empty() {
            return Ok(false);
        }
        let bytes: usize = entries.iter().map(Vec::len).sum();
        let mean = bytes as f64 / entries.len() as f64;
        let weight = if self.entry_bytes == 0.0 { 1.0 } else { ENTRY_BYTES_ALPHA };
        self.entry_bytes += weight * (mean - self.entry_bytes);
        let keep =
            (STREAM_BYTES / (self.entry_bytes as u64).max(1)).clamp(STREAM_ENTRIES_MIN, STREAM_ENTRIES_MAX);
        let keep = keep.min(self.publisher.limits.stream_entries);
        let mut pipeline = redis::pipe();
        for entry in &entries {
            pipeline
                .cmd("XADD")
                .arg(&self.stream)
                .arg("MAXLEN")
                .arg("~")
                .arg(keep)
                .arg("*")
                .arg("b")
                .arg(entry);
        }
        let sent = self.link.run_all::<Vec<String>>(&pipeline, ANSWER_WITHIN + transfer_time(bytes)).await;
        let ids = sent.inspect_err(|_| self.publisher.give_up(entries.len()))?;
        if let Some(id) = ids.last() {
            self.newest = id.parse()?;
        }
        self.publisher.health.batches_published.add(entries.len() as u64);
        Ok(true)
    }

    async fn write_snapshot(&mut self) -> Result<(), RedisIndexError> {
        let worker = &self.publisher.worker;
        let (at, copied) = self.publisher.state.lock().snapshot(worker);
        let now_ms = unix_ms();
        let header = Header { at, behind: self.newest, written_ms: now_ms, count: copied.len() as u64 };
        let bytes = header.encode(copied.iter());
        drop(copied);
        let within = ANSWER_WITHIN + transfer_time(bytes.len());
        let (members, now_s) = (keys::workers(self.shard), now_ms / 1_000);
        let mut pipeline = redis::pipe();
        pipeline.cmd("SET").arg(keys::snapshot(worker)).arg(&bytes).arg("EX").arg(SNAPSHOT_TTL.as_secs());
        pipeline.cmd("ZADD").arg(&members).arg(now_s).arg(worker.as_str());
        let old = now_s.saturating_sub(2 * SNAPSHOT_TTL.as_secs());
        pipeline.cmd("ZREMRANGEBYSCORE").arg(&members).arg("-inf").arg(old);
        pipeline.cmd("EXPIRE").arg(&members).arg(STREAM_TTL.as_secs());
        pipeline.cmd("EXPIRE").arg(&self.stream).arg(STREAM_TTL.as_secs());
        self.link.run_all::<()>(&pipeline, within).await?;
        self.joined = header.behind;
        self.publisher.health.snapshots_written.add(1);
        Ok(())
    }

    /// Has the snapshot written again if it is gone, or if events behind it were trimmed off the stream.
    async fn check_snapshot(&mut self) -> Result<(), RedisIndexError> {
        let mut pipeline = redis::pipe();
        pipeline.cmd("EXPIRE").arg(keys::snapshot(&self.publisher.worker)).arg(SNAPSHOT_TTL.as_secs());
        pipeline.cmd("XRANGE").arg(&self.stream).arg("-").arg("+").arg("COUNT").arg(1);
        let (there, first): (bool, Entries) = self.link.run_all(&pipeline, ANSWER_WITHIN).await?;
        let first = first.first().map(|(id, _)| id.parse()).transpose()?;
        let mut state = self.publisher.state.lock();
        let trimmed = first.is_some_and(|first: EntryId| first > self.joined) && state.unsaved > 0;
        if !there || trimmed {
            state.snapshot_due = true;
        }
        Ok(())
    }

    async fn last_entry(&mut self) -> Result<EntryId, RedisIndexError> {
        let mut command = redis::cmd("XREVRANGE");
        command.arg(&self.stream).arg("+").arg("-").arg("COUNT").arg(1);
        let last: Entries = self.link.run(&command, ANSWER_WITHIN).await?;
        last.first().map_or(Ok(EntryId::default()), |(id, _)| id.parse())
    }
}

/// Entries of a stream as they come: id, then names and values.
type Entries = Vec<(String, Vec<Vec<u8>>)>;

impl Publisher {
    fn snapshot_is_due(&self, rewrite_at: Instant) -> bool {
        let state = self.state.lock();
        let anything = state.at.seq > 0 || state.at.generation > 0;
        let due = state.snapshot_due || state.unsaved >= self.limits.snapshot_events;
        anything && (due || Instant::now() >= rewrite_at)
    }

    /// Batches on their way when the connection broke: whether they arrived is unknown, and the next snapshot has them.
    fn give_up(&self, batches: usize) {
        self.health.batches_dropped.add(batches as u64);
        self.state.lock().snapshot_due = true;
    }
}

/// A batch in pieces that fit into an entry. A batch without events stays one.
fn pieces(events: Vec<BlockEvent>) -> Vec<Vec<BlockEvent>> {
    let keys: usize = events.iter().map(|event| event_keys(event).len()).sum();
    if keys <= ENTRY_KEYS_MAX {
        return vec![events];
    }
    let cut = |keys: Vec<u64>, event: fn(Vec<u64>) -> BlockEvent| -> Vec<Vec<BlockEvent>> {
        keys.chunks(ENTRY_KEYS_MAX).map(|piece| vec![event(piece.to_vec())]).collect()
    };
    let of = |event| match event {
        BlockEvent::Stored(keys) => cut(keys, BlockEvent::Stored),
        BlockEvent::Removed(keys) => cut(keys, BlockEvent::Removed),
        BlockEvent::Cleared => vec![vec![BlockEvent::Cleared]],
    };
    events.into_iter().flat_map(of).collect()
}

/// Up to a tenth earlier or later, so that workers started together do not write together.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::rng().random_range(0.9..1.1))
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
