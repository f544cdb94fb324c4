//! LoRA: what an adapter adds to the products of a row. Each row is worked on alone and every sum walks upward in f32, so that the
//! result hangs on nothing but the row.

use thalweg_model::adapter::{self, Adapter, LowRank};
use thalweg_model::checkpoint::LayerWeight;
use thalweg_model::config::ModelConfig;

/// Largest rank that is served.
pub const RANK_MAX: usize = 512;

/// An adapter for the products of every layer.
#[derive(Debug)]
pub(super) struct CpuAdapter {
    layers: Vec<[Vec<Delta>; PRODUCTS]>,
}

/// Products as they are computed: those of one input are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    Qkv,
    O,
    GateUp,
    Down,
}

const PRODUCTS: usize = 4;

impl Product {
    pub(crate) const ALL: [Self; PRODUCTS] = [Self::Qkv, Self::O, Self::GateUp, Self::Down];

    /// Weights whose rows it has, one behind the other.
    pub(crate) fn parts(self) -> &'static [LayerWeight] {
        match self {
            Self::Qkv => &[LayerWeight::Q, LayerWeight::K, LayerWeight::V],
            Self::O => &[LayerWeight::O],
            Self::GateUp => &[LayerWeight::Gate, LayerWeight::Up],
            Self::Down => &[LayerWeight::Down],
        }
    }
}

/// What is added to some of a product's outputs.
#[derive(Debug)]
struct Delta {
    /// Outputs from here on.
    first: usize,
    outputs: usize,
    rank: usize,
    /// `[input][rank]`.
    a: Vec<f32>,
    /// `[rank][output]`, scaled.
    b: Vec<f32>,
}

impl CpuAdapter {
    pub(super) fn new(adapter: &Adapter, model: &ModelConfig) -> Self {
        let layer = |layer| Product::ALL.map(|product| deltas(adapter, model, layer, product));
        Self { layers: (0..model.num_layers()).map(layer).collect() }
    }

    /// Adds to one row of a product.
    pub(super) fn add(&self, layer: usize, product: Product, x: &[f32], y: &mut [f32]) {
        self.layers[layer][product as usize].iter().for_each(|delta| delta.add(x, y));
    }

    pub(super) fn bytes(&self) -> u64 {
        let floats = |delta: &Delta| delta.a.len() + delta.b.len();
        4 * self.layers.iter().flatten().flatten().map(floats).sum::<usize>() as u64
    }
}

fn deltas(adapter: &Adapter, model: &ModelConfig, layer: usize, product: Product) -> Vec<Delta> {
    let (rank, mut first, mut deltas) = (adapter.rank(), 0, Vec::new());
    for part in product.parts() {
        let (outputs, inputs) = adapter::dims(model, *part);
        if let Some(LowRank { a, b }) = adapter.low_rank(layer, *part) {
            let a = transposed(&a, rank, inputs, 1.0);
            let b = transposed(&b, outputs, rank, adapter.scale());
            deltas.push(Delta { first, outputs, rank, a, b });
        }
        first += outputs;
    }
    deltas
}

/// `[rows][cols]` to `[cols][rows]`, times a factor.
fn transposed(matrix: &[f32], rows: usize, cols: usize, factor: f32) -> Vec<f32> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| factor * matrix[row * cols + col])).collect()
}

impl Delta {
    fn add(&self, x: &[f32], y: &mut [f32]) {
        let mut low = [0f32; RANK_MAX];
        let low = &mut low[..self.rank];
        for (x, a) in x.iter().zip(self.a.chunks_exact(self.rank)) {
            add_scaled(*x, a, low);
        }
        let y = &mut y[self.first..][..self.outputs];
        for (low, b) in low.iter().zip(self.b.chunks_exact(self.outputs)) {
            add_scaled(*low, b, y);
        }
    }
}

/// `to += factor * row`.
fn add_scaled(factor: f32, row: &[f32], to: &mut [f32]) {
    for (to, value) in to.iter_mut().zip(row) {
        *to += factor * value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_behind_the_first_get_theirs() {
        // Two inputs, rank 1, two of three outputs: B = [1, 10], A = [1, 2], scale 0.5.
        let b = transposed(&[1.0, 10.0], 2, 1, 0.5);
        let delta = Delta { first: 1, outputs: 2, rank: 1, a: transposed(&[1.0, 2.0], 1, 2, 1.0), b };
        let mut y = [1.0, 1.0, 1.0];
        delta.add(&[3.0, 4.0], &mut y);
        assert_eq!(y, [1.0, 1.0 + 0.5 * 11.0, 1.0 + 5.0 * 11.0]);
    }

    #[test]
    fn transposing() {
        assert_eq!(transposed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, 3, 2.0), [2.0, 8.0, 4.0, 10.0, 6.0, 12.0]);
    }
}
