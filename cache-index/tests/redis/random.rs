//! Events dropped, doubled and swapped on their way, against what the workers truly hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use thalweg_cache_index::CacheIndex;
use thalweg_cache_index::redis::Limits;
use thalweg_harness::Random;
use thalweg_harness::redis::Redis;

use crate::support::{PATIENCE, TestWorker, eventually, long, open, open_with};

const SHARDS: usize = 64;
/// Where in a snapshot the entry stands behind which its events begin, by the schema.
const BEHIND: std::ops::Range<usize> = 25..41;

/// Copies one Redis into another, badly.
struct Mangler {
    from: MultiplexedConnection,
    to: MultiplexedConnection,
    cursors: Vec<String>,
    held_back: Vec<(usize, Vec<u8>)>,
    random: Random,
    calm: Arc<AtomicBool>,
    mangled: [u64; 3],
}

#[tokio::test]
async fn dropped_doubled_and_swapped_events_leave_no_trace_in_the_end() {
    let (source, target) = (Redis::start(), Redis::start());
    let limits = Limits { snapshot_interval: Duration::from_millis(400), ..Limits::default() };
    let workers = open_with(&source.url(), limits);
    let routers = [open(&target.url()), open(&target.url())];
    let calm = Arc::new(AtomicBool::new(false));
    let mut mangler = Mangler {
        from: connect(&source).await,
        to: connect(&target).await,
        cursors: vec!["0-0".to_owned(); SHARDS],
        held_back: Vec::new(),
        random: Random::from_env(11),
        calm: Arc::clone(&calm),
        mangled: [0; 3],
    };
    let mangling = tokio::spawn(async move {
        while mangler.step().await {}
        mangler
    });
    let mut random = Random::from_env(7);
    let mut all: Vec<_> = (0..4).map(|i| TestWorker::new(&workers, &format!("w{i}"), 1)).collect();
    routers.iter().for_each(|router| drop(router.replica()));
    let mut ticks = tokio::time::interval(Duration::from_millis(2));
    for step in 0..long(600, 20_000) {
        let i = random.below(all.len());
        let from = random.below(500) as u64;
        let keys = from..from + random.below(40) as u64;
        match random.below(50) {
            0 => all[i].publish(vec![thalweg_cache_index::BlockEvent::Cleared]),
            1 => all[i] = TestWorker::new(&workers, &format!("w{i}"), 2 + step),
            2..24 => all[i].remove(keys),
            _ => all[i].store(keys),
        }
        ticks.tick().await;
    }
    calm.store(true, Ordering::Relaxed);
    for router in &routers {
        for worker in &all {
            eventually("the truth is known", PATIENCE, || worker.is_known_to(router)).await;
        }
        let stats = router.stats();
        eprintln!("{stats:?}");
        assert!(stats.gaps > 0 && stats.snapshots_read > 0 && stats.undecodable == 0, "{stats:?}");
    }
    mangling.abort();
    if let Ok(mangler) = mangling.await {
        assert!(mangler.mangled.iter().all(|count| *count > 0), "{:?}", mangler.mangled);
    }
}

impl Mangler {
    /// Passes on what is new; false when the source is gone.
    async fn step(&mut self) -> bool {
        let mut command = redis::cmd("XREAD");
        command.arg("BLOCK").arg(20).arg("STREAMS");
        for shard in 0..SHARDS {
            command.arg(format!("{{tw1:{shard}}}"));
        }
        command.arg(&self.cursors);
        type Read = Option<Vec<(String, Vec<(String, Vec<Vec<u8>>)>)>>;
        let Ok(read) = command.query_async::<Read>(&mut self.from).await else { return false };
        for (stream, entries) in read.into_iter().flatten() {
            let shard: usize = stream.trim_matches(|c: char| !c.is_ascii_digit())[2..].parse().unwrap();
            for (id, fields) in entries {
                self.cursors[shard] = id;
                self.pass(shard, fields[1].clone()).await;
            }
        }
        while !self.held_back.is_empty() && (self.calm.load(Ordering::Relaxed) || self.random.below(3) == 0) {
            let i = self.random.below(self.held_back.len());
            let (shard, bytes) = self.held_back.swap_remove(i);
            self.add(shard, &bytes).await;
        }
        self.copy_snapshots().await;
        true
    }

    async fn pass(&mut self, shard: usize, bytes: Vec<u8>) {
        let fate = if self.calm.load(Ordering::Relaxed) { 9 } else { self.random.below(10) };
        match fate {
            0 => self.mangled[0] += 1,
            1 => {
                self.mangled[1] += 1;
                self.add(shard, &bytes).await;
                self.held_back.push((shard, bytes));
            }
            2 => {
                self.mangled[2] += 1;
                self.held_back.push((shard, bytes));
            }
            _ => self.add(shard, &bytes).await,
        }
    }

    async fn add(&mut self, shard: usize, bytes: &[u8]) {
        let mut command = redis::cmd("XADD");
        command.arg(format!("{{tw1:{shard}}}")).arg("*").arg("b").arg(bytes);
        command.exec_async(&mut self.to).await.unwrap();
    }

    /// A snapshot's place in the stream is another one here: its events may stand anywhere.
    async fn copy_snapshots(&mut self) {
        let found = redis::cmd("KEYS").arg("*:snapshot:*").query_async::<Vec<String>>(&mut self.from).await;
        for key in found.unwrap_or_default() {
            if self.random.below(4) != 0 {
                continue;
            }
            let mut bytes: Vec<u8> = redis::cmd("GET").arg(&key).query_async(&mut self.from).await.unwrap();
            if bytes.is_empty() {
                continue;
            }
            bytes[BEHIND].fill(0);
            let (shard, name) = key.split_once(":snapshot:").unwrap();
            let mut pipeline = redis::pipe();
            pipeline.cmd("SET").arg(&key).arg(bytes);
            pipeline.cmd("ZADD").arg(format!("{shard}:workers")).arg(1).arg(name);
            pipeline.exec_async(&mut self.to).await.unwrap();
        }
    }
}

async fn connect(redis: &Redis) -> MultiplexedConnection {
    redis::Client::open(redis.url()).unwrap().get_multiplexed_async_connection().await.unwrap()
}
