//! One safetensors file.

use std::path::Path;
use std::sync::Arc;

use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors};

use crate::dtype::DType;
use crate::error::ModelError;
use crate::mmap::FileMap;
use crate::tensors::{Shape, Tensor, TensorTable};

/// Bytes of the length that a file begins with.
const LENGTH_BYTES: usize = 8;

/// Adds the file's tensors that `wanted` picks to the table.
pub(super) fn read(
    path: &Path,
    wanted: impl Fn(&str) -> bool,
    table: &mut TensorTable,
) -> Result<(), ModelError> {
    let file = Arc::new(FileMap::open(path)?);
    let (header_bytes, header) =
        SafeTensors::read_metadata(file.bytes()).map_err(|error| malformed(path, &error))?;
    let data_start = LENGTH_BYTES + header_bytes;
    let index = table.add_file(Arc::clone(&file));
    for name in header.offset_keys().iter().filter(|name| wanted(name)) {
        let Some(info) = header.info(name) else { continue };
        let dtype = dtype_of(path, name, info.dtype)?;
        let Some(shape) = Shape::new(&info.shape) else {
            let reason = format!("tensor `{name}` has impossible dimensions {:?}", info.shape);
            return Err(ModelError::malformed(path, reason));
        };
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        table.insert(name, Tensor { dtype, shape, file: index, range })?;
    }
    Ok(())
}

fn dtype_of(path: &Path, name: &str, dtype: Dtype) -> Result<DType, ModelError> {
    match dtype {
        Dtype::F32 => Ok(DType::F32),
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        other => Err(ModelError::unsupported(
            path,
            format!("tensor `{name}` of type {other:?}"),
            "use the unquantised (bf16) model, or a GGUF file of it",
        )),
    }
}

fn malformed(path: &Path, error: &SafeTensorError) -> ModelError {
    let reason = match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            "its length is not what its header says: it is cut short or corrupt, fetch it again".to_owned()
        }
        SafeTensorError::HeaderTooSmall
        | SafeTensorError::HeaderTooLarge
        | SafeTensorError::InvalidHeaderLength => {
            format!("is not a safetensors file, or is cut short ({error})")
        }
        _ => format!("is not a valid safetensors file: {error}"),
    };
    ModelError::malformed(path, reason)
}
