//! A model on a GPU: one worker, whose KV cache takes what weights and buffers leave.

use std::path::Path;
use std::time::Duration;

use parking_lot::Mutex;
use thalweg_model::checkpoint::{BareModel, Checkpoint};
use thalweg_model::config::ModelConfig;
use thalweg_model::pooling::PoolingSetting;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use super::{Ready, Room, adapters, digest, kv_dtype, plan, with_flags};
use crate::backend::cuda::{
    CudaBackend, CudaBackendConfig, CudaError, CudaModel, Gpu, OnFault, PlanSearch, WeightSource,
    adapter_bytes, buffer_bytes, weight_bytes,
};
use crate::config::{ByteSize, Dtype, LoadFormat, WorkerConfig};
use crate::runner::{DeviceRunner, Runner};
use crate::worker::StartError;

/// Tokens of a step.
const BATCHED_TOKENS: u32 = 8192;

/// The GPU with all that its one worker needs, until that worker takes it.
pub(super) struct Loaded {
    device: Mutex<Option<Box<CudaBackend>>>,
}

impl Loaded {
    pub(super) fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        let device = self.device.lock().take().ok_or_else(|| one_worker(2))?;
        Ok(Box::new(DeviceRunner::new(*device)))
    }
}

fn one_worker(workers: usize) -> StartError {
    let reason = "a process drives one GPU; start one worker process for each";
    StartError::config("workers", workers, reason)
}

/// A checkpoint, or the shape of one.
enum Opened {
    Checkpoint(Box<Checkpoint>),
    Bare(Box<BareModel>),
}

impl Opened {
    fn open(path: &Path, format: LoadFormat) -> Result<Self, StartError> {
        Ok(match format {
            LoadFormat::Auto => Self::Checkpoint(Box::new(Checkpoint::open(path)?)),
            LoadFormat::Dummy => Self::Bare(Box::new(BareModel::open(path)?)),
        })
    }

    fn config(&self) -> &ModelConfig {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.config(),
            Self::Bare(model) => &model.config,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.name(),
            Self::Bare(model) => &model.name,
        }
    }

    fn bundle(&self) -> Result<TokenizerBundle, StartError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.tokenizer_bundle()?,
            Self::Bare(model) => model.tokenizer.clone(),
        })
    }

    fn pooling(&self) -> Result<PoolingSetting, StartError> {
        Ok(match self {
            Self::Checkpoint(checkpoint) => checkpoint.pooling()?,
            Self::Bare(_) => PoolingSetting::Unset,
        })
    }

    /// Of the weights; of dummy ones the seed.
    fn fingerprint(&self, seed: u64) -> [u8; 32] {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.fingerprint(),
            Self::Bare(model) => {
                let shape = format!("{:?}", model.config);
                digest(b"dummy weights 1", &[shape.as_bytes(), &seed.to_le_bytes()])
            }
        }
    }

    fn source(&self, seed: u64) -> WeightSource<'_> {
        match self {
            Self::Checkpoint(checkpoint) => WeightSource::Checkpoint(checkpoint),
            Self::Bare(_) => WeightSource::Dummy { seed },
        }
    }
}

/// Loads the weights, readies the GPU for every step, and divides what is left into blocks.
pub(super) fn load(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    if workers != 1 {
        return Err(one_worker(workers));
    }
    if config.dtype == Dtype::Float32 {
        return Err(StartError::config("dtype", "float32", "GPUs compute in bfloat16; leave it at auto"));
    }
    let opened = Opened::open(path, config.gpu.load_format)?;
    let bundle = with_flags(opened.bundle()?, config)?;
    Tokenizer::new(&bundle)?;
    let pooling = opened.pooling()?;
    let libraries = config.gpu.cuda_library_path.as_deref();
    let gpu = Gpu::open(0, libraries)?;
    let model = opened.config();
    let backend = backend_config(config, model);
    let adapters = adapters::open(config, model)?;
    let mut share = Share::of(&gpu, model, config, &backend)?;
    share.weights += adapter_bytes(&adapters, model, &backend);
    share.check_estimate()?;
    let room = |kv_bytes| Room { kv_bytes, batched_tokens: config.batched_tokens(BATCHED_TOKENS) };
    if config.max_model_len.is_some() {
        plan(model, config, &room(share.estimate()))?;
    }
    let seed = config.gpu.seed;
    let weights = CudaModel::load_with(&gpu, model, &opened.source(seed), &adapters)?;
    let weight_bytes = weights.bytes();
    let prepared = CudaBackend::prepare(weights, backend.clone(), libraries)?;
    let left = prepared.kv_room(share.left(&gpu)?);
    let plan = plan(model, config, &room(share.kv_bytes(left)?))?;
    let device = prepared.with_blocks(plan.kv_blocks)?;
    let (free, _) = gpu.memory()?;
    tracing::info!(
        weights = %ByteSize(weight_bytes),
        left_for_kv = %ByteSize(left),
        free = %ByteSize(free),
        blocks = ?plan.kv_blocks,
        "memory of the GPU"
    );
    let fields = ["cuda bfloat16", backend.kv_dtype.name()].map(str::as_bytes);
    Ok(Ready {
        plan,
        name: opened.name().to_owned(),
        fingerprint: digest(&opened.fingerprint(seed), &fields),
        adapters: adapters::served(config, &adapters),
        hardware: gpu.name().to_lowercase().replace(' ', "-"),
        weight_bytes,
        hidden_size: model.hidden_size,
        pooling,
        bundle,
        loaded: super::Loaded::Cuda(Loaded { device: Mutex::new(Some(Box::new(device))) }),
    })
}

/// This worker's part of the GPU's memory.
struct Share {
    /// Bytes that may be in use, by whomever.
    most: u64,
    /// Of these, what was still to be had at the start.
    usable: u64,
    free: u64,
    weights: u64,
    buffers: u64,
    /// KV cache that the flag asks for.
    wanted: Option<u64>,
}

impl Share {
    /// Before anything is taken but the context.
    fn of(
        gpu: &Gpu,
        model: &ModelConfig,
        config: &WorkerConfig,
        backend: &CudaBackendConfig,
    ) -> Result<Self, CudaError> {
        let (free, total) = gpu.memory()?;
        let most = (total as f64 * config.gpu.gpu_memory_utilization) as u64;
        Ok(Self {
            most,
            usable: most.saturating_sub(total - free).min(free),
            free,
            weights: weight_bytes(model),
            buffers: buffer_bytes(model, backend),
            wanted: config.kv_cache_memory_bytes.map(|size| size.0),
        })
    }

    /// KV cache at the most, before it is known what kernels and recorded steps take.
    fn estimate(&self) -> u64 {
        let left = self.usable.saturating_sub(self.weights + self.buffers);
        self.wanted.map_or(left, |wanted| wanted.min(left))
    }

    /// Refuses early what can never fit.
    fn check_estimate(&self) -> Result<(), CudaError> {
        self.kv_bytes(self.usable.saturating_sub(self.weights + self.buffers)).map(drop)
    }

    /// Bytes that may still be taken.
    fn left(&self, gpu: &Gpu) -> Result<u64, CudaError> {
        let (free, total) = gpu.memory()?;
        Ok(self.most.saturating_sub(total - free).min(free))
    }

    /// What the flag says, or all that is left.
    fn kv_bytes(&self, left: u64) -> Result<u64, CudaError> {
        let wanted = self.wanted.unwrap_or(left);
        if left > 0 && wanted <= left {
            return Ok(wanted);
        }
        let sizes = [self.weights, self.buffers, wanted, left, self.usable, self.free];
        let [weights, buffers, kv, left, usable, free] = sizes.map(ByteSize);
        Err(CudaError::Memory { weights, buffers, kv, left, usable, free })
    }
}

/// As the flags say; blocks are counted when all else is there.
fn backend_config(config: &WorkerConfig, model: &ModelConfig) -> CudaBackendConfig {
    let max_slots = config.max_num_seqs as usize;
    CudaBackendConfig {
        kv_blocks: [0; 2],
        kv_dtype: kv_dtype(config.kv_cache_dtype),
        max_slots,
        max_tokens_per_step: config.batched_tokens(BATCHED_TOKENS).max(max_slots),
        max_model_len: config.max_model_len.map_or(model.max_position, |len| len as usize),
        deterministic: config.gpu.deterministic,
        graphs: !config.gpu.enforce_eager,
        overlapped: true,
        step_timeout: Duration::from_secs(config.gpu.gpu_step_timeout),
        partials_max: 0,
        on_fault: OnFault::EndProcess,
        plans: PlanSearch::Timed(config.gpu.plan_cache()),
    }
}
