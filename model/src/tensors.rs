//! Named tensors of mapped files: what both formats' readers produce.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::ModelError;
use crate::mmap::FileMap;

/// Most tensors that a checkpoint may have.
pub(crate) const TENSORS_MAX: usize = 65_536;

/// Up to four dimensions, outermost first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    dims: [usize; 4],
    rank: usize,
}

/// A tensor that lies wholly within its file.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
    /// Which of the table's files holds it.
    pub(crate) file: usize,
    /// Its bytes there.
    pub(crate) range: Range<usize>,
}

/// All tensors of a checkpoint, by name.
#[derive(Debug, Default)]
pub(crate) struct TensorTable {
    files: Vec<Arc<FileMap>>,
    tensors: BTreeMap<Box<str>, Tensor>,
}

impl Shape {
    /// None for rank 0 or over 4, a zero dimension, or a product that overflows.
    pub(crate) fn new(dims: &[usize]) -> Option<Self> {
        let rank = dims.len();
        let elements = dims.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))?;
        if rank == 0 || rank > 4 || elements == 0 {
            return None;
        }
        let mut shape = Self { dims: [1; 4], rank };
        shape.dims[..rank].copy_from_slice(dims);
        Some(shape)
    }

    pub(crate) fn dims(&self) -> &[usize] {
        &self.dims[..self.rank]
    }

    /// Bytes of such a tensor, rows of the last dimension being whole blocks; None where they are not.
    pub(crate) fn bytes(&self, dtype: DType) -> Option<usize> {
        let (cols, outer) = self.dims().split_last()?;
        outer.iter().try_fold(dtype.row_bytes(*cols)?, |bytes, dim| bytes.checked_mul(*dim))
    }
}

impl std::fmt::Debug for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.dims().fmt(f)
    }
}

impl TensorTable {
    /// Adds a file; tensors refer to it by the returned index.
    pub(crate) fn add_file(&mut self, file: Arc<FileMap>) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Adds a tensor of a file added before. Its range must lie within the file.
    pub(crate) fn insert(&mut self, name: &str, tensor: Tensor) -> Result<(), ModelError> {
        let path = self.files[tensor.file].path();
        if self.tensors.len() >= TENSORS_MAX {
            return Err(ModelError::malformed(path, format!("has more than {TENSORS_MAX} tensors")));
        }
        match self.tensors.entry(name.into()) {
            Entry::Vacant(entry) => {
                entry.insert(tensor);
                Ok(())
            }
            Entry::Occupied(first) => {
                let other = self.files[first.get().file].path();
                let reason = if other == path {
                    format!("tensor `{name}` appears twice")
                } else {
                    let other = other.display();
                    format!("tensor `{name}` is in {other} too: these files are not parts of one model")
                };
                Err(ModelError::malformed(path, reason))
            }
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    pub(crate) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// In alphabetical order, whatever file they lie in.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor))
    }

    pub(crate) fn file(&self, tensor: &Tensor) -> &FileMap {
        &self.files[tensor.file]
    }

    pub(crate) fn path(&self, tensor: &Tensor) -> &Path {
        self.file(tensor).path()
    }

    pub(crate) fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.file(tensor).bytes()[tensor.range.clone()]
    }

    /// Bytes of all tensors.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.tensors.values().map(|tensor| tensor.range.len() as u64).sum()
    }

    /// Drops the mapped pages of a slice that [`TensorTable::bytes`] gave.
    pub(crate) fn release(&self, slice: &[u8]) {
        let address = slice.as_ptr() as usize;
        let holds = |file: &&Arc<FileMap>| file.bytes().as_ptr_range().contains(&(address as *const u8));
        if let Some(file) = self.files.iter().find(holds) {
            file.release(slice);
        }
    }
}
