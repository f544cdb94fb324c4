//! `thalweg bench serve`: load on a server, from outside.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use thalweg_loadtest::Report;
use thalweg_loadtest::plan::{ApiKey, Arrivals, Endpoint, Plan, ServerUrl, Slo, Synthetic, Workload};
use thalweg_proto::value;

/// Most of anything that is counted here: what is beyond does not fit in memory.
const COUNT_MAX: usize = 10_000_000;

/// Flags of `thalweg bench serve`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ServeArgs {
    /// The server
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    url: ServerUrl,

    /// Model to ask for; by default the server's first
    #[arg(long, value_name = "NAME", value_parser = value::label)]
    model: Option<String>,

    /// Sent as a bearer token
    #[arg(long, env = "THALWEG_API_KEY", value_name = "KEY")]
    api_key: Option<ApiKey>,

    /// Which way to generate
    #[arg(long, value_enum, default_value_t = EndpointName::Chat)]
    endpoint: EndpointName,

    /// Conversations in all; each is one request unless --turns says otherwise
    #[arg(long, value_name = "N", default_value_t = 100)]
    #[arg(value_parser = value::whole(1..=COUNT_MAX))]
    num_prompts: usize,

    /// Open loop: conversations that begin each second, by a Poisson process
    #[arg(long, value_name = "PER_SECOND", conflicts_with = "concurrency")]
    #[arg(value_parser = value::number(1e-6..=1e6))]
    request_rate: Option<f64>,

    /// Closed loop: conversations at once
    #[arg(long, value_name = "N", alias = "max-concurrency", default_value_t = 8)]
    #[arg(value_parser = value::whole(1..=COUNT_MAX))]
    concurrency: usize,

    /// Words of each prompt, about as many tokens
    #[arg(long, value_name = "WORDS", default_value_t = 256)]
    #[arg(value_parser = value::whole(1..=COUNT_MAX))]
    prompt: usize,

    /// Words that prompts have in common at their beginning; 0 is none
    #[arg(long, value_name = "WORDS", default_value_t = 0)]
    #[arg(value_parser = value::whole(0..=COUNT_MAX))]
    shared_prefix: usize,

    /// How many different beginnings there are
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = value::whole(1..=COUNT_MAX))]
    prefixes: usize,

    /// User turns of each conversation
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = value::whole(1..=1_000usize))]
    turns: usize,

    /// Prompts from lines of {"prompt": ..} or {"messages": [..]} instead
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "shared_prefix", "prefixes", "turns"])]
    #[arg(value_parser = value::file)]
    dataset: Option<PathBuf>,

    /// Tokens of each answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    #[arg(value_parser = value::whole(1..=COUNT_MAX as u32))]
    output: u32,

    /// Let the model end its answers earlier
    #[arg(long)]
    respect_eos: bool,

    /// Sampling temperature; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.0)]
    #[arg(value_parser = value::number(0.0..=100.0f32))]
    temperature: f32,

    /// A good answer's first token comes within this
    #[arg(long, value_name = "MS")]
    #[arg(value_parser = value::number(0.001..=1e9))]
    slo_ttft_ms: Option<f64>,

    /// A good answer's further tokens come within this each
    #[arg(long, value_name = "MS")]
    #[arg(value_parser = value::number(0.001..=1e9))]
    slo_tpot_ms: Option<f64>,

    /// A request that takes longer has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    #[arg(value_parser = value::whole(1..=31_536_000u64))]
    timeout: u64,

    /// Of arrivals and prompts
    #[arg(long, default_value_t = 0)]
    #[arg(value_parser = value::whole(0..=u64::MAX))]
    seed: u64,

    /// Write the figures as JSON to a file, or instead of the table with - (and without a value)
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    #[arg(value_parser = output_file)]
    json: Option<PathBuf>,

    /// Show no progress bar
    #[arg(long)]
    no_progress: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum EndpointName {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
}

pub(crate) async fn run(args: ServeArgs) -> anyhow::Result<()> {
    let json = args.json.clone();
    let report = thalweg_loadtest::run(args.into_plan()).await?;
    match json.as_deref() {
        Some(path) if path == Path::new("-") => print(&to_json(&report)?),
        Some(path) => {
            std::fs::write(path, to_json(&report)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
            print(&report.to_string())
        }
        None => print(&report.to_string()),
    }
}

fn to_json(report: &Report) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write the figures")
}

/// A file that can be written once the test is over, or - for stdout.
fn output_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match () {
        () if text == "-" => Ok(path),
        () if path.file_name().is_none() || path.is_dir() => Err(format!("expected a file, not {text:?}")),
        () if !folder.is_dir() => Err(format!("there is no folder {}", folder.display())),
        () => Ok(path),
    }
}

impl ServeArgs {
    fn into_plan(self) -> Plan {
        let synthetic = Synthetic {
            words: self.prompt,
            shared_words: self.shared_prefix,
            groups: self.prefixes,
            turns: self.turns,
        };
        Plan {
            url: self.url,
            model: self.model,
            api_key: self.api_key,
            endpoint: match self.endpoint {
                EndpointName::Chat => Endpoint::Chat,
                EndpointName::Completions => Endpoint::Completions,
            },
            arrivals: match self.request_rate {
                Some(per_second) => Arrivals::Poisson { per_second },
                None => Arrivals::Closed { concurrency: self.concurrency },
            },
            workload: self.dataset.map_or(Workload::Synthetic(synthetic), Workload::Dataset),
            conversations: self.num_prompts,
            max_tokens: self.output,
            ignore_eos: !self.respect_eos,
            temperature: self.temperature,
            slo: Slo { ttft_ms: self.slo_ttft_ms, tpot_ms: self.slo_tpot_ms },
            timeout: Duration::from_secs(self.timeout),
            seed: self.seed,
            progress: !self.no_progress,
        }
    }
}
