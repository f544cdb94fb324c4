//! Layers of few rows, though too many for the smallest products: all four products go by clusters of blocks, and the norm between two of them
//! is made by both. The one in front leaves rows times the norm's weight and their sums of squares, the one behind multiplies its own sums by
//! the factor that those give.

use super::buffers::Buffers;
use super::config::Widths;
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::{Behind, CLUSTER_TILE, Factors, Store};
use super::memory::Address;
use crate::backend::Projection;

/// Products that take a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clustered {
    Qkv,
    GateUp,
}

impl CudaBackend {
    fn by_clusters(&self, n: usize, store: Store) -> bool {
        let may = !self.config.deterministic && !self.has_adapters();
        may && self.kernels.has_clusters(self.tokens(), n, store)
    }

    /// Whether clusters do it for the step's tokens.
    pub(super) fn has_clusters(&self, product: Clustered) -> bool {
        match product {
            Clustered::Qkv => self.by_clusters(self.widths.qkv, Store::Bf16),
            Clustered::GateUp => self.by_clusters(self.widths.mlp, Store::Gated(self.activation())),
        }
    }

    /// Whether they do the products that are added to the residual stream.
    pub(super) fn adds_in_clusters(&self) -> bool {
        self.by_clusters(self.widths.hidden, Store::AddF32)
    }

    pub(super) fn add_in_clusters(
        &mut self,
        (layer, projection): (usize, Projection),
        weights: Address,
        inputs: Address,
        k: usize,
    ) -> Result<(), CudaError> {
        let gemm = self.gemm(weights, (inputs, self.residual()), (self.widths.hidden, k), Store::AddF32);
        let behind = self.norm_behind(layer, projection);
        self.is_normed = behind.is_some();
        // SAFETY: buffers hold the largest step; squares have room for as many rows as clusters take.
        unsafe { self.kernels.gemm_cluster(self.launcher(), gemm, None, behind) }
    }

    /// Norm of the product behind this one, if both are of the kind that share it.
    fn norm_behind(&self, layer: usize, projection: Projection) -> Option<Behind> {
        let (weight, product) = match projection {
            Projection::Attention => (self.model.layer(layer).mlp_norm, Clustered::GateUp),
            Projection::Mlp if layer + 1 == self.model.config().num_layers() => return None,
            Projection::Mlp => (self.model.layer(layer + 1).attention_norm, Clustered::Qkv),
        };
        let shares =
            self.kernels.leaves_norm(self.tokens(), self.widths.hidden) && self.has_clusters(product);
        shares.then_some(Behind { weight, rows: self.buffers.normed, squares: self.buffers.squares })
    }

    /// What the rows in `normed` lack: after a norm of its own, nothing.
    fn factors(&mut self, norm: Address) -> Result<Option<Factors>, CudaError> {
        if !std::mem::take(&mut self.is_normed) {
            self.norm(norm)?;
            return Ok(None);
        }
        Ok(Some(Factors {
            squares: self.buffers.squares,
            parts: self.widths.hidden.div_ceil(CLUSTER_TILE),
            epsilon: self.model.config().rms_norm_eps,
        }))
    }

    pub(super) fn qkv_in_clusters(&mut self, layer: usize) -> Result<(), CudaError> {
        let weights = *self.model.layer(layer);
        let factors = self.factors(weights.attention_norm)?;
        let Buffers { normed, qkv, .. } = self.buffers;
        let (shape, args) = ((self.widths.qkv, self.widths.hidden), self.qkv_args(layer));
        let gemm = self.gemm(weights.qkv, (normed, qkv), shape, Store::Bf16);
        let has_head_norms = weights.q_norm != 0 || weights.k_norm != 0;
        // SAFETY: as in `product`; places were checked against the cache, positions against the rope table.
        unsafe {
            if !has_head_norms {
                return self.kernels.gemm_cluster_qkv(self.launcher(), gemm, factors, args);
            }
            self.kernels.gemm_cluster(self.launcher(), gemm, factors, None)?;
            self.kernels.qkv_finish(self.launcher(), self.tokens(), args)
        }
    }

    pub(super) fn gate_up_in_clusters(&mut self, layer: usize) -> Result<(), CudaError> {
        let weights = *self.model.layer(layer);
        let factors = self.factors(weights.mlp_norm)?;
        let Buffers { normed, activated, .. } = self.buffers;
        let Widths { hidden, mlp, .. } = self.widths;
        let store = Store::Gated(self.activation());
        let gemm = self.gemm(weights.gate_up, (normed, activated), (mlp, hidden), store);
        // SAFETY: as in `product`; squares are those of this step's rows.
        unsafe { self.kernels.gemm_cluster(self.launcher(), gemm, factors, None) }
    }
}
