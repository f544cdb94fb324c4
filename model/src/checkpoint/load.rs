//! Opening: from either format's tables to tensors by role.

use std::collections::BTreeSet;
use std::path::Path;

use hashbrown::HashMap;

use super::roles::{self, Dims, Naming};
use super::{Checkpoint, Source, Weight, fingerprint};
use crate::config::{Architecture, ModelConfig};
use crate::dtype::DType;
use crate::error::ModelError;
use crate::tensors::{Tensor, TensorTable};
use crate::{gguf, hub};

pub(super) fn open(path: &Path) -> Result<Checkpoint, ModelError> {
    let about = std::fs::metadata(path).map_err(|source| ModelError::io(path, source))?;
    if about.is_dir() {
        return open_folder(path);
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => Err(ModelError::unsupported(
            path,
            "a safetensors file without its config.json",
            "give the folder that holds both",
        )),
        _ => open_gguf(path),
    }
}

fn open_gguf(path: &Path) -> Result<Checkpoint, ModelError> {
    let (metadata, config, tensors) = gguf::read(path)?;
    let by_role = by_role(path, &config, &tensors, Naming::Gguf)?;
    let fingerprint = fingerprint::compute(path, &config, &tensors, |hasher| {
        metadata.hash("tokenizer.", hasher);
        Ok(())
    })?;
    let name = gguf::model_name(path);
    let interleaved = matches!(config.architecture, Architecture::Llama | Architecture::Mistral);
    let source = Source::Gguf(metadata);
    Ok(Checkpoint { name, config, tensors, by_role, interleaved, norm_offset: 0.0, fingerprint, source })
}

fn open_folder(path: &Path) -> Result<Checkpoint, ModelError> {
    let (mut config, tensors) = hub::read(path)?;
    let by_role = by_role(path, &config, &tensors, Naming::Hub)?;
    if let Some(embedding) = by_role.get(&Weight::Embedding) {
        config.embedding_scale = rounded(config.embedding_scale, embedding.dtype);
    }
    let fingerprint =
        fingerprint::compute(path, &config, &tensors, |hasher| hub::hash_tokenizer(path, hasher))?;
    let name = folder_name(path)?;
    let norm_offset = if config.architecture == Architecture::Gemma3 { 1.0 } else { 0.0 };
    let source = Source::Folder(path.to_owned());
    Ok(Checkpoint { name, config, tensors, by_role, interleaved: false, norm_offset, fingerprint, source })
}

/// The reference keeps the embedding's scale in the type of the embedding.
pub(super) fn rounded(scale: f32, dtype: DType) -> f32 {
    match dtype {
        DType::BF16 => half::bf16::from_f32(scale).to_f32(),
        DType::F16 => half::f16::from_f32(scale).to_f32(),
        _ => scale,
    }
}

/// The folder's own name, also where the path is `.`.
pub(super) fn folder_name(path: &Path) -> Result<String, ModelError> {
    let absolute = match path.file_name() {
        Some(_) => path.to_owned(),
        None => path.canonicalize().map_err(|source| ModelError::io(path, source))?,
    };
    Ok(absolute.file_name().map_or("model".to_owned(), |name| name.to_string_lossy().into_owned()))
}

/// Finds every tensor that the configuration needs, and refuses layers' tensors that it would leave out.
fn by_role(
    path: &Path,
    config: &ModelConfig,
    tensors: &TensorTable,
    naming: Naming,
) -> Result<HashMap<Weight, Tensor>, ModelError> {
    let mut found = HashMap::new();
    let mut names = BTreeSet::new();
    for (weight, dims) in roles::required(config) {
        let name = naming.name(weight, config.architecture);
        let Some(tensor) = tensors.get(&name) else {
            let reason = format!("tensor `{name}` is missing: the model is incomplete, fetch it again");
            return Err(ModelError::malformed(path, reason));
        };
        check_shape(tensors, &name, tensor, dims)?;
        found.insert(weight, tensor.clone());
        names.insert(name);
    }
    let stray = tensors.iter().find(|(name, _)| naming.matters(name) && !names.contains(*name));
    match stray {
        None => Ok(found),
        Some((name, tensor)) => Err(ModelError::unsupported(
            tensors.path(tensor),
            format!(
                "tensor `{name}` in a model of {:?} with {} layers",
                config.architecture,
                config.num_layers()
            ),
            "use a model of the plain architecture",
        )),
    }
}

fn check_shape(tensors: &TensorTable, name: &str, tensor: &Tensor, dims: Dims) -> Result<(), ModelError> {
    let (rows, cols) = dims;
    let expected = [rows, cols.unwrap_or(1)];
    let expected = &expected[..if cols.is_some() { 2 } else { 1 }];
    if tensor.shape.dims() == expected {
        return Ok(());
    }
    let reason = format!(
        "tensor `{name}` has shape {:?}, expected {expected:?} by the model's configuration",
        tensor.shape
    );
    Err(ModelError::malformed(tensors.path(tensor), reason))
}
