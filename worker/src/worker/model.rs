//! A model loaded once for all workers of a process: checked against the flags and the machine before it takes memory.

mod adapters;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod embedding;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use thalweg_model::chat_template::ChatTemplate;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::config::{LayerKind, ModelConfig};
use thalweg_model::error::ModelError;
use thalweg_model::grammar::{Grammar, GrammarError, GrammarSource, JsonBlanks};
use thalweg_model::pooling::PoolingSetting;
use thalweg_model::tokenizer::TokenizerBundle;

use super::StartError;
use super::memory::available_bytes;
use super::sim::SimModel;
use crate::backend::cpu::{BLOCK_TOKENS, KvDtype, kv_block_bytes};
use crate::config::{ByteSize, Device, EngineKind, KvCacheDtype, LoadFormat, WorkerConfig};
use crate::engine::{EngineConfig, MAX_WAITING_DEFAULT};
use crate::kv::{BOOKKEEPING_BYTES_PER_BLOCK, FULL, KvBudget, SLIDING, plan_blocks};
use crate::plan::KV_GROUPS;
use crate::runner::Runner;
use crate::service::{GrammarCompiler, ServedAdapter, ServedModel};
pub use embedding::Embedding;

/// Weights, and all that follows from model and flags alone.
pub struct SharedModel {
    loaded: Loaded,
    kv_dtype: KvDtype,
    plan: EngineConfig,
    served: ServedModel,
    embedding: Option<Embedding>,
    tokenizer: Bytes,
    grammars: GrammarCompiler,
    hardware: String,
}

/// Weights where the model runs.
enum Loaded {
    Cpu(cpu::Loaded),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Loaded),
    Sim(SimModel),
}

/// What a device has made of a checkpoint.
struct Ready {
    loaded: Loaded,
    plan: EngineConfig,
    name: String,
    bundle: TokenizerBundle,
    /// Of the weights and of whatever changes KV values.
    fingerprint: [u8; 32],
    adapters: Vec<ServedAdapter>,
    hardware: String,
    weight_bytes: u64,
    hidden_size: usize,
    pooling: PoolingSetting,
}

/// GPUs that `--device` leads to, one worker process each; 0: the CPU, where workers of one process share the weights.
pub fn gpus(config: &WorkerConfig) -> Result<usize, StartError> {
    match config.device {
        Device::Cpu => Ok(0),
        Device::Auto => Ok(count_gpus(config).unwrap_or_else(|error| {
            tracing::debug!(%error, "no GPU, the model runs on the CPU");
            0
        })),
        Device::Cuda => count_gpus(config),
    }
}

#[cfg(feature = "cuda")]
fn count_gpus(config: &WorkerConfig) -> Result<usize, StartError> {
    let (libraries, needs_blas) = (config.gpu.cuda_library_path.as_deref(), !config.gpu.deterministic);
    Ok(crate::backend::cuda::Gpu::count(libraries, needs_blas)?)
}

#[cfg(not(feature = "cuda"))]
fn count_gpus(_: &WorkerConfig) -> Result<usize, StartError> {
    let reason = "this build has no CUDA backend; build it with --features cuda";
    Err(StartError::config("device", "cuda", reason))
}

impl SharedModel {
    /// Opens and checks the checkpoint at `path`, sees that `workers` workers fit, and loads its weights.
    pub fn load(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Arc<Self>, StartError> {
        check_build(config)?;
        adapters::check(config)?;
        let begin = tokio::time::Instant::now();
        let ready = match () {
            () if config.engine == EngineKind::Sim || config.profile.is_some() => {
                simulated(path, config, workers)?
            }
            () if gpus(config)? > 0 => on_gpu(path, config, workers)?,
            () => on_cpu(path, config, workers)?,
        };
        let embedding = embedding::of(&ready, config);
        let Ready { loaded, plan, name, bundle, fingerprint, adapters, hardware, weight_bytes, .. } = ready;
        let names = match config.served_model_name.is_empty() {
            true => vec![name],
            false => config.served_model_name.clone(),
        };
        if let Some(module) = config.lora.lora_modules.iter().find(|module| names.contains(&module.name)) {
            let reason = "the model has this name; give the adapter another";
            return Err(StartError::config("lora-modules", &module.name, reason));
        }
        let served = ServedModel {
            names,
            fingerprint: with_template(&fingerprint, &bundle).into(),
            vocab_size: plan.vocab_size,
            max_model_len: plan.max_model_len as u32,
            adapters,
            eos_ids: bundle.eos_ids.clone(),
            embeds: embedding.is_some(),
        };
        let tokenizer = serde_json::to_vec(&bundle).map_err(|error| ModelError::Malformed {
            path: path.to_owned(),
            reason: format!("its tokenizer cannot be handed to routers: {error}"),
        })?;
        tracing::info!(
            model = served.names[0],
            weights_mib = weight_bytes >> 20,
            seconds = format!("{:.2}", begin.elapsed().as_secs_f64()),
            hardware,
            "model loaded"
        );
        let kv_dtype = kv_dtype(config.kv_cache_dtype);
        let tokenizer = Bytes::from(tokenizer);
        let grammars = GrammarCompiler::new(tokenizer.clone());
        Ok(Arc::new(Self { loaded, kv_dtype, plan, served, embedding, tokenizer, grammars, hardware }))
    }

    /// Names that requests may use, the main one first.
    pub fn names(&self) -> &[String] {
        &self.served.names
    }

    /// The adapters that requests may name.
    pub fn adapters(&self) -> &[ServedAdapter] {
        &self.served.adapters
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

    /// What embeddings are like here; None where there are none.
    pub fn embedding(&self) -> Option<Embedding> {
        self.embedding
    }

    pub(super) fn kv_dtype(&self) -> KvDtype {
        self.kv_dtype
    }

    pub(super) fn served(&self) -> &ServedModel {
        &self.served
    }

    /// A grammar over the model's vocabulary. Waits until it is compiled: never call it on a reactor.
    pub fn compile_grammar(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        self.grammars.compile_here(source, JsonBlanks::default())
    }

    pub(super) fn grammars(&self) -> GrammarCompiler {
        self.grammars.clone()
    }

    pub(super) fn tokenizer_json(&self) -> Bytes {
        self.tokenizer.clone()
    }

    /// A device of its own for one worker: KV cache, slots, and threads or buffers.
    pub fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        match &self.loaded {
            Loaded::Cpu(loaded) => loaded.runner(),
            #[cfg(feature = "cuda")]
            Loaded::Cuda(loaded) => loaded.runner(),
            Loaded::Sim(sim) => sim.runner(),
        }
    }

    /// The simulation, where there is one.
    pub(super) fn sim(&self) -> Option<&SimModel> {
        match &self.loaded {
            Loaded::Sim(sim) => Some(sim),
            _ => None,
        }
    }
}

fn check_build(config: &WorkerConfig) -> Result<(), StartError> {
    let tp = config.tensor_parallel_size;
    if tp != 1 {
        let reason = "this build runs a model on one rank; leave it at 1 and add workers instead";
        return Err(StartError::config("tensor-parallel-size", tp, reason));
    }
    Ok(())
}

/// Shape and tokenizer of the checkpoint, without its weights.
fn simulated(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    let checkpoint = Checkpoint::open(path)?;
    let bundle = with_flags(checkpoint.tokenizer_bundle()?, config)?;
    let batched_tokens = config.batched_tokens(cpu::BATCHED_TOKENS);
    let room = Room { kv_bytes: config.kv_cache_bytes(), batched_tokens };
    let plan = plan(checkpoint.config(), config, &room)?;
    check_bookkeeping(&plan, room.kv_bytes, workers)?;
    let sim = SimModel::load(config, &bundle, checkpoint.config().hidden_size)?;
    let fingerprint = digest(&checkpoint.fingerprint(), &[b"sim", sim.said().as_bytes()]);
    Ok(Ready {
        loaded: Loaded::Sim(sim),
        plan,
        name: checkpoint.name().to_owned(),
        bundle,
        fingerprint,
        adapters: adapters::named(config),
        hardware: "sim".to_owned(),
        weight_bytes: 0,
        hidden_size: checkpoint.config().hidden_size,
        pooling: checkpoint.pooling()?,
    })
}

/// A simulation keeps no KV, but who has which block: that must fit.
fn check_bookkeeping(plan: &EngineConfig, kv_bytes: u64, workers: usize) -> Result<(), StartError> {
    let blocks = plan.kv_blocks.iter().sum::<usize>();
    let needed = (blocks * BOOKKEEPING_BYTES_PER_BLOCK) as u64 * workers as u64;
    match available_bytes().filter(|available| needed > *available) {
        None => Ok(()),
        Some(available) => {
            let reason = format!(
                "to keep count of {blocks} blocks for each of {workers} workers takes {}, but {} are available; lower it",
                ByteSize(needed),
                ByteSize(available)
            );
            Err(StartError::config("kv-cache-memory-bytes", ByteSize(kv_bytes), reason))
        }
    }
}

fn on_cpu(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    if config.gpu.load_format == LoadFormat::Dummy {
        let reason = "random weights are made on GPUs; give a checkpoint, or --device cuda";
        return Err(StartError::config("load-format", "dummy", reason));
    }
    cpu::load(path, config, workers)
}

#[cfg(feature = "cuda")]
fn on_gpu(path: &Path, config: &WorkerConfig, workers: usize) -> Result<Ready, StartError> {
    cuda::load(path, config, workers)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: &Path, config: &WorkerConfig, _: usize) -> Result<Ready, StartError> {
    count_gpus(config).and(Err(StartError::Panicked("a build without GPUs found one".into())))
}

/// The model's own, with the chat template of the flag; both are tried out here, so that a broken one fails the start.
fn with_flags(mut bundle: TokenizerBundle, config: &WorkerConfig) -> Result<TokenizerBundle, StartError> {
    if let Some(path) = &config.chat_template {
        let read = std::fs::read_to_string(path);
        let source = read.map_err(|source| StartError::ChatTemplate { path: path.clone(), source })?;
        bundle.chat_template = Some(source);
    }
    if let Some(source) = &bundle.chat_template {
        let compiled = ChatTemplate::new(source, &bundle);
        compiled.map_err(|error| match &config.chat_template {
            Some(path) => StartError::config("chat-template", path.display(), error.to_string()),
            None => error.into(),
        })?;
    }
    Ok(bundle)
}

/// What a device leaves for KV, and how many tokens its steps take.
struct Room {
    kv_bytes: u64,
    batched_tokens: usize,
}

fn plan(model: &ModelConfig, config: &WorkerConfig, room: &Room) -> Result<EngineConfig, StartError> {
    let has_group = [model.layers_of(LayerKind::Full) > 0, model.layers_of(LayerKind::Sliding) > 0];
    let sliding_window = model.sliding_window.filter(|_| has_group[SLIDING]);
    let budget = |max_model_len| KvBudget {
        bytes: room.kv_bytes,
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
        max_num_batched_tokens: room.batched_tokens,
        max_num_mixed_tokens: config.mixed_tokens(room.batched_tokens),
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
) -> Result<(usize, [usize; KV_GROUPS]), StartError> {
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

/// What two workers must share before one may use the other's block hashes: whatever changes KV values, and the template
/// besides, since routers keep tokenizer and template by fingerprint.
fn with_template(fingerprint: &[u8; 32], bundle: &TokenizerBundle) -> Vec<u8> {
    let template = bundle.chat_template.as_deref().unwrap_or_default();
    digest(fingerprint, &[template.as_bytes()]).to_vec()
}

/// A fingerprint of these fields too.
fn digest(fingerprint: &[u8], fields: &[&[u8]]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(fingerprint);
    for field in fields {
        hasher.update(&(field.len() as u64).to_le_bytes());
        hasher.update(field);
    }
    *hasher.finalize().as_bytes()
}

fn kv_dtype(dtype: KvCacheDtype) -> KvDtype {
    match dtype {
        KvCacheDtype::Auto | KvCacheDtype::Bfloat16 => KvDtype::Bf16,
        KvCacheDtype::Float32 => KvDtype::F32,
        KvCacheDtype::Fp8 | KvCacheDtype::Fp8E4m3 => KvDtype::Fp8E4m3,
        KvCacheDtype::Fp8E5m2 => KvDtype::Fp8E5m2,
    }
}
