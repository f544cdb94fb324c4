//! A model loaded once for all workers of a process: checked against the flags and the machine before it takes memory.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::config::{LayerKind, ModelConfig};
use thalweg_model::error::ModelError;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use super::StartError;
use super::memory::{Footprint, available_bytes};
use super::sim::SimModel;
use crate::backend::BackendError;
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::linear::Compute;
use crate::backend::cpu::{
    BLOCK_TOKENS, CpuBackend, CpuBackendConfig, CpuModel, KvDtype, kv_block_bytes, scratch_bytes,
};
use crate::config::{Device, Dtype, KvCacheDtype, WorkerConfig};
use crate::engine::{EngineConfig, MAX_WAITING_DEFAULT};
use crate::kv::{FULL, KvBudget, SLIDING, plan_blocks};
use crate::runner::{ModelRunner, Runner};
use crate::service::ServedModel;

/// Weights, and all that follows from model and flags alone.
pub struct SharedModel {
    loaded: Loaded,
    kv_dtype: KvDtype,
    plan: EngineConfig,
    served: ServedModel,
    tokenizer: Bytes,
    hardware: String,
}

/// What runners are made of.
enum Loaded {
    Cpu(Arc<CpuModel>, CpuBackendConfig),
    Sim(SimModel),
}

impl SharedModel {
    /// Opens and checks the checkpoint at `path`, sees that `workers` workers fit, and packs its weights.
    pub fn load(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Arc<Self>, StartError> {
        check_build(config)?;
        let begin = tokio::time::Instant::now();
        let checkpoint = Checkpoint::open(path)?;
        let bundle = tokenizer_bundle(&checkpoint, config)?;
        let plan = plan(checkpoint.config(), config)?;
        let threads = config.threads_total();
        let backend = backend_config(config, &plan, (threads / workers).max(1));
        let (fingerprint, hardware, loaded) = match SimModel::load(config, &bundle)? {
            Some(sim) => {
                let fingerprint = sim.fingerprint(&checkpoint, bundle.chat_template.as_deref());
                (fingerprint, "sim".to_owned(), Loaded::Sim(sim))
            }
            None => {
                let footprint = Footprint {
                    weights: CpuModel::bytes_needed(&checkpoint)?,
                    kv: config.kv_cache_memory_bytes.0,
                    scratch: scratch_bytes(checkpoint.config(), &backend),
                    workers: workers as u64,
                };
                available_bytes().map_or(Ok(()), |available| footprint.check(available))?;
                let weights = load_weights(&checkpoint, &bundle, threads, compute(config.dtype))?;
                let hardware = format!("cpu-{:?}x{}", Isa::from_env(), backend.threads).to_lowercase();
                (fingerprint(&checkpoint, config, &bundle), hardware, Loaded::Cpu(weights, backend))
            }
        };
        let names = match config.served_model_name.is_empty() {
            true => vec![checkpoint.name().to_owned()],
            false => config.served_model_name.clone(),
        };
        let served = ServedModel {
            names,
            fingerprint: fingerprint.into(),
            vocab_size: plan.vocab_size,
            max_model_len: plan.max_model_len as u32,
            eos_ids: bundle.eos_ids.clone(),
        };
        let tokenizer = serde_json::to_vec(&bundle).map_err(|error| ModelError::Malformed {
            path: path.to_owned(),
            reason: format!("its tokenizer cannot be handed to routers: {error}"),
        })?;
        tracing::info!(
            model = served.names[0],
            weights_mib = loaded.weight_bytes() >> 20,
            seconds = format!("{:.2}", begin.elapsed().as_secs_f64()),
            hardware,
            "model loaded"
        );
        let kv_dtype = kv_dtype(config.kv_cache_dtype);
        Ok(Arc::new(Self { loaded, kv_dtype, plan, served, tokenizer: tokenizer.into(), hardware }))
    }

    /// Names that requests may use, the main one first.
    pub fn names(&self) -> &[String] {
        &self.served.names
    }

    /// Of the weights and of everything else that changes KV values.
    pub fn fingerprint(&self) -> Bytes {
        self.served.fingerprint.clone()
    }

    /// For people, and for grouping workers of like speed.
    pub fn hardware(&self) -> &str {
        &self.hardware
    }

    /// How each worker's engine is set up.
    pub fn plan(&self) -> &EngineConfig {
        &self.plan
    }

    pub(super) fn kv_dtype(&self) -> KvDtype {
        self.kv_dtype
    }

    pub(super) fn served(&self) -> &ServedModel {
        &self.served
    }

    pub(super) fn tokenizer_json(&self) -> Bytes {
        self.tokenizer.clone()
    }

    /// A device of its own for one worker: KV cache, slots and threads.
    pub fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        let (weights, backend) = match &self.loaded {
            Loaded::Cpu(weights, backend) => (Arc::clone(weights), backend.clone()),
            Loaded::Sim(sim) => return sim.runner(),
        };
        let device = CpuBackend::new(weights, backend)
            .map_err(|error| BackendError { device: "cpu".to_owned(), reason: error.to_string() })?;
        Ok(Box::new(ModelRunner::start(device)?))
    }

    /// The simulation, where there is one.
    pub(super) fn sim(&self) -> Option<&SimModel> {
        match &self.loaded {
            Loaded::Cpu(..) => None,
            Loaded::Sim(sim) => Some(sim),
        }
    }
}

impl Loaded {
    fn weight_bytes(&self) -> u64 {
        match self {
            Self::Cpu(weights, _) => weights.bytes(),
            Self::Sim(_) => 0,
        }
    }
}

fn check_build(config: &WorkerConfig) -> Result<(), StartError> {
    let tp = config.tensor_parallel_size;
    if tp != 1 {
        let reason = "this build runs a model on one rank; leave it at 1 and add workers instead";
        return Err(StartError::config("tensor-parallel-size", tp, reason));
    }
    match config.device {
        Device::Auto | Device::Cpu => Ok(()),
    }
}

/// The model's own, with the chat template of the flag; both are tried out here, so that a broken one fails the start.
fn tokenizer_bundle(checkpoint: &Checkpoint, config: &WorkerConfig) -> Result<TokenizerBundle, StartError> {
    let mut bundle = checkpoint.tokenizer_bundle()?;
    if let Some(path) = &config.chat_template {
        let read = std::fs::read_to_string(path);
        let source = read.map_err(|source| StartError::ChatTemplate { path: path.clone(), source })?;
        bundle.chat_template = Some(source);
    }
    if let Some(source) = &bundle.chat_template {
        ChatTemplate::new(source, &bundle)?;
    }
    Ok(bundle)
}

/// Packs the weights, while another thread sees whether the tokenizer is sound.
fn load_weights(
    checkpoint: &Checkpoint,
    bundle: &TokenizerBundle,
    threads: usize,
    compute: Compute,
) -> Result<Arc<CpuModel>, StartError> {
    std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| Tokenizer::new(bundle).map(drop));
        let weights = CpuModel::load(checkpoint, threads, compute)?;
        tokenizer.join().map_err(|_| StartError::Panicked("the tokenizer".to_owned()))??;
        Ok(weights)
    })
}

fn plan(model: &ModelConfig, config: &WorkerConfig) -> Result<EngineConfig, StartError> {
    let has_group = [model.layers_of(LayerKind::Full) > 0, model.layers_of(LayerKind::Sliding) > 0];
    let sliding_window = model.sliding_window.filter(|_| has_group[SLIDING]);
    let budget = |max_model_len| KvBudget {
        bytes: config.kv_cache_memory_bytes.0,
        bytes_per_block: kv_block_bytes(model, kv_dtype(config.kv_cache_dtype)).map(|bytes| bytes as u64),
        block_tokens: BLOCK_TOKENS,
        sliding_window,
        max_model_len,
    };
    let (max_model_len, kv_blocks) = match config.max_model_len {
        Some(wanted) if wanted as usize > model.max_position => {
            let reason = format!("the model was made for {} tokens", model.max_position);
            return Err(StartError::config("max-model-len", wanted, reason));
        }
        Some(wanted) => (wanted as usize, plan_blocks(&budget(wanted as usize))?),
        None => longest(model.max_position, budget)?,
    };
    debug_assert!(has_group[FULL] || has_group[SLIDING], "a model has layers");
    Ok(EngineConfig {
        block_tokens: BLOCK_TOKENS,
        kv_blocks,
        has_group,
        sliding_window,
        max_model_len,
        max_num_seqs: config.max_num_seqs as usize,
        max_num_batched_tokens: config.max_num_batched_tokens as usize,
        max_waiting: MAX_WAITING_DEFAULT,
        enable_prefix_caching: config.prefix_caching(),
        vocab_size: model.vocab_size,
        prefill_rate: 0.0,
    })
}

/// The model's context, or as much of it as the cache holds: nobody asked for a length, so a shorter one is no error.
fn longest(
    max_position: usize,
    budget: impl Fn(usize) -> KvBudget,
) -> Result<(usize, [usize; crate::plan::KV_GROUPS]), StartError> {
    let error = match plan_blocks(&budget(max_position)) {
        Ok(blocks) => return Ok((max_position, blocks)),
        Err(error) => error,
    };
    let fitting = error.fitting_len;
    if fitting < BLOCK_TOKENS {
        return Err(error.into());
    }
    let blocks = plan_blocks(&budget(fitting))?;
    tracing::info!(
        context = fitting,
        of = max_position,
        bytes_for_all = error.needed,
        "the KV cache holds less than the model's context; --kv-cache-memory-bytes gives more"
    );
    Ok((fitting, blocks))
}

fn backend_config(config: &WorkerConfig, plan: &EngineConfig, threads: usize) -> CpuBackendConfig {
    CpuBackendConfig {
        threads,
        kv_blocks: plan.kv_blocks,
        kv_dtype: kv_dtype(config.kv_cache_dtype),
        max_slots: plan.max_num_seqs,
        max_tokens_per_step: plan.max_num_batched_tokens.max(plan.max_num_seqs),
    }
}

/// What two workers must share before one may use the other's block hashes: whatever changes KV values, and the template
/// besides, since routers keep tokenizer and template by fingerprint.
fn fingerprint(checkpoint: &Checkpoint, config: &WorkerConfig, bundle: &TokenizerBundle) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    let template = bundle.chat_template.as_deref().unwrap_or_default();
    let compute = format!("{:?}", compute(config.dtype));
    let fields = [compute.as_bytes(), kv_dtype(config.kv_cache_dtype).name().as_bytes(), template.as_bytes()];
    hasher.update(&checkpoint.fingerprint());
    for field in fields {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    hasher.finalize().as_bytes().to_vec()
}

fn compute(dtype: Dtype) -> Compute {
    match dtype {
        Dtype::Auto | Dtype::Bfloat16 => Compute::Int8,
        Dtype::Float32 => Compute::F32,
    }
}

fn kv_dtype(dtype: KvCacheDtype) -> KvDtype {
    match dtype {
        KvCacheDtype::Auto | KvCacheDtype::Bfloat16 => KvDtype::Bf16,
        KvCacheDtype::Float32 => KvDtype::F32,
        KvCacheDtype::Fp8 | KvCacheDtype::Fp8E4m3 => KvDtype::Fp8E4m3,
        KvCacheDtype::Fp8E5m2 => KvDtype::Fp8E5m2,
    }
}
