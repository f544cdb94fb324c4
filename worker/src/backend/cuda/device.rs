//! A GPU as a [`Backend`]: each operation enqueues its kernels; up to two steps are on their way at once.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use thalweg_model::config::LayerKind;

use super::blas::Blas;
use super::buffers::{Buffers, Rope};
use super::config::{CudaBackendConfig, GROUP_KINDS, OnFault, Widths, logit_rows_per_pass, partials};
use super::context::{Gpu, Stream};
use super::error::CudaError;
use super::fault;
use super::kernels::{Kernels, PREFILL_ROWS, Store, whole_tile_rows};
use super::kv::KvCache;
use super::layout::{Layout, slot_capacities, tables_max};
use super::lora::{self, LoraStep};
use super::masks::Masks;
use super::memory::Address;
use super::prepare::PreparedBackend;
use super::record::Recorded;
use super::shape::{Bucket, StepShape};
use super::slots::SlotState;
use super::staging::{InFlight, Staging};
use super::step::{Limits, Step, Ways};
use super::transfer::plain;
use super::weights::CudaModel;
use crate::backend::cpu::Product;
use crate::backend::{Backend, BackendError, Projection};
use crate::plan::{BlockId, StepMasks, StepOutput, StepPlan};

/// One worker's GPU: KV cache, slots and buffers over a model's weights.
pub struct CudaBackend {
    // Graphs and what is in flight go before the memory and modules that they name.
    pub(super) graphs: Vec<(Bucket, StepShape, Recorded)>,
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Kernels,
    pub(super) blas: Option<Blas>,
    /// Padded numbers of rows whose gates the library and the activation behind it do sooner than `gemm_large`.
    pub(super) gates_apart: BTreeSet<usize>,
    pub(super) staging: Staging,
    pub(super) masks: Masks,
    pub(super) buffers: Buffers,
    pub(super) kv: KvCache,
    pub(super) rope: Rope,
    pub(super) model: Arc<CudaModel>,
    pub(super) config: CudaBackendConfig,
    pub(super) gpu: Arc<Gpu>,
    pub(super) widths: Widths,
    pub(super) limits: Limits,
    pub(super) rows_per_pass: usize,
    /// Rows that there is room for behind `narrow`.
    pub(super) narrow_rows: usize,
    /// Whether operations of the step in work see its logit rows alone.
    pub(super) is_narrowed: bool,
    /// Whether the norm of the next product's inputs is in `normed` already, but for the factor of each row.
    pub(super) is_normed: bool,
    pub(super) slots: Vec<SlotState>,
    pub(super) step: Step,
    pub(super) shape: StepShape,
    pub(super) layout: Layout,
    /// None where the model has no adapters.
    pub(super) lora: Option<LoraStep>,
    /// Index of the graphs that the step in work runs as.
    replayed: Option<usize>,
    /// What an operation of the step in work met; told when the step ends.
    pub(super) fault: Option<CudaError>,
}

impl CudaBackend {
    /// The same but blocks, whatever number of them the configuration has: what is free then is what they can have.
    pub fn prepare(
        model: Arc<CudaModel>,
        config: CudaBackendConfig,
        libraries: Option<&std::path::Path>,
    ) -> Result<PreparedBackend, CudaError> {
        let gpu = model.gpu().clone();
        gpu.bind()?;
        let shape = model.config().clone();
        let stream = Arc::new(Stream::new(&gpu)?);
        let partials = partials(&shape, &config);
        let rows_per_pass = logit_rows_per_pass(&shape, &config);
        let kernels = Kernels::load(&gpu, shape.head_dim, config.kv_dtype)?;
        let prefill = !config.deterministic && kernels.has_prefill();
        let runs = (2 * gpu.multiprocessors()).div_ceil(shape.num_kv_heads);
        let runs = (!config.deterministic && kernels.has_decode()).then_some(runs);
        let shared = (gpu.multiprocessors() / shape.num_kv_heads).max(1);
        let ways = Ways {
            whole_rows: if prefill { PREFILL_ROWS } else { whole_tile_rows(shape.head_dim).unwrap_or(1) },
            prefill,
            runs,
            shared: (prefill && runs.is_some()).then_some(shared),
        };
        let window = |kind| if kind == LayerKind::Sliding { shape.sliding_window } else { None };
        let limits = Limits {
            max_tokens: config.max_tokens_per_step,
            max_slots: config.max_slots,
            max_model_len: config.max_model_len,
            vocab: shape.vocab_size,
            blocks: config.kv_blocks,
            windows: GROUP_KINDS.map(window),
            used: GROUP_KINDS.map(|kind| shape.layers_of(kind) > 0),
            gqa_group: shape.gqa_group(),
            ways,
            partials,
            tables: tables_max(&config),
        };
        let blas = if config.deterministic { None } else { Some(Blas::new(&gpu, libraries)?) };
        let empty = StepShape { capacities: Default::default(), passes: 0 };
        let backend = Self {
            graphs: Vec::new(),
            in_flight: VecDeque::new(),
            kernels,
            blas,
            gates_apart: BTreeSet::new(),
            staging: Staging::new(&gpu, &shape, &config, partials)?,
            masks: Masks::new(&gpu, shape.vocab_size, config.max_slots)?,
            buffers: Buffers::new(&stream, &shape, &config)?,
            kv: KvCache::reserve(&gpu, &shape, config.kv_dtype)?,
            rope: Rope::new(&stream, &shape, config.max_model_len)?,
            widths: Widths::of(&shape),
            limits,
            rows_per_pass,
            narrow_rows: config.max_slots,
            is_narrowed: false,
            is_normed: false,
            slots: vec![SlotState::default(); config.max_slots],
            step: Step::default(),
            shape: empty,
            layout: Layout::new(&empty.capacities),
            lora: model.adapters().map(|adapters| LoraStep::new(&gpu, adapters, &config)).transpose()?,
            replayed: None,
            fault: None,
            stream,
            model,
            config,
            gpu,
        };
        backend.stream.synchronize()?;
        PreparedBackend::new(backend)
    }

    /// The weights.
    pub fn model(&self) -> &CudaModel {
        &self.model
    }

    /// Overwrites the whole KV cache with a byte, and waits: tests mark what nobody may read.
    pub fn fill_kv(&self, byte: u8) -> Result<(), CudaError> {
        self.gpu.bind()?;
        self.kv.fill(&self.stream, byte)?;
        self.stream.synchronize()
    }

    /// Where its work goes: tests put in what fails.
    #[doc(hidden)]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Number of recorded shapes.
    pub fn recorded(&self) -> usize {
        self.graphs.len()
    }

    /// Items of keys that rows share, of the step begun last: tests see that there are any.
    #[doc(hidden)]
    pub fn shared_items(&self) -> usize {
        self.step.items.iter().map(|items| items.shared.len()).sum()
    }

    /// Address of an array of the step buffer.
    pub(super) fn at(&self, offset: u64) -> Address {
        self.staging.address() + offset
    }

    /// Runs an operation unless an earlier one of this step failed.
    fn attempt(&mut self, operation: impl FnOnce(&mut Self) -> Result<(), CudaError>) {
        if self.fault.is_none() {
            self.fault = operation(self).err();
        }
    }

    /// An error of the GPU, which has lost its state: told, or the end of the process.
    fn failed(&self, error: CudaError) -> BackendError {
        self.gpu.give_up();
        let device = format!("cuda:{}", self.gpu.ordinal());
        if self.config.on_fault == OnFault::EndProcess {
            fault::end_process(&device, &error);
        }
        BackendError { device, reason: error.to_string() }
    }

    fn load(&mut self, plan: &StepPlan) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let own = StepShape::of(&self.step, self.rows_per_pass);
        // Recorded steps know nothing of adapters, and so cost nothing for them.
        let is_recorded = |shape: &StepShape| !self.has_adapters() && own.fits(shape);
        self.replayed = self.graphs.iter().position(|(_, shape, _)| is_recorded(shape));
        self.shape = self.replayed.map_or(own, |index| self.graphs[index].1);
        self.shape.capacities.tables = self.step.tables.len();
        if let Some(lora) = self.lora.as_mut().filter(|lora| lora.is_active()) {
            lora.send(&self.stream)?;
        }
        self.send(plan, slot_capacities(&self.config).tokens)
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            // What is in flight uses the memory that goes now; an error has been told or will never be.
            let _ = self.stream.synchronize();
        }
    }
}

impl Backend for CudaBackend {
    fn layers(&self) -> usize {
        self.model.config().num_layers()
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        self.fault = None;
        let adapters = match &mut self.lora {
            Some(lora) => lora.load(plan),
            None => lora::check_none(plan),
        };
        let loaded = adapters.and_then(|()| self.step.load(plan, &mut self.slots, &self.limits));
        loaded.map_err(|reason| BackendError {
            device: format!("cuda:{}", self.gpu.ordinal()),
            reason: format!("step refused: {reason}"),
        })?;
        self.load(plan).map_err(|error| self.failed(error))
    }

    fn replay(&mut self) -> bool {
        let Some(index) = self.replayed else { return false };
        self.attempt(|device| {
            let Recorded { whole, forward, .. } = &device.graphs[index].2;
            let draws_later = device.step.logit_rows.is_empty() || device.step.masks > 0;
            if draws_later { forward } else { whole }.launch(&device.stream)
        });
        true
    }

    fn set_masks(&mut self, masks: StepMasks) -> Result<(), BackendError> {
        if !self.masks.fit(&masks, self.step.masks) {
            let reason =
                format!("{} masks for {} rows, or not of the vocabulary", masks.0.len(), self.step.masks);
            return Err(BackendError { device: format!("cuda:{}", self.gpu.ordinal()), reason });
        }
        self.attempt(|device| {
            device.gpu.bind()?;
            device.masks.send(&device.stream, &masks)
        });
        Ok(())
    }

    fn replay_draws(&mut self) -> bool {
        let Some(index) = self.replayed else { return false };
        self.attempt(|device| device.graphs[index].2.sampling.launch(&device.stream));
        true
    }

    fn embed(&mut self) {
        (self.is_narrowed, self.is_normed) = (false, false);
        self.attempt(|device| {
            let Buffers { last_token, residual, .. } = device.buffers;
            let (counts, source) = (device.at(device.layout.counts), device.at(device.layout.token_src));
            let addresses = [counts, source, last_token, device.model.embedding(), residual];
            let (scale, hidden) = (device.model.config().embedding_scale, device.widths.hidden);
            let behind_all = plain(&device.stream);
            // SAFETY: ids were checked against the vocabulary, slots against their number.
            unsafe { device.kernels.embed(behind_all, device.tokens(), addresses, scale, hidden) }
        });
    }

    fn norm_qkv(&mut self, layer: usize) {
        self.attempt(|device| device.project_qkv(layer));
    }

    fn attention(&mut self, layer: usize) {
        self.attempt(|device| {
            let narrows = device.narrows_behind(layer);
            if narrows && device.shape.capacities.logit_rows == 0 {
                device.is_narrowed = true;
                return Ok(());
            }
            device.attend(layer)?;
            if narrows { device.narrow() } else { Ok(()) }
        });
    }

    fn project_residual(&mut self, layer: usize, projection: Projection) {
        self.attempt(|device| {
            let weights = *device.model.layer(layer);
            let Buffers { activated, projected, .. } = device.buffers;
            let (attended, residual) = (device.attended(), device.residual());
            let Widths { hidden, query, mlp, .. } = device.widths;
            let (product, matrix, inputs, k, norm) = match projection {
                Projection::Attention => {
                    (Product::O, weights.o, attended, query, weights.post_attention_norm)
                }
                Projection::Mlp => (Product::Down, weights.down, activated, mlp, weights.post_mlp_norm),
            };
            if norm == 0 {
                if device.adds_in_clusters() {
                    return device.add_in_clusters((layer, projection), matrix, inputs, k);
                }
                device.project(matrix, inputs, residual, (hidden, k), Store::AddF32)?;
                return device.adapt((layer, product), inputs, residual, Store::AddF32);
            }
            device.project(matrix, inputs, projected, (hidden, k), Store::F32)?;
            device.adapt((layer, product), inputs, projected, Store::F32)?;
            let addresses = [device.tokens_at(), projected, norm, residual];
            let epsilon = device.model.config().rms_norm_eps;
            // SAFETY: buffers hold the largest step's tokens; the weight is of the model's width.
            unsafe {
                device.kernels.add_rms_norm(device.launcher(), device.tokens(), addresses, epsilon, hidden)
            }
        });
    }

    fn norm_gate_up_act(&mut self, layer: usize) {
        self.attempt(|device| device.gate_up(layer));
    }

    fn pool(&mut self) {
        self.attempt(Self::pool_rows);
    }

    fn logit_passes(&self) -> usize {
        self.shape.passes
    }

    fn logits(&mut self, pass: usize) {
        self.attempt(|device| device.logits_of(pass));
    }

    fn sample(&mut self, pass: usize) {
        self.attempt(|device| device.sample_of(pass));
    }

    fn copy_blocks(&mut self, group: usize, pairs: &[(BlockId, BlockId)]) {
        self.attempt(|device| device.copy(group, pairs));
    }

    fn end(&mut self) -> Result<(), BackendError> {
        let ended = self.fault.take().map_or(Ok(()), Err).and_then(|()| self.enqueue_results());
        ended.map_err(|error| self.failed(error))
    }

    fn finish(&mut self) -> Result<StepOutput, BackendError> {
        self.collect().map_err(|error| self.failed(error))
    }
}
