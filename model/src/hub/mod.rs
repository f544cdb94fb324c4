//! A folder as model hubs have it: config.json, and safetensors in one file or in shards named by an index.

mod config;
mod json;
mod rope;
mod shard;

use std::collections::BTreeMap;
use std::path::{Component, Path};

pub(crate) use self::json::{Keys, read_object};
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::tensors::TensorTable;

const CONFIG: &str = "config.json";
const WHOLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files that decide how text becomes token ids and when a generation ends; each may be absent.
const TOKENIZER_FILES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// Reads the configuration alone.
pub(crate) fn read_config(folder: &Path) -> Result<ModelConfig, ModelError> {
    if !folder.join(CONFIG).exists() {
        let reason = "has no config.json: give a model's folder, or a .gguf file";
        return Err(ModelError::malformed(folder, reason));
    }
    config::read(&folder.join(CONFIG))
}

/// Reads the configuration and the header of every shard.
pub(crate) fn read(folder: &Path) -> Result<(ModelConfig, TensorTable), ModelError> {
    let config = read_config(folder)?;
    let mut table = TensorTable::default();
    if folder.join(WHOLE).exists() {
        shard::read(&folder.join(WHOLE), |_| true, &mut table)?;
    } else if folder.join(INDEX).exists() {
        read_shards(folder, &mut table)?;
    } else {
        let reason = format!("has neither {WHOLE} nor {INDEX}: fetch the model's weights as safetensors");
        return Err(ModelError::malformed(folder, reason));
    }
    Ok((config, table))
}

/// Reads the header of one file, all of its tensors.
pub(crate) fn read_safetensors(path: &Path, table: &mut TensorTable) -> Result<(), ModelError> {
    shard::read(path, |_| true, table)
}

/// Feeds the tokenizer's files to a hash, each with its name and length.
pub(crate) fn hash_tokenizer(folder: &Path, hasher: &mut blake3::Hasher) -> Result<(), ModelError> {
    for name in TOKENIZER_FILES {
        let path = folder.join(name);
        if !path.exists() {
            continue;
        }
        let bytes = std::fs::read(&path).map_err(|source| ModelError::io(&path, source))?;
        hasher.update(name.as_bytes());
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(&bytes);
    }
    Ok(())
}

fn read_shards(folder: &Path, table: &mut TensorTable) -> Result<(), ModelError> {
    let path = folder.join(INDEX);
    let index = read_object(&path)?;
    let shard_of: BTreeMap<String, String> = Keys { path: &path, object: &index }.required("weight_map")?;
    let mut shards: Vec<&String> = shard_of.values().collect();
    shards.sort_unstable();
    shards.dedup();
    for name in shards {
        if Path::new(name).components().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(ModelError::malformed(
                &path,
                format!("names shard `{name}`, expected a file of this folder"),
            ));
        }
        let shard = folder.join(name);
        if !shard.exists() {
            return Err(ModelError::malformed(
                &shard,
                format!("is missing, but {INDEX} names it: fetch it again"),
            ));
        }
        shard::read(&shard, |tensor| shard_of.get(tensor) == Some(name), table)?;
    }
    match shard_of.iter().find(|(tensor, _)| table.get(tensor).is_none()) {
        None => Ok(()),
        Some((tensor, shard)) => {
            let reason = format!("has no tensor `{tensor}`, but {INDEX} says so: it is of another model");
            Err(ModelError::malformed(&folder.join(shard), reason))
        }
    }
}
