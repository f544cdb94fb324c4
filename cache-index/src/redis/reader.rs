//! From Redis to the replica: snapshots first, then the streams for good.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thalweg_proto::ids::WorkerId;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::RedisIndexError;
use super::health::{Health, READERS};
use super::keys::{self, SHARDS};
use super::link::{ANSWER_WITHIN, Link, RedisConfig};
use super::publisher::SNAPSHOT_TTL;
use super::recovery::{Fetched, Recovery, fetch};
use super::retry::Backoff;
use super::url::Kind;
use super::wire::{EntryId, decode_batch, event_keys};
use crate::replica::{Applied, Replica};

/// Entries of a stream in one answer: with 2,048 keys an entry 2 MiB a stream, with usual ones 50 KB.
const ENTRIES_PER_READ: usize = 128;
/// Longest wait for one answer: 32 MiB over a slow network. Reached by doubling, so that a frozen server is noticed early.
const READ_WITHIN_MAX: Duration = Duration::from_millis(6_000);
/// How long a read waits at the server for news.
const BLOCK: Duration = Duration::from_millis(250);
/// Wait for an answer at first.
const READ_WITHIN: Duration = ANSWER_WITHIN.saturating_add(BLOCK);
/// Time between reads of a cluster, whose streams lie on several nodes, so that none can wait for all.
const POLL: Duration = Duration::from_millis(50);
/// Time between looks for workers that are behind, and at the server's role.
const RECHECK: Duration = Duration::from_millis(250);
/// Time between looks for workers that were left over.
const STRANGERS_EVERY: Duration = Duration::from_secs(60);
/// Entries taken in before others on the thread have their turn.
const ENTRIES_PER_TURN: usize = 64;

/// Starts the readers, each for its part of the shards over a connection of its own.
pub(super) fn start(
    runtime: &Handle,
    config: &Arc<RedisConfig>,
    replica: &Arc<Replica>,
    health: &Arc<Health>,
) {
    let bootstrapping = Arc::new(AtomicUsize::new(READERS));
    for number in 0..READERS {
        let shards = (0..SHARDS).filter(|shard| usize::from(*shard) % READERS == number);
        let reader = Reader {
            number,
            config: Arc::clone(config),
            replica: Arc::downgrade(replica),
            health: Arc::clone(health),
            shards: shards.map(Shard::new).collect(),
            recovery: Recovery::default(),
            bootstrapping: Some(Arc::clone(&bootstrapping)),
            strangers_at: Instant::now() + STRANGERS_EVERY,
            read_within: READ_WITHIN,
            lacks_snapshot: false,
        };
        runtime.spawn(reader.run());
    }
}

struct Reader {
    number: usize,
    config: Arc<RedisConfig>,
    /// Not held between two reads, so that the readers end when nobody else needs it.
    replica: Weak<Replica>,
    health: Arc<Health>,
    shards: Vec<Shard>,
    recovery: Recovery,
    /// Readers that have not been through the snapshots yet; None once this one has.
    bootstrapping: Option<Arc<AtomicUsize>>,
    strangers_at: Instant,
    read_within: Duration,
    /// The last snapshot that was asked for could not be had: entries alone are not the whole index.
    lacks_snapshot: bool,
}

struct Shard {
    number: u16,
    stream: String,
    /// The last entry taken in; None before the snapshots were read.
    cursor: Option<EntryId>,
}

/// Streams with new entries: name, then id and fields of each.
type Read = Option<Vec<(String, Vec<(String, Vec<Vec<u8>>)>)>>;

impl Shard {
    fn new(number: u16) -> Self {
        Self { number, stream: keys::stream(number), cursor: None }
    }
}

impl Reader {
    async fn run(mut self) {
        let part = format!("reader {}", self.number);
        let mut backoff = Backoff::default();
        let mut connected_before = false;
        loop {
            let error = match Link::connect(&self.config).await {
                Ok(mut link) => {
                    if std::mem::replace(&mut connected_before, true) {
                        self.health.reconnects.add(1);
                    }
                    match self.follow(&mut link, &part, &mut backoff).await {
                        Err(error) => error,
                        Ok(()) => return,
                    }
                }
                Err(error) => error,
            };
            if matches!(error, RedisIndexError::Timeout { .. }) {
                self.read_within = (2 * self.read_within).min(READ_WITHIN_MAX);
            }
            self.health.fails(&part, &error, Instant::now());
            backoff.wait().await;
        }
    }

    /// Goes on until something fails, or until nobody needs the replica any more.
    async fn follow(
        &mut self,
        link: &mut Link,
        part: &str,
        backoff: &mut Backoff,
    ) -> Result<(), RedisIndexError> {
        let Some(replica) = self.replica.upgrade() else { return Ok(()) };
        self.join(link, &replica).await?;
        if let Some(left) = self.bootstrapping.take()
            && left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            self.health.bootstrapped.store(true, Ordering::Relaxed);
            let stats = replica.stats();
            tracing::info!(workers = stats.workers, blocks = stats.blocks, "cache index read");
        }
        drop(replica);
        let mut recheck_at = Instant::now();
        self.recovery.hurry_all(recheck_at);
        loop {
            // All readers hold the replica in turn otherwise, and none would ever see that nobody else does.
            self.read(link).await?;
            let Some(replica) = self.replica.upgrade() else { return Ok(()) };
            self.read_within = READ_WITHIN;
            if Instant::now() >= recheck_at {
                recheck_at = Instant::now() + RECHECK;
                self.recheck(link, &replica).await?;
            }
            self.recover(link, &replica).await?;
            if !self.lacks_snapshot || self.recovery.is_empty() {
                self.health.works(part, Instant::now());
                backoff.reset();
            }
        }
    }

    /// Finds the place in each stream from which to read on.
    async fn join(&mut self, link: &mut Link, replica: &Replica) -> Result<(), RedisIndexError> {
        for i in 0..self.shards.len() {
            let Some(cursor) = self.shards[i].cursor else {
                self.shards[i].cursor = Some(self.bootstrap(link, self.shards[i].number, replica).await?);
                continue;
            };
            let mut command = redis::cmd("XREVRANGE");
            command.arg(&self.shards[i].stream).arg("+").arg("-").arg("COUNT").arg(1);
            let last: Vec<(String, Vec<Vec<u8>>)> = link.run(&command, ANSWER_WITHIN).await?;
            let last = last.first().map_or(Ok(EntryId::default()), |(id, _)| id.parse())?;
            if last < cursor {
                // The stream was emptied, or a replica took over that did not have its end: what is read twice is
                // known by its number.
                self.shards[i].cursor = Some(EntryId::default());
            }
        }
        Ok(())
    }

    /// Takes in all snapshots of a shard; returns the entry behind which their events begin.
    async fn bootstrap(
        &mut self,
        link: &mut Link,
        shard: u16,
        replica: &Replica,
    ) -> Result<EntryId, RedisIndexError> {
        let mut command = redis::cmd("ZRANGE");
        command.arg(keys::workers(shard)).arg(0).arg(-1);
        let names: Vec<String> = link.run(&command, ANSWER_WITHIN).await?;
        let mut begin: Option<EntryId> = None;
        for name in names.into_iter().filter(|name| !name.is_empty()) {
            let fetched = fetch(link, &WorkerId::new(name), replica, &self.health).await?;
            if let Fetched::Installed(behind) | Fetched::Useless(behind) = fetched {
                begin = Some(begin.map_or(behind, |begin| begin.min(behind)));
            }
        }
        Ok(begin.unwrap_or_default())
    }

    /// Waits for news of all shards and takes them in.
    async fn read(&mut self, link: &mut Link) -> Result<(), RedisIndexError> {
        let within = self.read_within;
        let mut entries = 0;
        if link.is_one_node() {
            let command = read_command(&self.shards, (!self.recovery.is_busy()).then_some(BLOCK));
            let read: Read = link.run(&command, within).await?;
            entries += self.take_in(read).await;
        } else {
            for i in 0..self.shards.len() {
                let command = read_command(&self.shards[i..=i], None);
                let read: Read = link.run(&command, within).await?;
                entries += self.take_in(read).await;
            }
            if entries == 0 && !self.recovery.is_busy() {
                tokio::time::sleep(POLL).await;
            }
        }
        if entries == 0 {
            self.health.lag_ms[self.number].store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns how many entries there were.
    async fn take_in(&mut self, read: Read) -> usize {
        let Some(replica) = self.replica.upgrade() else { return 0 };
        let mut count = 0;
        for (stream, entries) in read.into_iter().flatten() {
            let Some(i) = self.shards.iter().position(|shard| shard.stream == stream) else { continue };
            for (id, fields) in entries {
                let Ok(id) = id.parse() else { continue };
                self.shards[i].cursor = Some(id);
                self.apply(id, fields.get(1).map_or(&[], Vec::as_slice), &replica);
                count += 1;
                if count % ENTRIES_PER_TURN == 0 {
                    tokio::task::yield_now().await;
                }
            }
        }
        count
    }

    fn apply(&mut self, id: EntryId, bytes: &[u8], replica: &Replica) {
        let Ok((generation, batch)) = decode_batch(bytes) else {
            self.health.undecodable.add(1);
            return;
        };
        match replica.follow(generation, &batch, Instant::now()) {
            Applied::Stale | Applied::Full => return,
            Applied::InOrder => {}
            Applied::Gap { missing } => {
                tracing::debug!(worker = %batch.worker, missing, "batches are missing, waiting for a snapshot");
                self.health.gaps.add(1);
                self.recovery.hurry(&batch.worker, Instant::now());
            }
        }
        let events = batch.events.iter().map(|event| event_keys(event).len()).sum::<usize>();
        self.health.events_applied.add(events as u64);
        let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        self.health.lag_ms[self.number].store(now_ms.saturating_sub(id.ms), Ordering::Relaxed);
    }

    /// Looks for what goes unnoticed otherwise.
    async fn recheck(&mut self, link: &mut Link, replica: &Replica) -> Result<(), RedisIndexError> {
        let mine = |worker: &WorkerId| usize::from(keys::shard_of(worker)) % READERS == self.number;
        let behind = replica.behind().into_iter().filter(|(worker, _)| mine(worker)).collect();
        for worker in self.recovery.set(behind, Instant::now()) {
            tracing::warn!(
                %worker,
                "nothing was heard of a worker's cache: does it run with the same --index as this router?"
            );
        }
        if self.number == 0 && Instant::now() >= self.strangers_at {
            self.strangers_at = Instant::now() + STRANGERS_EVERY;
            if let Some(cutoff) = Instant::now().checked_sub(SNAPSHOT_TTL) {
                replica.forget_strangers(cutoff);
            }
        }
        if matches!(self.config.url.kind, Kind::Sentinel { .. }) {
            let role: Vec<redis::Value> = link.run(&redis::cmd("ROLE"), ANSWER_WITHIN).await?;
            let name = role.into_iter().next().and_then(|name| redis::from_redis_value::<String>(name).ok());
            if name.as_deref() != Some("master") {
                let server = self.config.url.to_string();
                let detail = "the server is no master any more".to_owned();
                return Err(RedisIndexError::Refused { server, detail });
            }
        }
        Ok(())
    }

    /// Reads the snapshot of one worker per shard that is behind; its events are then read again from there.
    async fn recover(&mut self, link: &mut Link, replica: &Replica) -> Result<(), RedisIndexError> {
        for i in 0..self.shards.len() {
            let Some(worker) = self.recovery.next(self.shards[i].number, Instant::now()) else { continue };
            self.lacks_snapshot = true;
            let fetched = fetch(link, &worker, replica, &self.health).await?;
            self.lacks_snapshot = false;
            if let Fetched::Installed(behind) = fetched {
                self.recovery.done(&worker);
                self.shards[i].cursor = self.shards[i].cursor.map(|cursor| cursor.min(behind));
            }
        }
        Ok(())
    }
}

fn read_command(shards: &[Shard], block: Option<Duration>) -> redis::Cmd {
    let mut command = redis::cmd("XREAD");
    command.arg("COUNT").arg(ENTRIES_PER_READ);
    if let Some(block) = block {
        command.arg("BLOCK").arg(block.as_millis() as u64);
    }
    command.arg("STREAMS");
    for shard in shards {
        command.arg(&shard.stream);
    }
    for shard in shards {
        command.arg(shard.cursor.unwrap_or_default().to_string());
    }
    command
}
