//! Activations of a step, as large as the largest step needs.

use thalweg_model::config::{ModelConfig, Rope};

use super::config::{CpuBackendConfig, Widths, logit_rows_per_pass};
use super::linear::Activations;
use super::memory::{OutOfMemory, Zeroed};

/// One buffer per stage; each token has a row in every one.
pub(super) struct Buffers {
    /// Residual stream, `[token][hidden]`.
    pub(super) residual: Zeroed<f32>,
    /// Normed residual, or a projection back into it.
    pub(super) hidden: Zeroed<f32>,
    /// `[token][q heads, k heads, v heads]`.
    pub(super) qkv: Zeroed<f32>,
    /// `[token][q heads]`.
    pub(super) attended: Zeroed<f32>,
    /// `[token][gate, up]`.
    pub(super) gate_up: Zeroed<f32>,
    /// `[token][intermediate]`.
    pub(super) activated: Zeroed<f32>,
    /// `[wanted][hidden]`.
    pub(super) last: Zeroed<f32>,
    /// `[wanted][vocab]`.
    pub(super) logits: Zeroed<f32>,
    pub(super) inputs: Activations,
    pub(super) rope: [RopeTable; 2],
}

impl Buffers {
    pub(super) fn new(model: &ModelConfig, config: &CpuBackendConfig) -> Result<Self, OutOfMemory> {
        let widths = Widths::of(model);
        let tokens = config.max_tokens_per_step;
        let by_token = |width: usize| Zeroed::new(tokens.saturating_mul(width), "activations");
        let rows = logit_rows_per_pass(model);
        Ok(Self {
            residual: by_token(widths.hidden)?,
            hidden: by_token(widths.hidden)?,
            qkv: by_token(widths.qkv)?,
            attended: by_token(widths.query)?,
            gate_up: by_token(2 * widths.mlp)?,
            activated: by_token(widths.mlp)?,
            last: Zeroed::new(rows.saturating_mul(widths.hidden), "activations")?,
            logits: Zeroed::new(rows.saturating_mul(model.vocab_size), "logits")?,
            inputs: Activations::new(tokens, widths.hidden.max(widths.query).max(widths.mlp)),
            rope: [
                RopeTable::new(model.rope, model.head_dim, tokens)?,
                RopeTable::new(model.local_rope, model.head_dim, tokens)?,
            ],
        })
    }
}

/// Cosines and sines of a step's tokens: the same for all heads and layers of a kind.
pub(super) struct RopeTable {
    frequencies: Vec<f64>,
    /// `[token][head_dim / 2]`.
    cos: Zeroed<f32>,
    sin: Zeroed<f32>,
}

impl RopeTable {
    fn new(rope: Rope, head_dim: usize, tokens: usize) -> Result<Self, OutOfMemory> {
        let room = || Zeroed::new(tokens.saturating_mul(head_dim / 2), "rope");
        Ok(Self { frequencies: rope.frequencies(head_dim), cos: room()?, sin: room()? })
    }

    /// Angles in f64, rounded once.
    pub(super) fn set(&mut self, token: usize, position: u32) {
        let start = token * self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            self.cos[start + i] = cos as f32;
            self.sin[start + i] = sin as f32;
        }
    }

    /// Cosines and sines of a token.
    pub(super) fn of(&self, token: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        (&self.cos[token * half..][..half], &self.sin[token * half..][..half])
    }
}
