//! Times the engine's thread over the CUDA backend's host part, without a GPU: `host_speed [sequences] [prompt] [steps]`.
//!
//! Each line is the median over decode steps of all sequences, hot: one step at the heels of another; and cold: before each
//! collection other memory goes through the caches, as much does while a device takes milliseconds for a step. Requests share
//! one channel, as a router's do.
#![allow(missing_docs, clippy::print_stdout)]
#![allow(clippy::disallowed_types, clippy::disallowed_methods, reason = "measures wall time of real work")]

use std::future::poll_fn;
use std::sync::{Arc, Barrier, Mutex};
use std::time::Instant;

use thalweg_proto::block_hash::HashRoot;
use thalweg_proto::ids::AttemptId;
use thalweg_worker::backend::BackendError;
use thalweg_worker::backend::cuda::dry::DryRunner;
use thalweg_worker::engine::{ChoiceState, Engine, EngineConfig, EngineRequest, EventChannel};
use thalweg_worker::plan::{AdapterSlot, StepId, StepMasks, StepOutput, StepPlan};
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;

/// Larger than what a core has of its caches, in words.
const EVICTING_WORDS: usize = 16 << 20;

/// Microseconds of one step.
#[derive(Clone, Copy, Default)]
struct Times {
    /// Reading the results.
    collect: f64,
    /// From there until the next step is submitted: the device may be waiting.
    between: f64,
    /// Deliveries and figures: the device is at work.
    tell: f64,
}

struct TimedRunner {
    runner: DryRunner,
    /// Passed before the first step, so that all sequences begin together.
    all_are_there: Option<Arc<Barrier>>,
    /// None: hot.
    evicting: Option<Vec<u64>>,
    sequences: usize,
    /// The step that is planned next follows one of all sequences.
    decodes: bool,
    times: Times,
    collected: Instant,
    submitted: Instant,
    measured: Arc<Mutex<Vec<Times>>>,
}

impl Runner for TimedRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        self.all_are_there.take().iter().for_each(|barrier| {
            barrier.wait();
        });
        self.decodes = plan.rows.len() == self.sequences && plan.slots.is_empty();
        let id = self.runner.submit(plan);
        self.submitted = Instant::now();
        self.times.between = microseconds(self.submitted - self.collected);
        id
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        self.runner.provide_masks(step, masks)
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        self.times.tell = microseconds(self.submitted.elapsed());
        if self.decodes {
            self.measured.lock().expect("nobody panics").push(self.times);
        }
        if let Some(memory) = &mut self.evicting {
            memory.iter_mut().step_by(8).for_each(|word| *word += 1);
        }
        let begin = Instant::now();
        let output = self.runner.collect(step);
        self.collected = Instant::now();
        self.times.collect = microseconds(self.collected - begin);
        output
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse().expect("a number"));
    let mut next = |default: usize| arguments.next().unwrap_or(default);
    let (sequences, prompt, steps) = (next(256), next(512), next(512));
    println!("{sequences} sequences behind {prompt} tokens, us a step: collect, between, tell; their sum");
    for (name, evicts) in [("hot", false), ("cold", true)] {
        let measured = measure(sequences, prompt, steps, evicts);
        let of = |part: fn(&Times) -> f64| median(measured.iter().map(part).collect());
        let parts = [of(|t| t.collect), of(|t| t.between), of(|t| t.tell)];
        let sum = of(|t| t.collect + t.between + t.tell);
        println!("{name:5} {:7.1} {:7.1} {:7.1} {sum:8.1}", parts[0], parts[1], parts[2]);
    }
}

fn measure(sequences: usize, prompt: usize, steps: usize, evicts: bool) -> Vec<Times> {
    let config = config(sequences, prompt + 16 + steps);
    let measured = Arc::new(Mutex::new(Vec::new()));
    let all_are_there = Arc::new(Barrier::new(2));
    let runner = TimedRunner {
        runner: DryRunner::new(&config),
        all_are_there: Some(Arc::clone(&all_are_there)),
        evicting: evicts.then(|| vec![0; EVICTING_WORDS]),
        sequences,
        decodes: false,
        times: Times::default(),
        collected: Instant::now(),
        submitted: Instant::now(),
        measured: Arc::clone(&measured),
    };
    let vocab = config.vocab_size;
    let engine = Engine::start(config, Box::new(runner), None).expect("an engine");
    let (channel, mut reader) = EventChannel::open();
    let start = |number| {
        let request = request(number, prompt + number % 16, steps, vocab);
        engine.generate_to(request, Some(Arc::clone(&channel))).expect("a place in the queue")
    };
    let streams: Vec<_> = (0..sequences).map(start).collect();
    all_are_there.wait();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let mut ended = 0;
        while ended < sequences {
            let events = poll_fn(|cx| reader.poll_read(cx)).await;
            ended += events.iter().flat_map(|e| &e.event.deltas).filter(|d| d.finish.is_some()).count();
        }
    });
    drop(streams);
    let mut measured = measured.lock().expect("nobody panics");
    std::mem::take(&mut measured)
}

fn config(sequences: usize, tokens: usize) -> EngineConfig {
    EngineConfig {
        block_tokens: 16,
        kv_blocks: [sequences * (tokens.div_ceil(16) + 1) * 2, 0],
        has_group: [true, false],
        sliding_window: None,
        max_model_len: tokens,
        max_num_seqs: sequences,
        max_num_batched_tokens: sequences.max(8192),
        max_num_mixed_tokens: sequences.max(4096),
        max_waiting: sequences,
        enable_prefix_caching: true,
        vocab_size: 128_256,
        prefill_rate: 0.0,
    }
}

/// A prompt like no other; block boundaries are spread over steps.
fn request(number: usize, prompt: usize, output: usize, vocab: usize) -> EngineRequest {
    let id = |at: usize| (1 + (at * 7919 + number * 104_729) % (vocab - 1)) as u32;
    EngineRequest {
        request_id: format!("request-{number}"),
        attempt: AttemptId(number as u64),
        prompt: (0..prompt).map(id).collect(),
        sampling: Arc::new(SamplingParams { end_ids: vec![0], ..SamplingParams::greedy() }),
        max_tokens: output as u32,
        prompt_logprobs: None,
        pooling: None,
        choices: vec![ChoiceState::default()],
        root: HashRoot { fingerprint: &[], adapter: "", scope: "bench", salt: "" }.hash(),
        adapter: AdapterSlot::BASE,
        priority: 0,
        booking: None,
    }
}

fn microseconds(time: std::time::Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
