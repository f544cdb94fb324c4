//! `thalweg index`: looks into the cache index in Redis.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Context, ensure};
use serde_json::json;
use thalweg_cache_index::redis::inspect::{self, Found, WorkerSummary};
use thalweg_cache_index::{RedisConfig, RedisIndexError};
use thalweg_proto::ids::WorkerId;
use thalweg_proto::value;

use crate::options::{BadOption, IndexOptions};

/// Flags of `thalweg index`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Which workers hold which of these blocks, or how many blocks one worker holds
    WhoHas(WhoHas),
    /// Workers by the blocks they held at their last snapshot
    Top(Top),
}

#[derive(clap::Args)]
struct WhoHas {
    #[command(flatten)]
    index: IndexOptions,

    /// Keys of blocks: 16 hexadecimal digits, the first 8 bytes of a block's hash as a little-endian number. No log tells them:
    /// they come of hashing a prompt's tokens as proto/src/block_hash.rs does. To see whether a prompt was found, look at
    /// cached_tokens of its answer; to see how much a worker holds, use --worker
    #[arg(value_name = "BLOCK", value_parser = block)]
    blocks: Vec<u64>,

    /// Count the blocks of this worker instead
    #[arg(long, value_name = "ID", conflicts_with = "blocks", value_parser = value::name)]
    worker: Option<String>,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Top {
    #[command(flatten)]
    index: IndexOptions,

    /// Lines at most
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = value::whole(1..=1_000_000usize))]
    limit: usize,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    let (text, unreadable) = match options.what {
        What::WhoHas(options) => who_has(options).await?,
        What::Top(options) => top(options).await?,
    };
    std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write the answer")?;
    for (key, error) in &unreadable {
        tracing::warn!(key, %error, "a key of the index cannot be read");
    }
    ensure!(
        unreadable.is_empty(),
        "{} keys of the index could not be read: the answer lacks them",
        unreadable.len()
    );
    Ok(())
}

/// What is said on stdout, and what it lacks.
type Answer = (String, BTreeMap<String, RedisIndexError>);

async fn who_has(options: WhoHas) -> anyhow::Result<Answer> {
    let config = redis(&options.index)?;
    if let Some(worker) = &options.worker {
        let held = inspect::blocks_of(&config, &WorkerId::new(worker.as_str())).await?;
        let held = held.with_context(|| format!("the index knows no worker {worker:?}"))?.len();
        let text = match options.json {
            true => format!("{}\n", json!({ "worker": worker, "blocks": held })),
            false => format!("{worker} holds {held} blocks\n"),
        };
        return Ok((text, BTreeMap::new()));
    }
    if options.blocks.is_empty() {
        return Err(BadOption::because("which blocks? Name some, or a --worker"));
    }
    let asked: BTreeSet<u64> = options.blocks.into_iter().collect();
    let Found { read: holders, unreadable } = inspect::holders(&config, &asked).await?;
    if options.json {
        let lines = holders.iter().map(|(worker, held)| {
            let blocks: Vec<String> = held.iter().map(|key| format!("{key:016x}")).collect();
            json!({ "worker": worker.as_str(), "blocks": blocks })
        });
        return Ok((format!("{}\n", serde_json::Value::from_iter(lines)), unreadable));
    }
    let mut text = String::new();
    for (worker, held) in &holders {
        let missing: Vec<String> = asked.difference(held).map(|key| format!("{key:016x}")).collect();
        let but = if missing.is_empty() { String::new() } else { format!(", not {}", missing.join(" ")) };
        writeln!(text, "{worker} holds {} of {}{but}", held.len(), asked.len())?;
    }
    if holders.is_empty() {
        writeln!(text, "no worker holds any of them")?;
    }
    Ok((text, unreadable))
}

async fn top(options: Top) -> anyhow::Result<Answer> {
    let Found { read: mut workers, unreadable } = inspect::workers(&redis(&options.index)?).await?;
    workers.sort_by(|a, b| b.blocks.cmp(&a.blocks).then_with(|| a.worker.cmp(&b.worker)));
    let all = workers.len();
    workers.truncate(options.limit);
    if options.json {
        let lines = workers.iter().map(as_json);
        return Ok((format!("{}\n", serde_json::Value::from_iter(lines)), unreadable));
    }
    let mut text = format!(
        "{:<32} {:>12} {:>20} {:>6} {:>12} {:>10}\n",
        "WORKER", "BLOCKS", "EPOCH", "GEN", "SEQ", "AGE"
    );
    for WorkerSummary { worker, at, blocks, age } in &workers {
        let (epoch, generation, seq) = (at.epoch.0, at.generation, at.seq);
        let age = format!("{:.1} s", age.as_secs_f64());
        let worker = worker.as_str();
        writeln!(text, "{worker:<32} {blocks:>12} {epoch:>20} {generation:>6} {seq:>12} {age:>10}")?;
    }
    if all > workers.len() {
        writeln!(text, "{} more", all - workers.len())?;
    }
    Ok((text, unreadable))
}

fn as_json(summary: &WorkerSummary) -> serde_json::Value {
    json!({
        "worker": summary.worker.as_str(),
        "blocks": summary.blocks,
        "epoch": summary.at.epoch.0,
        "generation": summary.at.generation,
        "seq": summary.at.seq,
        "snapshot_age_seconds": summary.age.as_secs_f64(),
    })
}

fn redis(options: &IndexOptions) -> anyhow::Result<RedisConfig> {
    let in_memory =
        || BadOption::because("--index redis://..: an index in memory can only be seen by its own process");
    options.redis()?.ok_or_else(in_memory)
}

fn block(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let hexadecimal = (1..=16).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    let key = u64::from_str_radix(digits, 16).ok().filter(|_| hexadecimal);
    key.ok_or_else(|| "expected 1 to 16 hexadecimal digits".to_owned())
}
