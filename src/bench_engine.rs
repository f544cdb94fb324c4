//! `thalweg bench engine`: one engine with nothing around it, closed loop: a batch of prompts, then its decode.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, ensure};
use futures::future::try_join_all;
use thalweg_model::grammar::{Grammar, GrammarSource};
use thalweg_proto::block_hash::HashRoot;
use thalweg_proto::ids::AttemptId;
use thalweg_proto::value;
use thalweg_worker::backend::BackendError;
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::engine::{ChoiceState, Engine, EngineConfig, EngineHandle, EngineRequest, EngineStream};
use thalweg_worker::plan::{AdapterSlot, StepId, StepMasks, StepOutput, StepPlan};
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::worker::SharedModel;
use tokio::time::Instant;

use crate::options::BadOption;
use crate::worker::load;

/// Flags of `thalweg bench engine`.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[command(flatten)]
    worker: WorkerConfig,

    /// Tokens of each prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = value::whole(1..=1u32 << 24))]
    prompt: u32,

    /// Tokens that each sequence puts out
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = value::whole(2..=1u32 << 24))]
    output: u32,

    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value::whole(1..=4096u32))]
    batch: u32,

    /// Runs; the median of each figure is reported
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value::whole(1..=1_000u32))]
    repeat: u32,

    /// JSON schema that every sequence follows, so that masks are computed in each step
    #[arg(long, value_name = "FILE", value_parser = value::file)]
    grammar: Option<PathBuf>,

    /// Print one line of JSON
    #[arg(long)]
    json: bool,
}

/// What one run, or the median of several, showed.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Figures {
    /// Prompt tokens over the time until every sequence had its first token.
    prefill_tokens_per_second: f64,
    /// Tokens over the time in which all sequences decoded.
    decode_tokens_per_second: f64,
    /// Median time between tokens in which all sequences decoded.
    step_ms: f64,
    /// Median time of the engine's thread between a step's collection and the next one's being on its way.
    host_us: f64,
}

/// Times the engine's thread between a collected step and the next one that it submits.
struct TimedRunner {
    runner: Box<dyn Runner>,
    collected: Option<Instant>,
    host: Arc<Mutex<Vec<f64>>>,
}

impl Runner for TimedRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        let submitted = self.runner.submit(plan);
        if let Some(collected) = self.collected.take() {
            let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
            host.push(collected.elapsed().as_secs_f64() * 1e6);
        }
        submitted
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        self.runner.provide_masks(step, masks)
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        let output = self.runner.collect(step);
        self.collected = Some(Instant::now());
        output
    }
}

pub(crate) async fn run(options: Options) -> anyhow::Result<()> {
    let mut config = options.worker.clone();
    config.max_num_seqs = config.max_num_seqs.max(options.batch);
    // Before the model, so that a wrong one is told at once.
    let schema = options.grammar.as_deref().map(schema).transpose()?;
    let model = load(&config, 1).await?;
    let plan = EngineConfig { enable_prefix_caching: false, ..model.plan().clone() };
    check_room(&options, &plan)?;
    let grammar = schema.as_ref().map(|schema| schema.compiled(&model)).transpose()?;
    let runner = tokio::task::spawn_blocking({
        let model = Arc::clone(&model);
        move || model.runner()
    });
    let runner = runner.await.context("starting the device panicked")??;
    let host = Arc::new(Mutex::default());
    let runner = TimedRunner { runner, collected: None, host: Arc::clone(&host) };
    let engine = Engine::start(plan.clone(), Box::new(runner), None)?;
    let bar = indicatif::ProgressBar::new(u64::from(options.repeat) + 1).with_message("runs");
    let mut runs = Vec::new();
    for number in 0..=options.repeat {
        let mut run = one_run(&engine, &options, (plan.vocab_size, grammar.as_ref()), number).await?;
        run.host_us = median(std::mem::take(&mut *host.lock().unwrap_or_else(PoisonError::into_inner)));
        // The first one pays for page faults.
        if number > 0 {
            runs.push(run);
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    engine.shutdown().await;
    report(&options, model.hardware(), &Figures::median(&runs));
    Ok(())
}

fn check_room(options: &Options, plan: &EngineConfig) -> anyhow::Result<()> {
    let each = (options.prompt + options.output) as usize;
    ensure!(
        each <= plan.max_model_len,
        "--prompt + --output are {each} tokens, but the context is {}",
        plan.max_model_len
    );
    let blocks = each.div_ceil(plan.block_tokens) * options.batch as usize;
    let least = plan.kv_blocks.iter().zip(plan.has_group).filter(|(_, has)| *has).map(|(n, _)| *n).min();
    ensure!(
        least.is_some_and(|least| blocks <= least) || plan.sliding_window.is_some(),
        "{} sequences of {each} tokens need {blocks} KV blocks; raise --kv-cache-memory-bytes",
        options.batch
    );
    Ok(())
}

async fn one_run(
    engine: &EngineHandle,
    options: &Options,
    (vocab, grammar): (usize, Option<&Grammar>),
    number: u32,
) -> anyhow::Result<Figures> {
    let begin = Instant::now();
    let with_grammar = |i: u32| {
        let mut request = request(options, vocab, number * options.batch + i);
        Arc::make_mut(&mut request.sampling).grammar = grammar.cloned();
        request
    };
    let streams =
        (0..options.batch).map(|i| engine.generate(with_grammar(i))).collect::<Result<Vec<_>, _>>()?;
    let times = try_join_all(streams.into_iter().map(token_times)).await?;
    Figures::of(begin, &times, options).context("too few tokens to measure; raise --output")
}

/// What `--grammar` names.
struct Schema<'a> {
    path: &'a Path,
    source: GrammarSource,
}

fn schema(path: &Path) -> anyhow::Result<Schema<'_>> {
    let bad = |reason: &dyn std::fmt::Display| {
        BadOption::because(format!("--grammar {}: {reason}", path.display()))
    };
    let text = std::fs::read_to_string(path).map_err(|error| bad(&error))?;
    if let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(&text) {
        return Err(bad(&format!("it is no JSON: {error}")));
    }
    Ok(Schema { path, source: GrammarSource::JsonSchema(text) })
}

impl Schema<'_> {
    fn compiled(&self, model: &SharedModel) -> anyhow::Result<Grammar> {
        let bad = |error| BadOption::because(format!("--grammar {}: it {error}", self.path.display()));
        model.compile_grammar(&self.source).map_err(bad)
    }
}

/// A prompt like no other, so that nothing is shared; which ids does not change the work.
fn request(options: &Options, vocab: usize, number: u32) -> EngineRequest {
    let id =
        |i: u32| (1 + (i.wrapping_mul(7919).wrapping_add(number * 104_729)) as usize % (vocab - 1)) as u32;
    let sampling = SamplingParams::greedy();
    EngineRequest {
        request_id: format!("bench-{number}"),
        attempt: AttemptId(0),
        prompt: (0..options.prompt).map(id).collect(),
        sampling: Arc::new(sampling),
        max_tokens: options.output,
        prompt_logprobs: None,
        pooling: None,
        choices: vec![ChoiceState::default()],
        root: HashRoot { fingerprint: &[], adapter: "", scope: "bench", salt: "" }.hash(),
        adapter: AdapterSlot::BASE,
        priority: 0,
        booking: None,
    }
}

/// When each token came.
async fn token_times(mut stream: EngineStream) -> anyhow::Result<Vec<Instant>> {
    let mut times = Vec::new();
    while let Some(event) = stream.recv().await {
        let tokens = event?.deltas.iter().map(|delta| delta.tokens.len()).sum();
        times.extend(std::iter::repeat_n(Instant::now(), tokens));
    }
    Ok(times)
}

impl Figures {
    fn of(begin: Instant, times: &[Vec<Instant>], options: &Options) -> Option<Self> {
        let all_began = *times.iter().filter_map(|t| t.first()).max()?;
        let first_ended = *times.iter().filter_map(|t| t.last()).min()?;
        let together = |t: &&Instant| **t > all_began && **t <= first_ended;
        let tokens = times.iter().flatten().filter(together).count();
        let gaps: Vec<f64> = times
            .iter()
            .flat_map(|t| t.windows(2))
            .filter(|pair| pair[0] >= all_began && pair[1] <= first_ended)
            .map(|pair| milliseconds(pair[1] - pair[0]))
            .collect();
        let prompts = f64::from(options.prompt) * f64::from(options.batch);
        let decode = (first_ended - all_began).as_secs_f64();
        (tokens > 0 && decode > 0.0).then(|| Self {
            prefill_tokens_per_second: prompts / (all_began - begin).as_secs_f64(),
            decode_tokens_per_second: tokens as f64 / decode,
            step_ms: median(gaps),
            host_us: f64::NAN,
        })
    }

    fn median(runs: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| median(runs.iter().map(figure).collect());
        Self {
            prefill_tokens_per_second: of(|r| r.prefill_tokens_per_second),
            decode_tokens_per_second: of(|r| r.decode_tokens_per_second),
            step_ms: of(|r| r.step_ms),
            host_us: of(|r| r.host_us),
        }
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.as_slice() {
        [] => f64::NAN,
        values if values.len().is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        values => values[middle],
    }
}

#[expect(clippy::print_stdout, reason = "the result is what stdout is for")]
fn report(options: &Options, hardware: &str, figures: &Figures) {
    if options.json {
        let line = serde_json::json!({
            "model": options.worker.model,
            "hardware": hardware,
            "prompt": options.prompt,
            "output": options.output,
            "batch": options.batch,
            "prefill_tokens_per_second": figures.prefill_tokens_per_second,
            "decode_tokens_per_second": figures.decode_tokens_per_second,
            "step_ms": figures.step_ms,
            "host_us": figures.host_us,
        });
        println!("{line}");
        return;
    }
    println!("{} on {hardware}, batch {}", options.worker.model, options.batch);
    println!("prefill_tokens_per_second  {:10.1}", figures.prefill_tokens_per_second);
    println!("decode_tokens_per_second   {:10.1}", figures.decode_tokens_per_second);
    println!("step_ms                    {:10.3}", figures.step_ms);
    println!("host_us                    {:10.1}", figures.host_us);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        for (values, expected) in [(vec![3.0], 3.0), (vec![3.0, 1.0, 2.0], 2.0), (vec![1.0, 5.0], 3.0)] {
            assert_eq!(median(values), expected);
        }
        assert!(median(Vec::new()).is_nan());
    }
}
