//! What the operations of a step enqueue.

use thalweg_model::config::Activation;

use super::abi::N_LOGIT_ROWS;
use super::buffers::Buffers;
use super::clusters::Clustered;
use super::config::{Widths, padded_rows};
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::{
    AttentionArgs, AttentionBlocks, GEMM_INPUTS, Gemm, NORMED_INPUTS_MAX, QkvArgs, SMALL_ROWS, SampleArgs,
    Store,
};
use super::kv::group_of;
use super::launch::Launcher;
use super::memory::Address;
use crate::backend::cpu::Product;

impl CudaBackend {
    pub(super) fn launcher(&self) -> Launcher<'_> {
        Launcher { stream: &self.stream, overlapped: self.config.overlapped }
    }

    /// `outputs = inputs * weights`, by the kernel or library that is right for this many rows.
    pub(super) fn product(&mut self, gemm: Gemm) -> Result<(), CudaError> {
        debug_assert!(gemm.k.is_multiple_of(GEMM_INPUTS), "{gemm:?}");
        if gemm.m == 0 {
            return Ok(());
        }
        // SAFETY: all addresses are of buffers sized for the largest step, padded rows included, and of weights of this shape.
        unsafe {
            if !self.config.deterministic && self.kernels.has_clusters(gemm.m, gemm.n, gemm.store) {
                return self.kernels.gemm_cluster(self.launcher(), gemm, None, None);
            }
            if gemm.m <= SMALL_ROWS {
                return self.kernels.gemm_small(self.launcher(), gemm);
            }
            let padded = Gemm { m: padded_rows(gemm.m), ..gemm };
            if let Some(blas) = &mut self.blas
                && blas.run(&self.stream, &padded)?
            {
                return Ok(());
            }
            self.kernels.gemm_tile(self.launcher(), gemm)
        }
    }

    /// A product over the step's tokens.
    pub(super) fn project(
        &mut self,
        weights: Address,
        inputs: Address,
        outputs: Address,
        shape: (usize, usize),
        store: Store,
    ) -> Result<(), CudaError> {
        self.product(self.gemm(weights, (inputs, outputs), shape, store))
    }

    pub(super) fn gemm(
        &self,
        weights: Address,
        (inputs, outputs): (Address, Address),
        (n, k): (usize, usize),
        store: Store,
    ) -> Gemm {
        Gemm { weights, inputs, outputs, m: self.tokens(), n, k, m_at: self.tokens_at(), store }
    }

    pub(super) fn norm(&mut self, weight: Address) -> Result<(), CudaError> {
        let addresses = [self.tokens_at(), self.residual(), weight, self.buffers.normed];
        let (tokens, epsilon) = (self.tokens(), self.model.config().rms_norm_eps);
        // SAFETY: buffers hold the largest step's tokens; the weight is of the model's width.
        unsafe { self.kernels.rms_norm(self.launcher(), tokens, addresses, epsilon, self.widths.hidden) }
    }

    /// Whether a product of the step's only token takes the norm in front of it along.
    fn norms_within(&self) -> bool {
        let is_one = self.tokens() == 1 && self.widths.hidden <= NORMED_INPUTS_MAX;
        is_one && !self.has_adapters() && self.kernels.has_normed()
    }

    /// Norm, and queries, keys and values as attention takes them; of few rows in one product.
    pub(super) fn project_qkv(&mut self, layer: usize) -> Result<(), CudaError> {
        if self.has_clusters(Clustered::Qkv) {
            return self.qkv_in_clusters(layer);
        }
        let weights = *self.model.layer(layer);
        let Buffers { normed, qkv, .. } = self.buffers;
        let shape = (self.widths.qkv, self.widths.hidden);
        let norms_within = self.norms_within();
        if !norms_within {
            self.norm(weights.attention_norm)?;
        }
        let has_head_norms = weights.q_norm != 0 || weights.k_norm != 0;
        if self.tokens() <= SMALL_ROWS && !self.has_adapters() && !has_head_norms {
            let epsilon = self.model.config().rms_norm_eps;
            let norm = norms_within.then_some((weights.attention_norm, epsilon));
            let inputs = if norms_within { self.residual() } else { normed };
            let gemm = self.gemm(weights.qkv, (inputs, qkv), shape, Store::Bf16);
            // SAFETY: as in `product`; places were checked against the cache, positions against the rope table.
            return unsafe { self.kernels.gemm_qkv(self.launcher(), gemm, norm, self.qkv_args(layer)) };
        }
        if norms_within {
            let gemm = self.gemm(weights.qkv, (self.residual(), qkv), shape, Store::Bf16);
            self.product_of_norm(gemm, weights.attention_norm)?;
        } else {
            self.project(weights.qkv, normed, qkv, shape, Store::Bf16)?;
            self.adapt((layer, Product::Qkv), normed, qkv, Store::Bf16)?;
        }
        // SAFETY: places were checked against the cache, positions against the rope table.
        unsafe { self.kernels.qkv_finish(self.launcher(), self.tokens(), self.qkv_args(layer)) }
    }

    /// Norm, gate and up, activation; of few rows in one product.
    pub(super) fn gate_up(&mut self, layer: usize) -> Result<(), CudaError> {
        if self.has_clusters(Clustered::GateUp) {
            return self.gate_up_in_clusters(layer);
        }
        let weights = *self.model.layer(layer);
        let Buffers { normed, gate_up, activated, .. } = self.buffers;
        let Widths { hidden, mlp, .. } = self.widths;
        let activation = self.activation();
        if self.norms_within() {
            let (places, store) = ((self.residual(), activated), Store::Gated(activation));
            let gemm = self.gemm(weights.gate_up, places, (mlp, hidden), store);
            return self.product_of_norm(gemm, weights.mlp_norm);
        }
        self.norm(weights.mlp_norm)?;
        if self.tokens() <= SMALL_ROWS && !self.has_adapters() {
            let store = Store::Gated(activation);
            return self.project(weights.gate_up, normed, activated, (mlp, hidden), store);
        }
        if self.gates_at_once() {
            return self.gates_of_step(weights.gate_up);
        }
        self.project(weights.gate_up, normed, gate_up, (2 * mlp, hidden), Store::Bf16)?;
        self.adapt((layer, Product::GateUp), normed, gate_up, Store::Bf16)?;
        let addresses = [self.tokens_at(), gate_up, activated];
        // SAFETY: buffers hold the largest step's tokens.
        unsafe { self.kernels.gate_act(self.launcher(), self.tokens(), addresses, mlp, activation) }
    }

    /// As kernels number it.
    pub(super) fn activation(&self) -> i32 {
        match self.model.config().activation {
            Activation::Silu => 0,
            Activation::GeluTanh => 1,
        }
    }

    fn product_of_norm(&self, gemm: Gemm, weight: Address) -> Result<(), CudaError> {
        let epsilon = self.model.config().rms_norm_eps;
        // SAFETY: as in `product`; the norm's weight is of the model's width.
        unsafe { self.kernels.gemm_normed(self.launcher(), gemm, (weight, epsilon)) }
    }

    pub(super) fn attend(&mut self, layer: usize) -> Result<(), CudaError> {
        let config = self.model.config();
        let group = group_of(config.layers[layer]);
        let (keys, values) = self.kv.layer(layer);
        let capacities = &self.shape.capacities;
        let (multiprocessors, kv_heads) = (self.gpu.multiprocessors(), config.num_kv_heads);
        let (whole, prefill) = match self.limits.ways.prefill {
            true => (0, capacities.whole[group]),
            false => (capacities.whole[group].min((4 * multiprocessors).div_ceil(kv_heads)), 0),
        };
        let blocks = AttentionBlocks {
            split: capacities.split[group].min((8 * multiprocessors).div_ceil(kv_heads)),
            merge: capacities.merge[group].min(4 * multiprocessors),
            decode: capacities.decode[group].min((2 * multiprocessors).div_ceil(kv_heads)),
            shared: capacities.shared[group],
            whole,
            prefill,
        };
        let args = AttentionArgs {
            counts: self.at(self.layout.counts),
            group,
            rows: self.at(self.layout.rows),
            tables: self.at(self.layout.tables),
            split_items: self.at(self.layout.split[group]),
            merge_items: self.at(self.layout.merge[group]),
            whole_items: self.at(self.layout.whole[group]),
            decode_items: self.at(self.layout.decode[group]),
            shared_items: self.at(self.layout.shared[group]),
            tickets: self.buffers.tickets,
            qkv: self.buffers.qkv,
            tokens: self.tokens(),
            keys,
            values,
            out: self.buffers.attended,
            partial_o: self.buffers.partial_o,
            partial_ml: self.buffers.partial_ml,
            q_heads: config.num_heads,
            kv_heads,
            scale: config.attention_scale,
            window: self.limits.windows[group].unwrap_or(0),
            blocks,
        };
        // SAFETY: items, tables and places were checked when the step was loaded; buffers hold the largest step.
        unsafe { self.kernels.attention(self.launcher(), args) }
    }

    pub(super) fn qkv_args(&self, layer: usize) -> QkvArgs {
        let config = self.model.config();
        let group = group_of(config.layers[layer]);
        let weights = self.model.layer(layer);
        let (keys, values) = self.kv.layer(layer);
        QkvArgs {
            counts: self.at(self.layout.counts),
            positions: self.at(self.layout.positions),
            places: self.at(self.layout.places[group]),
            qkv: self.buffers.qkv,
            bias: weights.qkv_bias,
            q_norm: weights.q_norm,
            k_norm: weights.k_norm,
            epsilon: config.rms_norm_eps,
            rope: self.rope.table(group),
            q_heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            keys,
            values,
            dtype: self.config.kv_dtype,
        }
    }

    pub(super) fn logits_of(&mut self, pass: usize) -> Result<(), CudaError> {
        let (first, rows) = self.pass(pass);
        let config = self.model.config();
        let (epsilon, vocab) = (config.rms_norm_eps, config.vocab_size);
        let (norm, output) = (self.model.output_norm(), self.model.output());
        let Buffers { last, logits, .. } = self.buffers;
        let logit_rows = if self.is_narrowed { 0 } else { self.at(self.layout.logit_rows) };
        let addresses = [self.at(self.layout.counts), logit_rows, self.residual(), norm, last];
        // SAFETY: logit rows name tokens of this step; the buffers hold a whole pass.
        unsafe {
            self.kernels.rms_norm_rows(
                self.launcher(),
                (first, rows),
                addresses,
                epsilon,
                self.widths.hidden,
            )?
        };
        let m_at = match first {
            0 => self.at(self.layout.counts) + 4 * N_LOGIT_ROWS as u64,
            _ => 0,
        };
        let (n, k, store) = (vocab, self.widths.hidden, Store::F32);
        self.product(Gemm { weights: output, inputs: last, outputs: logits, m: rows, n, k, m_at, store })
    }

    pub(super) fn sample_of(&mut self, pass: usize) -> Result<(), CudaError> {
        let (first, rows) = self.pass(pass);
        let Buffers { logits, slot_params, slot_bias, slot_ends, last_token, seen, .. } = self.buffers;
        let args = SampleArgs {
            counts: self.at(self.layout.counts),
            rows: self.at(self.layout.logit_rows),
            first,
            logits,
            vocab: self.model.config().vocab_size,
            params: slot_params,
            bias: slot_bias,
            ends: slot_ends,
            last_token,
            seen,
            masks: self.masks.address(),
            out: self.staging.results(),
        };
        // SAFETY: slots of logit rows were checked; results have room for the largest step.
        unsafe { self.kernels.sample(self.launcher(), rows, args) }
    }

    /// First logit row of a pass, and how many it has.
    pub(super) fn pass(&self, pass: usize) -> (usize, usize) {
        let first = pass * self.rows_per_pass;
        (first, self.rows_per_pass.min(self.shape.capacities.logit_rows - first))
    }
}
