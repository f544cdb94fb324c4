//! The CPU as a [`Backend`]: each operation over the step's rows, with a fork and a join where it pays.

use std::sync::Arc;

use thalweg_model::config::LayerKind;
use thalweg_model::grammar::TokenMask;

use super::adapter::Product;
use super::attention::{self, Shape, attention};
use super::buffers::Buffers;
use super::config::{CpuBackendConfig, GROUP_KINDS, Widths, group_of, logit_rows_per_pass};
use super::heads::Heads;
use super::kv::KvCache;
use super::linear::{Activations, PackedMatrix, matmul};
use super::memory::OutOfMemory;
use super::model::CpuModel;
use super::pool::Pool;
use super::pooled::Pooled;
use super::rows::{add, add_rms_norm, gate, rms_norm, scale};
use super::sample::{Inputs, Sampler, Yield};
use super::slots::Slots;
use super::step::{Limits, Step};
use crate::backend::{Backend, BackendError, Projection};
use crate::plan::{BlockId, RowOutput, StepMasks, StepOutput, StepPlan};

/// One worker's share of the CPU: its KV cache, slots and threads, over weights that others may share.
pub struct CpuBackend {
    model: Arc<CpuModel>,
    config: CpuBackendConfig,
    widths: Widths,
    pool: Pool,
    kv: KvCache,
    slots: Slots,
    step: Step,
    buffers: Buffers,
    attention: attention::Memory,
    pooled: Pooled,
    sampler: Sampler,
    yields: Vec<Yield>,
    /// By row of the step; None where anything may be drawn.
    masks: Vec<Option<TokenMask>>,
    started: tokio::time::Instant,
}

impl CpuBackend {
    /// Allocates everything that steps will need. KV pages become resident when they are first written.
    pub fn new(model: Arc<CpuModel>, config: CpuBackendConfig) -> Result<Self, OutOfMemory> {
        let shape = model.config();
        let pool = Pool::new(config.threads);
        Ok(Self {
            widths: Widths::of(shape),
            kv: KvCache::new(shape, &config)?,
            slots: Slots::new(config.max_slots),
            step: Step::with_capacity(config.max_slots, config.max_tokens_per_step),
            buffers: Buffers::new(shape, &config)?,
            attention: attention::Memory::new(pool.threads(), shape.head_dim)?,
            pooled: Pooled::new(config.max_slots, shape.hidden_size)?,
            sampler: Sampler::new(pool.threads()),
            yields: Vec::new(),
            masks: Vec::new(),
            started: tokio::time::Instant::now(),
            pool,
            config,
            model,
        })
    }

    /// The weights.
    pub fn model(&self) -> &CpuModel {
        &self.model
    }

    /// Bytes of the KV cache when all of it is in use.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    /// Overwrites the whole KV cache with a byte: tests mark what nobody may read.
    #[cfg(test)]
    pub(super) fn fill_kv(&mut self, byte: u8) {
        self.kv.fill(byte);
    }

    /// Logits of the last pass, `[wanted][vocab]`.
    #[cfg(test)]
    pub(super) fn last_logits(&self) -> &[f32] {
        &self.buffers.logits
    }

    fn limits(&self) -> Limits {
        let config = self.model.config();
        let window = |kind| if kind == LayerKind::Sliding { config.sliding_window } else { None };
        Limits {
            max_tokens: self.config.max_tokens_per_step,
            vocab: config.vocab_size,
            blocks: self.config.kv_blocks,
            windows: GROUP_KINDS.map(window),
            used: GROUP_KINDS.map(|kind| config.layers_of(kind) > 0),
            adapters: self.model.adapters.len(),
        }
    }

    fn tokens(&self) -> usize {
        self.step.tokens.len()
    }

    fn kind(&self, layer: usize) -> LayerKind {
        self.model.config().layers[layer]
    }
}

impl Backend for CpuBackend {
    fn layers(&self) -> usize {
        self.model.layers.len()
    }

    fn begin(&mut self, plan: &StepPlan) -> Result<(), BackendError> {
        self.started = tokio::time::Instant::now();
        let limits = self.limits();
        let taken = plan.slots.iter().try_for_each(|init| self.slots.init(init));
        let loaded = taken.and_then(|()| self.step.load(plan, &self.slots, &limits));
        self.yields.clear();
        self.pooled.drain().for_each(drop);
        self.masks.clear();
        self.masks.resize(plan.rows.len(), None);
        loaded.map_err(|reason| BackendError {
            device: "cpu".into(),
            reason: format!("step refused: {reason}"),
        })
    }

    fn set_masks(&mut self, masks: StepMasks) -> Result<(), BackendError> {
        let (rows, vocab) = (self.step.constrained.len(), self.model.config.vocab_size);
        if masks.0.len() != rows
            || masks.0.iter().flatten().any(|mask| mask.words().len() != vocab.div_ceil(32))
        {
            let reason = format!("{} masks for {rows} rows, or not of {vocab} tokens", masks.0.len());
            return Err(BackendError { device: "cpu".into(), reason });
        }
        for (row, mask) in self.step.constrained.iter().zip(masks.0) {
            self.masks[*row] = mask;
        }
        Ok(())
    }

    fn embed(&mut self) {
        let (tokens, hidden) = (self.tokens(), self.widths.hidden);
        let (model, ids) = (&self.model, &self.step.tokens);
        let factor = model.config.embedding_scale;
        let residual = &mut self.buffers.residual[..tokens * hidden];
        each_row(&self.pool, residual, hidden, &|token, row| {
            model.embedding.row_to_f32(ids[token] as usize, row);
            if factor != 1.0 {
                scale(row, factor);
            }
        });
        for (kind, table) in GROUP_KINDS.into_iter().zip(&mut self.buffers.rope) {
            if model.config.layers_of(kind) > 0 {
                let positions = self.step.positions.iter().enumerate();
                positions.for_each(|(token, position)| table.set(token, *position));
            }
        }
    }

    fn norm_qkv(&mut self, layer: usize) {
        let kind = self.kind(layer);
        let model = self.model.clone();
        let weights = &model.layers[layer];
        self.norm(&weights.attention_norm);
        let (tokens, widths) = (self.tokens(), self.widths);
        let Buffers { hidden, qkv, inputs, rope, .. } = &mut self.buffers;
        let qkv = &mut qkv[..tokens * widths.qkv];
        let x = &hidden[..tokens * widths.hidden];
        project(&self.pool, &weights.qkv, inputs, x, tokens, qkv);
        adapt(&self.pool, &model, &self.step, (layer, Product::Qkv), x, qkv);
        let writer = self.kv.writer(layer);
        let (step, group) = (&self.step, group_of(kind));
        let heads = Heads { isa: self.pool.isa(), model: &model, weights, widths };
        let table = &rope[group];
        each_row(&self.pool, qkv, widths.qkv, &|token, row| {
            heads.finish(row, table.of(token));
            // SAFETY: positions of a step are distinct places, each written by the one task that has its token.
            unsafe { heads.keep(row, step, token, group, &writer) };
        });
    }

    fn attention(&mut self, layer: usize) {
        let config = &self.model.config;
        let kind = self.kind(layer);
        let shape = Shape {
            kv_heads: config.num_kv_heads,
            group: config.gqa_group(),
            head_dim: config.head_dim,
            scale: config.attention_scale,
            window: if kind == LayerKind::Sliding { config.sliding_window } else { None },
            kv_group: group_of(kind),
        };
        let tokens = self.tokens();
        let mut x = attention::Activations {
            qkv: &self.buffers.qkv[..tokens * self.widths.qkv],
            stride: self.widths.qkv,
            out: &mut self.buffers.attended[..tokens * self.widths.query],
        };
        attention(&self.pool, shape, &self.step, self.kv.layer(layer), &mut self.attention, &mut x);
    }

    fn project_residual(&mut self, layer: usize, projection: Projection) {
        let (tokens, widths) = (self.tokens(), self.widths);
        let weights = &self.model.layers[layer];
        let Buffers { residual, hidden, attended, activated, inputs, .. } = &mut self.buffers;
        let (product, matrix, x, norm) = match projection {
            Projection::Attention => {
                let x = &attended[..tokens * widths.query];
                (Product::O, &weights.o, x, &weights.post_attention_norm)
            }
            Projection::Mlp => {
                let x = &activated[..tokens * widths.mlp];
                (Product::Down, &weights.down, x, &weights.post_mlp_norm)
            }
        };
        let hidden = &mut hidden[..tokens * widths.hidden];
        project(&self.pool, matrix, inputs, x, tokens, hidden);
        adapt(&self.pool, &self.model, &self.step, (layer, product), x, hidden);
        let (isa, epsilon) = (self.pool.isa(), self.model.config.rms_norm_eps);
        let residual = &mut residual[..tokens * widths.hidden];
        each_row(&self.pool, residual, widths.hidden, &|token, row| {
            let y = &hidden[token * widths.hidden..][..widths.hidden];
            match norm {
                Some(norm) => add_rms_norm(isa, y, norm, epsilon, row),
                None => add(isa, y, row),
            }
        });
    }

    fn norm_gate_up_act(&mut self, layer: usize) {
        let model = self.model.clone();
        let weights = &model.layers[layer];
        self.norm(&weights.mlp_norm);
        let (tokens, widths) = (self.tokens(), self.widths);
        let Buffers { hidden, gate_up, activated, inputs, .. } = &mut self.buffers;
        let gate_up = &mut gate_up[..tokens * 2 * widths.mlp];
        let x = &hidden[..tokens * widths.hidden];
        project(&self.pool, &weights.gate_up, inputs, x, tokens, gate_up);
        adapt(&self.pool, &model, &self.step, (layer, Product::GateUp), x, gate_up);
        let (isa, activation) = (self.pool.isa(), model.config.activation);
        each_row(&self.pool, &mut activated[..tokens * widths.mlp], widths.mlp, &|token, row| {
            let (gates, ups) = gate_up[token * 2 * widths.mlp..][..2 * widths.mlp].split_at(widths.mlp);
            gate(isa, activation, gates, ups, row);
        });
    }

    fn pool(&mut self) {
        let (width, epsilon, isa) = (self.widths.hidden, self.model.config.rms_norm_eps, self.pool.isa());
        let Buffers { residual, hidden, .. } = &mut self.buffers;
        let weight = &self.model.output_norm;
        for pooled in &self.step.pooled {
            let row = &self.step.rows[pooled.row];
            let places = row.start * width..(row.start + row.len) * width;
            let (residual, hidden) = (&residual[places.clone()], &mut hidden[places]);
            each_row(&self.pool, hidden, width, &|token, out| {
                rms_norm(isa, &residual[token * width..][..width], weight, epsilon, out);
            });
            self.pooled.take(*pooled, row, hidden);
        }
    }

    fn logit_passes(&self) -> usize {
        self.step.logit_rows.len().div_ceil(logit_rows_per_pass(self.model.config()))
    }

    fn logits(&mut self, pass: usize) {
        let (model, hidden) = (&self.model, self.widths.hidden);
        let rows = self.step.logit_rows_of(pass, logit_rows_per_pass(&model.config));
        let Buffers { residual, last, logits, inputs, .. } = &mut self.buffers;
        let last = &mut last[..rows.len() * hidden];
        let (isa, epsilon) = (self.pool.isa(), model.config.rms_norm_eps);
        each_row(&self.pool, last, hidden, &|index, row| {
            let x = &residual[rows[index].token * hidden..][..hidden];
            rms_norm(isa, x, &model.output_norm, epsilon, row);
        });
        let logits = &mut logits[..rows.len() * model.config.vocab_size];
        project(&self.pool, model.output(), inputs, last, rows.len(), logits);
    }

    fn sample(&mut self, pass: usize) {
        let per_pass = logit_rows_per_pass(&self.model.config);
        let rows = self.step.logit_rows_of(pass, per_pass);
        let logits = &mut self.buffers.logits[..rows.len() * self.model.config.vocab_size];
        let begin = self.yields.len();
        self.yields.resize(begin + rows.len(), Yield::default());
        let yields = &mut self.yields[begin..];
        let inputs = Inputs { step: &self.step, slots: &self.slots, masks: &self.masks };
        self.sampler.run(&self.pool, &inputs, rows, logits, yields);
        for (row, result) in rows.iter().zip(yields) {
            if let Some(sampled) = &result.sampled {
                self.slots.push(self.step.rows[row.row].slot, sampled.token);
            }
        }
    }

    fn copy_blocks(&mut self, group: usize, pairs: &[(BlockId, BlockId)]) {
        for (from, to) in pairs {
            self.kv.copy_block(group, from.0 as usize, to.0 as usize);
        }
    }

    fn finish(&mut self) -> Result<StepOutput, BackendError> {
        let mut rows = vec![RowOutput::default(); self.step.rows.len()];
        for (wanted, result) in self.step.logit_rows.iter().zip(self.yields.drain(..)) {
            rows[wanted.row].prompt.extend(result.prompt);
            rows[wanted.row].sampled.extend(result.sampled);
        }
        self.pooled.drain().for_each(|(row, vector)| rows[row].embedding = Some(vector));
        Ok(StepOutput { rows, seconds: self.started.elapsed().as_secs_f64() })
    }
}

impl CpuBackend {
    /// Normed residual stream, to `hidden`.
    fn norm(&mut self, weight: &[f32]) {
        let (width, epsilon, isa) = (self.widths.hidden, self.model.config.rms_norm_eps, self.pool.isa());
        let count = self.tokens() * width;
        let Buffers { residual, hidden, .. } = &mut self.buffers;
        each_row(&self.pool, &mut hidden[..count], width, &|token, row| {
            rms_norm(isa, &residual[token * width..][..width], weight, epsilon, row);
        });
    }
}

/// `out = x * matrix`.
fn project(
    pool: &Pool,
    matrix: &PackedMatrix,
    inputs: &mut Activations,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    inputs.prepare(pool, x, tokens, matrix.cols(), matrix.inputs());
    matmul(pool, matrix, inputs, out);
}

/// Adds what the adapters of rows with one change of a product of `x`.
fn adapt(
    pool: &Pool,
    model: &CpuModel,
    step: &Step,
    (layer, product): (usize, Product),
    x: &[f32],
    y: &mut [f32],
) {
    if !step.has_adapters() {
        return;
    }
    let tokens = step.tokens.len();
    let (inputs, outputs) = (x.len() / tokens, y.len() / tokens);
    each_row(pool, y, outputs, &|token, row| {
        if let Some(index) = step.adapter(token) {
            model.adapters[index].add(layer, product, &x[token * inputs..][..inputs], row);
        }
    });
}

/// Values below which another thread is not worth waking.
const SPREAD_FROM: usize = 1 << 14;
/// Values that one task works on.
const TASK_VALUES: usize = 1 << 13;

/// Calls `f(index, row)` for rows of `width`, on several threads where there is enough to do.
fn each_row(pool: &Pool, data: &mut [f32], width: usize, f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    if data.len() < SPREAD_FROM {
        return data.chunks_exact_mut(width).enumerate().for_each(|(index, row)| f(index, row));
    }
    let rows = (TASK_VALUES / width).max(1);
    pool.chunks(data, rows * width, &|task, part| {
        part.chunks_exact_mut(width).enumerate().for_each(|(index, row)| f(task * rows + index, row));
    });
}
