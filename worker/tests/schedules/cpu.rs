//! The same answer on the CPU backend: tokens, logprobs and embeddings are bitwise those of the sequence alone, whatever its batch
//! mates, chunk sizes, prefix hits, preemptions and resumes, and whatever the number of threads.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::config::{LayerKind, ModelConfig};
use thalweg_model::grammar::Grammar;
use thalweg_model::tokenizer::Tokenizer;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cpu::{BLOCK_TOKENS, CpuBackend, CpuBackendConfig, CpuModel, KvDtype};
use thalweg_worker::kv::{KvConfig, blocks_per_sequence};
use thalweg_worker::runner::{ModelRunner, Runner};
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::scheduler::{FinishReason, NewSequence, Scheduler, SchedulerConfig};

use crate::grammars;
use crate::properties::drive;
use crate::workload::{Answer, Oracle, RequestSource, Simulation};

/// A model and how it is computed.
struct Subject {
    model: Arc<CpuModel>,
    kv_dtype: KvDtype,
}

impl Subject {
    fn open(path: &Path, compute: Compute, kv_dtype: KvDtype) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        Self { model: CpuModel::load(&checkpoint, 2, compute).unwrap(), kv_dtype }
    }

    fn runner(&self, config: &SchedulerConfig, threads: usize) -> ModelRunner {
        let config = CpuBackendConfig {
            threads,
            kv_blocks: config.kv.blocks,
            kv_dtype: self.kv_dtype,
            max_slots: config.max_num_seqs,
            max_tokens_per_step: config.max_num_batched_tokens,
        };
        ModelRunner::start(CpuBackend::new(self.model.clone(), config).unwrap()).unwrap()
    }

    /// Runs a sequence alone, in one thread, its whole prompt in one step, without prefix reuse.
    fn oracle(&self, max_model_len: usize) -> Oracle {
        let kv = kv_config(self.model.config(), max_model_len, 1.0, false);
        let config = SchedulerConfig {
            kv,
            max_num_seqs: 1,
            max_num_batched_tokens: max_model_len,
            max_num_mixed_tokens: max_model_len,
        };
        let runner = RefCell::new(self.runner(&config, 1));
        Rc::new(move |new| alone(config, &mut *runner.borrow_mut(), new))
    }
}

pub(crate) fn kv_config(
    model: &ModelConfig,
    max_model_len: usize,
    slack: f64,
    prefix_caching: bool,
) -> KvConfig {
    let has_group = [LayerKind::Full, LayerKind::Sliding].map(|kind| model.layers_of(kind) > 0);
    let sliding_window = model.sliding_window.filter(|_| has_group[1]);
    let least = blocks_per_sequence(max_model_len, BLOCK_TOKENS, sliding_window);
    let blocks =
        [0, 1].map(|group| if has_group[group] { (least[group] as f64 * slack) as usize } else { 0 });
    KvConfig { block_tokens: BLOCK_TOKENS, blocks, has_group, sliding_window, prefix_caching }
}

pub(crate) fn alone(config: SchedulerConfig, runner: &mut impl Runner, new: &NewSequence) -> Answer {
    let mut scheduler = Scheduler::new(config);
    scheduler.add(NewSequence { leader: None, ..new.clone() });
    let mut answer =
        Answer { tokens: Vec::new(), finish: FinishReason::Abort, prompt_logprobs: None, embedding: None };
    while let Some(planned) = scheduler.plan() {
        let step = runner.submit(planned.plan).unwrap();
        if let Some(masks) = scheduler.masks() {
            runner.provide_masks(step, masks).unwrap();
        }
        for update in scheduler.complete(runner.collect(step).unwrap()).unwrap().updates {
            answer.tokens.extend(update.tokens);
            answer.finish = update.finish.unwrap_or(answer.finish);
            answer.prompt_logprobs = answer.prompt_logprobs.or(update.prompt_logprobs);
            answer.embedding = answer.embedding.or(update.embedding);
        }
    }
    answer
}

/// Greedy, and with everything that a draw can depend on.
pub(crate) fn samplings() -> Vec<SamplingParams> {
    let logprobs = Some(2);
    let random = SamplingParams {
        temperature: 0.9,
        top_p: 0.95,
        top_k: 40,
        min_p: 0.01,
        logprobs,
        ..SamplingParams::greedy()
    };
    let penalties = SamplingParams {
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        repetition_penalty: 1.2,
        logit_bias: vec![(5, 1.5), (7, -2.0)],
        ..random.clone()
    };
    vec![SamplingParams { logprobs, ..SamplingParams::greedy() }, random, penalties]
}

fn check(
    subject: &Subject,
    grammars: &[Grammar],
    (max_model_len, requests): (usize, usize),
    seeds: std::ops::Range<u64>,
) {
    let oracle = subject.oracle(max_model_len);
    let (mut preemptions, mut hits) = (0, 0);
    for seed in seeds {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let kv = kv_config(
            subject.model.config(),
            max_model_len,
            rng.random_range(1.0..3.0),
            rng.random_bool(0.8),
        );
        let max_num_seqs = rng.random_range(2..8);
        let max_num_batched_tokens = max_num_seqs + rng.random_range(0..60);
        let config = SchedulerConfig {
            kv,
            max_num_seqs,
            max_num_batched_tokens,
            max_num_mixed_tokens: max_num_batched_tokens,
        };
        let runner = subject.runner(&config, rng.random_range(1..=2));
        let mut source = RequestSource::new(&mut rng, oracle.clone(), max_model_len);
        source.samplings = samplings();
        source.grammars = grammars.to_vec();
        source.embeds = true;
        let mut simulation = Simulation::new(config, runner, oracle.clone());
        drive(&mut rng, &mut simulation, &mut source, requests);
        assert_eq!(simulation.scheduler.violations(), 0);
        preemptions += simulation.scheduler.preemptions();
        hits += simulation.started.iter().filter(|s| s.cached_tokens > 0).count();
    }
    println!("{preemptions} preemptions, {hits} prefix hits");
    assert!(preemptions > 0 && hits > 0, "the schedules are too easy");
}

fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

pub(crate) fn tiny(family: &str) -> PathBuf {
    let folder =
        std::env::var_os("THALWEG_TINY_MODELS").map_or_else(|| workspace(".cache/tiny"), PathBuf::from);
    let path = folder.join(family);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

pub(crate) fn test_model(file: &str) -> PathBuf {
    let folder =
        std::env::var_os("THALWEG_TEST_MODELS").map_or_else(|| workspace(".cache/models"), PathBuf::from);
    let path = folder.join(file);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

#[test]
fn tiny_gemma_answers_as_if_alone() {
    // kv-cache-02.
    check(&Subject::open(&tiny("gemma3"), Compute::F32, KvDtype::Bf16), &[], (100, 12), 0..16);
}

#[test]
fn tiny_llama_answers_as_if_alone() {
    check(&Subject::open(&tiny("llama3"), Compute::Int8, KvDtype::F32), &[], (100, 12), 0..16);
}

#[test]
fn tiny_qwen_answers_as_if_alone() {
    check(&Subject::open(&tiny("qwen2"), Compute::F32, KvDtype::Fp8E4m3), &[], (100, 12), 0..16);
}

/// The quantised model that is served by default, half of whose answers are held to a grammar.
#[test]
fn smollm_answers_as_if_alone() {
    // sampling-08.
    let path = test_model("SmolLM2-135M-Instruct.Q4_1.gguf");
    let bundle = Checkpoint::open(&path).unwrap().tokenizer_bundle().unwrap();
    let grammars = grammars::compile(&Tokenizer::new(&bundle).unwrap());
    check(&Subject::open(&path, Compute::Int8, KvDtype::Bf16), &grammars, (150, 14), 0..3);
}
