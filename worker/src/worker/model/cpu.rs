//! A model on this machine's cores: workers of one process share its weights.

use std::path::Path;
use std::sync::Arc;

use thalweg_model::adapter::Adapter;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use super::{Ready, Room, adapters, digest, kv_dtype, plan, with_flags};
use crate::backend::BackendError;
use crate::backend::cpu::isa::Isa;
use crate::backend::cpu::linear::Compute;
use crate::backend::cpu::{CpuBackend, CpuBackendConfig, CpuModel, scratch_bytes};
use crate::config::{Dtype, WorkerConfig};
use crate::engine::EngineConfig;
use crate::runner::{ModelRunner, Runner};
use crate::worker::StartError;
use crate::worker::memory::{Footprint, available_bytes};

/// Tokens of a step.
pub(super) const BATCHED_TOKENS: u32 = 256;

/// Packed weights, and how each worker uses them.
pub(super) struct Loaded {
    weights: Arc<CpuModel>,
    backend: CpuBackendConfig,
}

impl Loaded {
    pub(super) fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        let device = CpuBackend::new(Arc::clone(&self.weights), self.backend.clone())
            .map_err(|error| BackendError { device: "cpu".to_owned(), reason: error.to_string() })?;
        Ok(Box::new(ModelRunner::start(device)?))
    }
}

/// Checks that all of it fits, then packs the weights.
pub(super) fn load(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    let checkpoint = Checkpoint::open(path)?;
    let bundle = with_flags(checkpoint.tokenizer_bundle()?, config)?;
    let room =
        Room { kv_bytes: config.kv_cache_bytes(), batched_tokens: config.batched_tokens(BATCHED_TOKENS) };
    let plan = plan(checkpoint.config(), config, &room)?;
    let threads = config.threads_total();
    let backend = backend_config(config, &plan, (threads / workers).max(1));
    let adapters = adapters::open(config, checkpoint.config())?;
    let elements = adapters.iter().map(Adapter::elements).sum::<u64>();
    let footprint = Footprint {
        weights: CpuModel::bytes_needed(&checkpoint)? + 4 * elements,
        kv: room.kv_bytes,
        scratch: scratch_bytes(checkpoint.config(), &backend),
        workers: workers as u64,
    };
    available_bytes().map_or(Ok(()), |available| footprint.check(available))?;
    let compute = compute(config.dtype);
    let weights = load_weights(&checkpoint, &adapters, &bundle, threads, compute)?;
    let fields = [format!("{compute:?}"), backend.kv_dtype.name().to_owned()];
    let fields = fields.each_ref().map(|field| field.as_bytes());
    Ok(Ready {
        plan,
        name: checkpoint.name().to_owned(),
        fingerprint: digest(&checkpoint.fingerprint(), &fields),
        adapters: adapters::served(config, &adapters),
        hardware: format!("cpu-{:?}x{}", Isa::from_env(), backend.threads).to_lowercase(),
        weight_bytes: weights.bytes(),
        hidden_size: checkpoint.config().hidden_size,
        pooling: checkpoint.pooling()?,
        bundle,
        loaded: super::Loaded::Cpu(Loaded { weights, backend }),
    })
}

/// Packs the weights, while another thread sees whether the tokenizer is sound.
fn load_weights(
    checkpoint: &Checkpoint,
    adapters: &[Adapter],
    bundle: &TokenizerBundle,
    threads: usize,
    compute: Compute,
) -> Result<Arc<CpuModel>, StartError> {
    std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| Tokenizer::new(bundle).map(drop));
        let weights = CpuModel::load_with(checkpoint, adapters, threads, compute)?;
        tokenizer.join().map_err(|_| StartError::Panicked("the tokenizer".to_owned()))??;
        Ok(weights)
    })
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

fn compute(dtype: Dtype) -> Compute {
    match dtype {
        Dtype::Auto | Dtype::Bfloat16 => Compute::Int8,
        Dtype::Float32 => Compute::F32,
    }
}
