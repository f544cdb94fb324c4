//! A checkpoint on disk, whatever its format: one configuration, tensors by role.

mod bare;
pub(crate) mod fingerprint;
mod load;
mod roles;

use std::path::{Path, PathBuf};

use hashbrown::HashMap;

use crate::config::ModelConfig;
use crate::dequantize::dequantize_row;
use crate::dtype::DType;
use crate::error::ModelError;
use crate::gguf::Metadata;
use crate::pooling::{self, PoolingSetting};
use crate::tensors::{Tensor, TensorTable};
use crate::tokenizer::{self, TokenizerBundle};

pub use bare::BareModel;

/// An opened checkpoint: a GGUF file (all its parts), or a folder of config.json and safetensors.
#[derive(Debug)]
pub struct Checkpoint {
    name: String,
    config: ModelConfig,
    tensors: TensorTable,
    by_role: HashMap<Weight, Tensor>,
    /// Rows of q and k are in the order of interleaved rope.
    interleaved: bool,
    /// What the family's stored norms lack.
    norm_offset: f32,
    fingerprint: [u8; 32],
    source: Source,
}

/// Where the tokenizer is.
#[derive(Debug)]
enum Source {
    Gguf(Metadata),
    Folder(PathBuf),
}

/// Role of a tensor, the same for every family and format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Weight {
    /// `[vocab, hidden]`.
    Embedding,
    /// `[vocab, hidden]`; the embedding where tied.
    Output,
    /// `[hidden]`.
    OutputNorm,
    /// A tensor of one layer.
    Layer(usize, LayerWeight),
}

/// Role of a tensor within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum LayerWeight {
    AttentionNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    O,
    PostAttentionNorm,
    MlpNorm,
    Gate,
    Up,
    Down,
    PostMlpNorm,
}

/// A stored matrix `[rows, cols]`, row-major, blocks of quantised types along a row.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// Element type.
    pub dtype: DType,
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `rows * dtype.row_bytes(cols)` bytes of the memory map.
    pub data: &'a [u8],
    /// Rows of each head are stored for interleaved rope (GGUF of Llama's family): row 2i belongs at i, and row 2i + 1
    /// at i + head_dim / 2, within its head.
    pub interleaved: bool,
}

impl Checkpoint {
    /// Opens and checks everything: headers, shapes against the configuration, presence of every tensor. Reads no
    /// weights but those that the fingerprint samples.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        load::open(path)
    }

    /// The model's shape.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The file's stem or the folder's name: the served name unless another is given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of all tensors on disk.
    pub fn weight_bytes(&self) -> u64 {
        self.tensors.total_bytes()
    }

    /// BLAKE3 of config, tokenizer and each tensor's name, dtype, shape and sampled bytes (DESIGN section 3.4).
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    /// A matrix by role.
    pub fn matrix(&self, weight: Weight) -> Result<Matrix<'_>, ModelError> {
        let tied = weight == Weight::Output && self.config.tied_embeddings;
        let stored = if tied { Weight::Embedding } else { weight };
        let tensor = self.by_role.get(&stored).filter(|tensor| tensor.shape.dims().len() == 2);
        let Some(tensor) = tensor else {
            return Err(ModelError::malformed(self.path(), format!("has no matrix {weight:?}")));
        };
        Ok(Matrix {
            dtype: tensor.dtype,
            rows: tensor.shape.dims()[0],
            cols: tensor.shape.dims()[1],
            data: self.tensors.bytes(tensor),
            interleaved: self.interleaved
                && matches!(weight, Weight::Layer(_, LayerWeight::Q | LayerWeight::K)),
        })
    }

    /// A norm or bias by role, in f32, with the family's offset applied (Gemma's safetensors store norm - 1), rows in
    /// half-split order. None where this model has no such tensor.
    pub fn vector(&self, weight: Weight) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(tensor) = self.by_role.get(&weight) else { return Ok(None) };
        let &[length] = tensor.shape.dims() else {
            return Err(ModelError::malformed(
                self.path(),
                format!("has a matrix for {weight:?}, not a vector"),
            ));
        };
        let mut values = vec![0.0; length];
        dequantize_row(tensor.dtype, self.tensors.bytes(tensor), &mut values);
        match weight {
            Weight::Layer(_, LayerWeight::QBias | LayerWeight::KBias) if self.interleaved => {
                Ok(Some(half_split(&values, self.config.head_dim)))
            }
            Weight::Layer(_, LayerWeight::QBias | LayerWeight::KBias | LayerWeight::VBias) => {
                Ok(Some(values))
            }
            _ => {
                values.iter_mut().for_each(|value| *value += self.norm_offset);
                Ok(Some(values))
            }
        }
    }

    /// Lets the kernel drop the mapped pages of a matrix that was repacked.
    pub fn release(&self, matrix: &Matrix<'_>) {
        self.tensors.release(matrix.data);
    }

    /// What a router needs to tokenise for this model.
    pub fn tokenizer_bundle(&self) -> Result<TokenizerBundle, ModelError> {
        match &self.source {
            Source::Gguf(metadata) => tokenizer::gguf::bundle(metadata, &self.config, metadata.path()),
            Source::Folder(folder) => tokenizer::hub::bundle(folder, &self.config),
        }
    }

    /// How its makers pool hidden states, if they say so.
    pub fn pooling(&self) -> Result<PoolingSetting, ModelError> {
        match &self.source {
            Source::Gguf(metadata) => pooling::of_gguf(metadata),
            Source::Folder(folder) => pooling::of_folder(folder),
        }
    }

    fn path(&self) -> &Path {
        match &self.source {
            Source::Gguf(metadata) => metadata.path(),
            Source::Folder(folder) => folder,
        }
    }
}

/// Rows from the order of interleaved rope to that of half-split rope: within each head, 2i to i, and 2i + 1 to
/// i + head_dim / 2.
fn half_split(rows: &[f32], head_dim: usize) -> Vec<f32> {
    rows.chunks(head_dim)
        .flat_map(|head| (0..2).flat_map(|odd| head.iter().skip(odd).step_by(2)))
        .copied()
        .collect()
}
