//! The same answer on a GPU with --deterministic, embeddings included: to the bit that of the sequence alone. Needs a GPU; `make test-gpu` runs it.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_proto::block_hash::BlockHash;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cuda::memory::DeviceMemory;
use thalweg_worker::backend::cuda::{
    CudaBackend, CudaBackendConfig, CudaModel, Gpu, OnFault, PlanSearch, WeightSource,
};
use thalweg_worker::plan::AdapterSlot;
use thalweg_worker::runner::DeviceRunner;
use thalweg_worker::scheduler::{NewSequence, SchedulerConfig, SequenceKey};

use crate::cpu::{alone, kv_config, samplings, test_model, tiny};
use crate::properties::drive;
use crate::workload::{Oracle, RequestSource, Simulation};

/// A model on the GPU and how its KV is stored.
struct Subject {
    model: Arc<CudaModel>,
    kv_dtype: KvDtype,
}

impl Subject {
    fn open(path: &Path, kv_dtype: KvDtype) -> Self {
        let libraries = std::env::var_os("THALWEG_CUDA_LIBRARY_PATH").map(std::path::PathBuf::from);
        let gpu = Gpu::open(0, libraries.as_deref());
        let gpu = gpu.unwrap_or_else(|error| panic!("these tests need a GPU: {error}"));
        let checkpoint = Checkpoint::open(path).unwrap();
        let source = WeightSource::Checkpoint(&checkpoint);
        Self { model: CudaModel::load(&gpu, checkpoint.config(), &source).unwrap(), kv_dtype }
    }

    fn runner(
        &self,
        config: &SchedulerConfig,
        max_model_len: usize,
        partials_max: usize,
    ) -> DeviceRunner<CudaBackend> {
        let config = CudaBackendConfig {
            kv_blocks: config.kv.blocks,
            kv_dtype: self.kv_dtype,
            max_slots: config.max_num_seqs,
            max_tokens_per_step: config.max_num_batched_tokens,
            max_model_len,
            deterministic: true,
            graphs: true,
            overlapped: false,
            step_timeout: Duration::from_secs(60),
            partials_max,
            on_fault: OnFault::Report,
            plans: PlanSearch::FirstChoice,
        };
        DeviceRunner::new(CudaBackend::new(self.model.clone(), config, None).unwrap())
    }

    /// Runs a sequence alone, its whole prompt in one step, without prefix reuse.
    fn oracle(&self, max_model_len: usize) -> Oracle {
        let kv = kv_config(self.model.config(), max_model_len, 1.0, false);
        let config = SchedulerConfig {
            kv,
            max_num_seqs: 1,
            max_num_batched_tokens: max_model_len,
            max_num_mixed_tokens: max_model_len,
        };
        let runner = RefCell::new(self.runner(&config, max_model_len, 0));
        Rc::new(move |new| alone(config, &mut *runner.borrow_mut(), new))
    }
}

fn check(subject: &Subject, max_model_len: usize, requests: usize, seeds: std::ops::Range<u64>) {
    let oracle = subject.oracle(max_model_len);
    let (mut preemptions, mut hits) = (0, 0);
    for seed in seeds {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let (slack, caching) = (rng.random_range(1.0..3.0), rng.random_bool(0.8));
        let kv = kv_config(subject.model.config(), max_model_len, slack, caching);
        let max_num_seqs = rng.random_range(2..12);
        let max_num_batched_tokens = max_num_seqs + rng.random_range(0..100);
        let config = SchedulerConfig {
            kv,
            max_num_seqs,
            max_num_batched_tokens,
            max_num_mixed_tokens: max_num_batched_tokens,
        };
        // Sometimes too few for every row: then some take another way.
        let runner = subject.runner(&config, max_model_len, if rng.random_bool(0.3) { 2 } else { 0 });
        let mut source = RequestSource::new(&mut rng, oracle.clone(), max_model_len);
        source.samplings = samplings();
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

#[test]
fn tiny_gemma_answers_as_if_alone() {
    check(&Subject::open(&tiny("gemma3"), KvDtype::Bf16), 400, 12, 0..8);
}

#[test]
fn tiny_llama_answers_as_if_alone() {
    check(&Subject::open(&tiny("llama3"), KvDtype::Fp8E4m3), 400, 12, 0..8);
}

#[test]
fn tiny_qwen_answers_as_if_alone() {
    check(&Subject::open(&tiny("qwen2"), KvDtype::Fp8E5m2), 400, 12, 0..8);
}

#[test]
fn smollm_answers_as_if_alone() {
    let path = test_model("SmolLM2-135M-Instruct.Q4_1.gguf");
    check(&Subject::open(&path, KvDtype::Bf16), 200, 12, 0..4);
}

/// Beside a pool of a few sequences the GPU is full to a rest that no allocation of ours fits in. More requests than the pool holds fill
/// it to its last block, are preempted and end as if alone.
#[test]
fn tiny_llama_on_a_full_gpu_with_a_full_pool() {
    let (subject, max_model_len) = (Subject::open(&tiny("llama3"), KvDtype::Bf16), 400);
    let oracle = subject.oracle(max_model_len);
    let kv = kv_config(subject.model.config(), max_model_len, 2.5, true);
    let config =
        SchedulerConfig { kv, max_num_seqs: 12, max_num_batched_tokens: 64, max_num_mixed_tokens: 64 };
    let runner = subject.runner(&config, max_model_len, 0);
    let ballast = Ballast::fill(subject.model.gpu());
    let mut simulation = Simulation::new(config, runner, oracle);
    for request in 0..30 {
        let prompt: Vec<u32> = (0..40 + 3 * request).map(|i| (i * 7 + request * 31) % 320).collect();
        simulation.add(NewSequence {
            key: SequenceKey { priority: 0, request: u64::from(request), choice: 0 },
            prompt: prompt.into(),
            output: Vec::new(),
            sampling: Arc::new(samplings().swap_remove(request as usize % 3)),
            output_max: 60,
            root: BlockHash([0; 16]),
            adapter: AdapterSlot::BASE,
            prompt_logprobs: None,
            pooling: None,
            leader: None,
        });
    }
    let mut fullest = 0;
    loop {
        while simulation.submit() {}
        // Before steps in flight give anything back.
        fullest = fullest.max(simulation.scheduler.usage(0).in_use);
        if !simulation.collect() {
            break;
        }
    }
    simulation.finish();
    let total = simulation.scheduler.usage(0).total;
    println!(
        "{fullest} of {total} blocks in use at once, {} preemptions",
        simulation.scheduler.preemptions()
    );
    assert_eq!(fullest, total, "the pool was never full");
    assert!(simulation.scheduler.preemptions() > 0 && simulation.finished.len() == 30);
    assert_eq!(simulation.scheduler.violations(), 0);
    drop(ballast);
}

/// Memory that nobody else can have.
struct Ballast {
    _pieces: Vec<DeviceMemory>,
}

impl Ballast {
    /// Takes all but a few MiB.
    fn fill(gpu: &Arc<Gpu>) -> Self {
        let (mut taken, mut piece) = (Vec::new(), 64u64 << 30);
        while piece >= 2 << 20 {
            match DeviceMemory::new(gpu, piece, "ballast") {
                Ok(memory) => taken.push(memory),
                Err(_) => piece /= 2,
            }
        }
        let (free, total) = gpu.memory().unwrap();
        println!("{} of {} MiB free beside {} pieces of ballast", free >> 20, total >> 20, taken.len());
        assert!(free < 64 << 20);
        Self { _pieces: taken }
    }
}
