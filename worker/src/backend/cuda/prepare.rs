//! A start in two parts: everything but keys and values, recorded steps included; then memory for these from what is left. Nothing
//! is taken behind it, so that no step can run out of memory.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use super::config::{CudaBackendConfig, padded_rows};
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::SMALL_ROWS;
use super::layout::{Capacities, Layout};
use super::shape::StepShape;
use super::weights::CudaModel;
use crate::backend::{Backend, Projection};
use crate::plan::KV_GROUPS;

/// A backend that only lacks its blocks.
pub struct PreparedBackend {
    pub(super) backend: CudaBackend,
}

/// Kept free for what the driver takes by itself while steps run.
const RUNTIME_BYTES: u64 = 64 << 20;
/// The same where blocks come first: modules, graphs and the driver's own pools are still to come.
const DRIVER_BYTES: u64 = 768 << 20;

impl CudaBackend {
    /// Allocates everything that steps will need, and records the common ones. `libraries` is where cublasLt may be.
    pub fn new(
        model: Arc<CudaModel>,
        config: CudaBackendConfig,
        libraries: Option<&Path>,
    ) -> Result<Self, CudaError> {
        let blocks = config.kv_blocks;
        Self::prepare(model, config, libraries)?.with_blocks(blocks)
    }

    /// What is loaded with a first use is loaded now: local memory of kernels, and cublasLt's kernels for every number of rows that it
    /// is asked for.
    fn warm(&mut self) -> Result<(), CudaError> {
        self.staging.clear_counts(&self.stream)?;
        for tokens in self.product_rows() {
            let one = self.limits.used.map(usize::from);
            let capacities = Capacities {
                tokens,
                rows: 1,
                logit_rows: tokens.min(self.rows_per_pass),
                split: one,
                decode: one,
                shared: one,
                merge: one,
                whole: one,
                ..Capacities::default()
            };
            self.shape = StepShape { capacities, passes: 1 };
            self.layout = Layout::new(&capacities);
            self.first_layer();
            self.fault.take().map_or(Ok(()), Err)?;
        }
        self.stream.synchronize()
    }

    /// Layers are all of one shape: the first stands for them.
    fn first_layer(&mut self) {
        self.embed();
        self.norm_qkv(0);
        self.attention(0);
        self.project_residual(0, Projection::Attention);
        self.norm_gate_up_act(0);
        self.project_residual(0, Projection::Mlp);
        self.logits(0);
        self.sample(0);
    }

    /// Numbers of rows that make a difference to products.
    fn product_rows(&self) -> BTreeSet<usize> {
        let most = self.config.max_tokens_per_step;
        let large = (SMALL_ROWS + 1..=most).map(|rows| padded_rows(rows).min(most));
        let large = large.filter(|_| self.blas.is_some());
        [1.min(most), most].into_iter().chain(large).collect()
    }
}

impl PreparedBackend {
    pub(super) fn new(mut backend: CudaBackend) -> Result<Self, CudaError> {
        if backend.kv.has_addresses() {
            backend.start()?;
        }
        Ok(Self { backend })
    }

    /// Bytes of keys and values that fit where `left` bytes may still be taken.
    pub fn kv_room(&self, left: u64) -> u64 {
        // Every layer's rounding to whole granules is no more than the granules that are mapped already.
        let kept = if self.backend.kv.has_addresses() { RUNTIME_BYTES } else { DRIVER_BYTES };
        left.saturating_sub(kept)
    }

    /// Takes memory for so many blocks of each group.
    pub fn with_blocks(self, blocks: [usize; KV_GROUPS]) -> Result<CudaBackend, CudaError> {
        let mut backend = self.backend;
        backend.gpu.bind()?;
        let is_started = backend.kv.has_addresses();
        let (gpu, model) = (backend.gpu.clone(), backend.model.clone());
        backend.kv.grow(&gpu, model.config(), blocks)?;
        (backend.config.kv_blocks, backend.limits.blocks) = (blocks, blocks);
        if !is_started {
            backend.start()?;
        }
        Ok(backend)
    }
}

impl CudaBackend {
    fn start(&mut self) -> Result<(), CudaError> {
        self.search_plans()?;
        self.warm()?;
        if self.config.graphs {
            self.record()?;
        }
        Ok(())
    }
}
