//! A model on a GPU: one worker, whose KV cache takes what weights and buffers leave.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use thalweg_model::checkpoint::{BareModel, Checkpoint};
use thalweg_model::config::ModelConfig;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use super::{Ready, Room, digest, kv_dtype, plan, with_flags};
use crate::backend::cuda::{
    CudaBackend, CudaBackendConfig, CudaError, CudaModel, Gpu, OnFault, WeightSource, buffer_bytes,
    weight_bytes,
};
use crate::config::{ByteSize, Dtype, LoadFormat, WorkerConfig};
use crate::engine::EngineConfig;
use crate::runner::{DeviceRunner, Runner};
use crate::worker::StartError;

/// Tokens of a step.
const BATCHED_TOKENS: u32 = 2048;

/// Weights on the GPU, and how the worker uses them.
pub(super) struct Loaded {
    weights: Arc<CudaModel>,
    backend: CudaBackendConfig,
    libraries: Option<PathBuf>,
}

impl Loaded {
    pub(super) fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        let weights = Arc::clone(&self.weights);
        let device = CudaBackend::new(weights, self.backend.clone(), self.libraries.as_deref())?;
        Ok(Box::new(DeviceRunner::new(device)))
    }
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

/// Divides the GPU's memory, then loads the weights.
pub(super) fn load(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    if workers != 1 {
        let reason = "a process drives one GPU; start one worker process for each";
        return Err(StartError::config("workers", workers, reason));
    }
    if config.dtype == Dtype::Float32 {
        return Err(StartError::config("dtype", "float32", "GPUs compute in bfloat16; leave it at auto"));
    }
    let opened = Opened::open(path, config.gpu.load_format)?;
    let bundle = with_flags(opened.bundle()?, config)?;
    Tokenizer::new(&bundle)?;
    let libraries = config.gpu.cuda_library_path.clone();
    let gpu = Gpu::open(0, libraries.as_deref())?;
    let model = opened.config();
    let batched_tokens = config.batched_tokens(BATCHED_TOKENS);
    let room = Room { kv_bytes: kv_bytes(&gpu, model, config, batched_tokens)?, batched_tokens };
    let plan = plan(model, config, &room)?;
    let backend = backend_config(config, &plan);
    let seed = config.gpu.seed;
    let weights = CudaModel::load(&gpu, model, &opened.source(seed))?;
    let fields = ["cuda bfloat16", backend.kv_dtype.name()].map(str::as_bytes);
    Ok(Ready {
        plan,
        name: opened.name().to_owned(),
        fingerprint: digest(&opened.fingerprint(seed), &fields),
        hardware: gpu.name().to_lowercase().replace(' ', "-"),
        weight_bytes: weights.bytes(),
        bundle,
        loaded: super::Loaded::Cuda(Loaded { weights, backend, libraries }),
    })
}

/// What the flag says, or what this worker's share of the GPU leaves.
fn kv_bytes(
    gpu: &Gpu,
    model: &ModelConfig,
    config: &WorkerConfig,
    batched_tokens: usize,
) -> Result<u64, CudaError> {
    let (free, total) = gpu.memory()?;
    let share = (total as f64 * config.gpu.gpu_memory_utilization) as u64;
    let usable = share.saturating_sub(total - free).min(free);
    let max_model_len = config.max_model_len.map_or(model.max_position, |len| len as usize);
    let most = CudaBackendConfig {
        kv_blocks: [0; 2],
        kv_dtype: kv_dtype(config.kv_cache_dtype),
        max_slots: config.max_num_seqs as usize,
        max_tokens_per_step: batched_tokens.max(config.max_num_seqs as usize),
        max_model_len,
        ..settings(config)
    };
    let (weights, buffers) = (weight_bytes(model), buffer_bytes(model, &most));
    let left = usable.saturating_sub(weights + buffers);
    let wanted = config.kv_cache_memory_bytes.map_or(left, |size| size.0);
    tracing::debug!(free, usable, weights, buffers, kv = wanted, "memory of the GPU");
    if left == 0 || wanted > left {
        let [weights, buffers, usable, free] = [weights, buffers, usable, free].map(ByteSize);
        return Err(CudaError::Memory { weights, buffers, kv: ByteSize(wanted), usable, free });
    }
    Ok(wanted)
}

/// What flags alone decide.
fn settings(config: &WorkerConfig) -> CudaBackendConfig {
    CudaBackendConfig {
        kv_blocks: [0; 2],
        kv_dtype: kv_dtype(config.kv_cache_dtype),
        max_slots: 0,
        max_tokens_per_step: 0,
        max_model_len: 0,
        deterministic: config.gpu.deterministic,
        graphs: !config.gpu.enforce_eager,
        overlapped: true,
        step_timeout: Duration::from_secs(config.gpu.gpu_step_timeout),
        partials_max: 0,
        on_fault: OnFault::EndProcess,
    }
}

fn backend_config(config: &WorkerConfig, plan: &EngineConfig) -> CudaBackendConfig {
    CudaBackendConfig {
        kv_blocks: plan.kv_blocks,
        max_slots: plan.max_num_seqs,
        max_tokens_per_step: plan.max_num_batched_tokens.max(plan.max_num_seqs),
        max_model_len: plan.max_model_len,
        ..settings(config)
    }
}
