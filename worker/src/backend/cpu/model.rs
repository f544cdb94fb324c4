//! A model's weights in the form that the kernels stream, shared by all workers of a process.

use std::sync::Arc;

use thalweg_model::adapter::Adapter;
use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Matrix, Weight};
use thalweg_model::config::ModelConfig;
use thalweg_model::error::ModelError;

use super::adapter::CpuAdapter;
use super::lanes::LANES;
use super::linear::{Compute, PackError, PackedMatrix};
use super::memory::available_bytes;
use super::pool::Pool;

/// Weights of a model, packed for the CPU.
#[derive(Debug)]
pub struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) embedding: PackedMatrix,
    /// None where the embedding serves.
    output: Option<PackedMatrix>,
    pub(super) output_norm: Vec<f32>,
    pub(super) layers: Vec<Layer>,
    pub(super) adapters: Vec<CpuAdapter>,
    vector_bytes: u64,
}

/// Weights of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) attention_norm: Vec<f32>,
    /// Rows of q, then k, then v.
    pub(super) qkv: PackedMatrix,
    /// As `qkv`'s rows.
    pub(super) qkv_bias: Option<Vec<f32>>,
    pub(super) q_norm: Option<Vec<f32>>,
    pub(super) k_norm: Option<Vec<f32>>,
    pub(super) o: PackedMatrix,
    pub(super) post_attention_norm: Option<Vec<f32>>,
    pub(super) mlp_norm: Vec<f32>,
    /// Rows of gate, then up.
    pub(super) gate_up: PackedMatrix,
    pub(super) down: PackedMatrix,
    pub(super) post_mlp_norm: Option<Vec<f32>>,
}

/// The model cannot be served from this machine's memory, or by this backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A matrix could not be packed.
    #[error("cannot pack {what}: {source}")]
    Pack {
        /// Which weights.
        what: String,
        /// Why.
        source: PackError,
    },
    /// A shape that the kernels do not cover.
    #[error("the CPU backend does not serve this model: {0}")]
    Unsupported(String),
    /// A tensor that the configuration calls for is absent.
    #[error("the checkpoint has no tensor for {0}")]
    Missing(String),
    /// More memory is needed than there is.
    #[error(
        "the weights need {} MiB of memory and {} MiB are available: use a smaller or more strongly quantised model, or free \
         memory",
        needed >> 20,
        available >> 20
    )]
    DoesNotFit {
        /// Bytes that the weights take.
        needed: u64,
        /// Bytes that the system or the control group can still give.
        available: u64,
    },
}

impl CpuModel {
    /// Packs all weights, with `threads` threads. The checkpoint's pages are let go as they are packed.
    pub fn load(checkpoint: &Checkpoint, threads: usize, compute: Compute) -> Result<Arc<Self>, LoadError> {
        Self::load_with(checkpoint, &[], threads, compute)
    }

    /// The same with LoRA adapters: the first has slot 1.
    pub fn load_with(
        checkpoint: &Checkpoint,
        adapters: &[Adapter],
        threads: usize,
        compute: Compute,
    ) -> Result<Arc<Self>, LoadError> {
        let config = checkpoint.config().clone();
        check_shape(&config)?;
        let needed = Self::bytes_needed(checkpoint)?;
        if let Some(available) = available_bytes().filter(|available| *available < needed) {
            return Err(LoadError::DoesNotFit { needed, available });
        }
        let pool = Pool::new(threads);
        let loader = Loader { checkpoint, pool: &pool, compute, head_dim: config.head_dim };
        let embedding = loader.matrix("the embedding", &[Weight::Embedding])?;
        let output = match config.tied_embeddings {
            true => None,
            false => Some(loader.matrix("the output matrix", &[Weight::Output])?),
        };
        let output_norm = loader.required(Weight::OutputNorm)?;
        let layers =
            (0..config.num_layers()).map(|layer| loader.layer(layer)).collect::<Result<Vec<_>, _>>()?;
        let adapters = adapters.iter().map(|adapter| CpuAdapter::new(adapter, &config)).collect();
        let vectors = layers.iter().map(Layer::vector_floats).sum::<usize>() + output_norm.len();
        let vector_bytes = 4 * vectors as u64;
        Ok(Arc::new(Self { config, embedding, output, output_norm, layers, adapters, vector_bytes }))
    }

    /// Bytes that [`CpuModel::load`] takes, known before any is allocated. Packing adds at most a panel's rounding to what is on
    /// disk; a tied embedding is held once.
    pub fn bytes_needed(checkpoint: &Checkpoint) -> Result<u64, LoadError> {
        let config = checkpoint.config();
        let tied = (!config.tied_embeddings).then_some(Weight::Output);
        let whole = [Weight::Embedding].into_iter().chain(tied);
        let of_layers = (0..config.num_layers())
            .flat_map(|layer| MATRICES.map(move |weight| Weight::Layer(layer, weight)));
        whole.chain(of_layers).try_fold(0, |sum, weight| Ok(sum + packed_bytes(&checkpoint.matrix(weight)?)))
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes that the weights take in memory.
    pub fn bytes(&self) -> u64 {
        let whole = self.embedding.bytes() + self.output.as_ref().map_or(0, PackedMatrix::bytes);
        let layers: usize = self.layers.iter().map(Layer::matrix_bytes).sum();
        let adapters: u64 = self.adapters.iter().map(CpuAdapter::bytes).sum();
        (whole + layers) as u64 + self.vector_bytes + adapters
    }

    pub(super) fn output(&self) -> &PackedMatrix {
        self.output.as_ref().unwrap_or(&self.embedding)
    }
}

const MATRICES: [LayerWeight; 7] = [
    LayerWeight::Q,
    LayerWeight::K,
    LayerWeight::V,
    LayerWeight::O,
    LayerWeight::Gate,
    LayerWeight::Up,
    LayerWeight::Down,
];

fn packed_bytes(matrix: &Matrix<'_>) -> u64 {
    let row_bytes = matrix.data.len() / matrix.rows.max(1);
    let panels = matrix.rows.div_ceil(LANES);
    (panels * (row_bytes * LANES).next_multiple_of(64)) as u64
}

fn check_shape(config: &ModelConfig) -> Result<(), LoadError> {
    let unsupported = |reason: String| Err(LoadError::Unsupported(reason));
    let (heads, kv_heads, head_dim) = (config.num_heads, config.num_kv_heads, config.head_dim);
    if head_dim == 0 || !head_dim.is_multiple_of(LANES) {
        return unsupported(format!("heads of {head_dim}, not a multiple of {LANES}"));
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads / kv_heads > GROUP_MAX {
        return unsupported(format!(
            "{heads} query heads over {kv_heads} KV heads, more than {GROUP_MAX} to one"
        ));
    }
    Ok(())
}

/// Query heads per KV head.
const GROUP_MAX: usize = 64;

struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    pool: &'a Pool,
    compute: Compute,
    head_dim: usize,
}

impl Loader<'_> {
    fn layer(&self, index: usize) -> Result<Layer, LoadError> {
        use LayerWeight as W;
        let at = |weight| Weight::Layer(index, weight);
        let matrix = |weights: &[LayerWeight]| {
            let weights: Vec<Weight> = weights.iter().map(|weight| at(*weight)).collect();
            self.matrix(&format!("layer {index}"), &weights)
        };
        Ok(Layer {
            attention_norm: self.required(at(W::AttentionNorm))?,
            qkv: matrix(&[W::Q, W::K, W::V])?,
            qkv_bias: self.joined(&[at(W::QBias), at(W::KBias), at(W::VBias)])?,
            q_norm: self.checkpoint.vector(at(W::QNorm))?,
            k_norm: self.checkpoint.vector(at(W::KNorm))?,
            o: matrix(&[W::O])?,
            post_attention_norm: self.checkpoint.vector(at(W::PostAttentionNorm))?,
            mlp_norm: self.required(at(W::MlpNorm))?,
            gate_up: matrix(&[W::Gate, W::Up])?,
            down: matrix(&[W::Down])?,
            post_mlp_norm: self.checkpoint.vector(at(W::PostMlpNorm))?,
        })
    }

    fn matrix(&self, what: &str, weights: &[Weight]) -> Result<PackedMatrix, LoadError> {
        let parts =
            weights.iter().map(|weight| self.checkpoint.matrix(*weight)).collect::<Result<Vec<_>, _>>()?;
        let release = |part: &Matrix<'_>| self.checkpoint.release(part);
        PackedMatrix::pack(self.pool, &parts, self.head_dim, self.compute, &release)
            .map_err(|source| LoadError::Pack { what: what.to_owned(), source })
    }

    fn required(&self, weight: Weight) -> Result<Vec<f32>, LoadError> {
        self.checkpoint.vector(weight)?.ok_or_else(|| LoadError::Missing(format!("{weight:?}")))
    }

    /// One behind the other; None where there is none of them.
    fn joined(&self, weights: &[Weight]) -> Result<Option<Vec<f32>>, LoadError> {
        let parts =
            weights.iter().map(|weight| self.checkpoint.vector(*weight)).collect::<Result<Vec<_>, _>>()?;
        if parts.iter().all(Option::is_none) {
            return Ok(None);
        }
        let absent = weights.iter().zip(&parts).find(|(_, part)| part.is_none());
        match absent {
            Some((weight, _)) => Err(LoadError::Missing(format!("{weight:?}"))),
            None => Ok(Some(parts.into_iter().flatten().flatten().collect())),
        }
    }
}

impl Layer {
    fn matrix_bytes(&self) -> usize {
        [&self.qkv, &self.o, &self.gate_up, &self.down].map(PackedMatrix::bytes).iter().sum()
    }

    fn vector_floats(&self) -> usize {
        let optional =
            [&self.qkv_bias, &self.q_norm, &self.k_norm, &self.post_attention_norm, &self.post_mlp_norm];
        let optional: usize = optional.into_iter().flatten().map(Vec::len).sum();
        self.attention_norm.len() + self.mlp_norm.len() + optional
    }
}
