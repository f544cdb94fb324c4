//! One hash that tells models apart without reading all of their weights (DESIGN section 3.4).

use std::path::Path;

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::tensors::{Tensor, TensorTable};

/// Names the rule below; a change of the rule changes it.
const VERSION: &[u8] = b"thalweg model fingerprint 1";
/// The same for adapters.
const ADAPTER_VERSION: &[u8] = b"thalweg adapter fingerprint 1";
/// Sampled places of a tensor, evenly spread from its first byte to its last.
const SAMPLES: usize = 16;
/// Bytes read at each place.
const SAMPLE_BYTES: usize = 4096;

/// BLAKE3 of config, tokenizer (fed by `tokenizer`), and each tensor's name, type, shape and sampled bytes. How tensors
/// are spread over files does not matter.
pub(super) fn compute(
    path: &Path,
    config: &ModelConfig,
    tensors: &TensorTable,
    tokenizer: impl FnOnce(&mut blake3::Hasher) -> Result<(), ModelError>,
) -> Result<[u8; 32], ModelError> {
    let config_json = serde_json::to_string(config)
        .map_err(|error| ModelError::malformed(path, format!("its configuration has no JSON: {error}")))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(VERSION);
    update(&mut hasher, config_json.as_bytes());
    tokenizer(&mut hasher)?;
    update_tensors(&mut hasher, tensors)?;
    Ok(*hasher.finalize().as_bytes())
}

/// The same of a LoRA adapter: of what its products are scaled by, and of its tensors.
pub(crate) fn of_adapter(scale: f32, tensors: &TensorTable) -> Result<[u8; 32], ModelError> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(ADAPTER_VERSION);
    update(&mut hasher, &scale.to_le_bytes());
    update_tensors(&mut hasher, tensors)?;
    Ok(*hasher.finalize().as_bytes())
}

fn update_tensors(hasher: &mut blake3::Hasher, tensors: &TensorTable) -> Result<(), ModelError> {
    let mut sample = vec![0; SAMPLES * SAMPLE_BYTES];
    for (name, tensor) in tensors.iter() {
        update(hasher, name.as_bytes());
        update(hasher, format!("{:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
        update(hasher, read_sample(tensors, tensor, &mut sample)?);
    }
    Ok(())
}

fn update(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// The whole of a small tensor, or what lies at the sampled places.
fn read_sample<'a>(
    tensors: &TensorTable,
    tensor: &Tensor,
    sample: &'a mut [u8],
) -> Result<&'a [u8], ModelError> {
    let (file, range) = (tensors.file(tensor), &tensor.range);
    if range.len() <= sample.len() {
        let sample = &mut sample[..range.len()];
        file.read_at(sample, range.start)?;
        return Ok(sample);
    }
    for (index, part) in sample.chunks_exact_mut(SAMPLE_BYTES).enumerate() {
        let offset = (range.len() - SAMPLE_BYTES) as u128 * index as u128 / (SAMPLES as u128 - 1);
        file.read_at(part, range.start + offset as usize)?;
    }
    Ok(sample)
}
