//! How a checkpoint's hidden states become one vector for a text: what its makers wrote beside the weights.

use std::path::{Component, Path};

use crate::error::ModelError;
use crate::gguf::Metadata;
use crate::hub::read_object;

/// Which hidden states of a prompt, behind the final norm, make its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pooling {
    /// That of the last token.
    Last,
    /// The mean of all tokens'.
    Mean,
}

/// What a checkpoint says of its embeddings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PoolingSetting {
    /// Nothing.
    #[default]
    Unset,
    /// One of those that there are here.
    Set(Pooling),
    /// Something else, which must not be taken for one of them: in words.
    Unsupported(String),
}

/// Modules of sentence-transformers, in order.
const MODULES: &str = "modules.json";
/// Where its pooling is described unless the modules say otherwise.
const POOLING_FOLDER: &str = "1_Pooling";
/// Ends of module types that change nothing here: the decoder itself, and the scaling to length 1, which is always done.
const PLAIN_MODULES: [&str; 2] = ["Transformer", "Normalize"];
/// Prefix of the switches in a pooling's config.json.
const MODE: &str = "pooling_mode_";

/// Reads sentence-transformers' modules.json and 1_Pooling/config.json, as far as they are there.
pub(crate) fn of_folder(folder: &Path) -> Result<PoolingSetting, ModelError> {
    let modules = folder.join(MODULES);
    let mut place = POOLING_FOLDER.to_owned();
    if modules.exists() {
        let text = std::fs::read(&modules).map_err(|source| ModelError::io(&modules, source))?;
        let list: Vec<Module> = serde_json::from_slice(&text)
            .map_err(|error| ModelError::malformed(&modules, format!("is no list of modules: {error}")))?;
        for module in list {
            let kind = module.kind.rsplit('.').next().unwrap_or_default();
            if kind == "Pooling" {
                place = module.path;
            } else if !PLAIN_MODULES.contains(&kind) {
                return Ok(PoolingSetting::Unsupported(format!("{MODULES} has a module `{kind}`")));
            }
        }
    }
    if Path::new(&place).components().any(|part| !matches!(part, Component::Normal(_))) {
        let reason = format!("names the folder `{place}`, expected one of this folder");
        return Err(ModelError::malformed(&modules, reason));
    }
    let path = folder.join(place).join("config.json");
    if path.exists() { of_config(&path) } else { Ok(PoolingSetting::Unset) }
}

#[derive(serde::Deserialize)]
struct Module {
    #[serde(default)]
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

fn of_config(path: &Path) -> Result<PoolingSetting, ModelError> {
    let object = read_object(path)?;
    let is_on = |name: &&String| object.get(name.as_str()) == Some(&serde_json::Value::Bool(true));
    let modes: Vec<&str> = object
        .keys()
        .filter(|name| name.starts_with(MODE))
        .filter(is_on)
        .map(|name| &name[MODE.len()..])
        .collect();
    Ok(match modes.as_slice() {
        [] => PoolingSetting::Unset,
        ["lasttoken"] => PoolingSetting::Set(Pooling::Last),
        ["mean_tokens"] => PoolingSetting::Set(Pooling::Mean),
        others => PoolingSetting::Unsupported(format!("its pooling is {}", others.join(" with "))),
    })
}

/// Reads `ARCHITECTURE.pooling_type`.
pub(crate) fn of_gguf(metadata: &Metadata) -> Result<PoolingSetting, ModelError> {
    let key = format!("{}.pooling_type", metadata.string("general.architecture")?.unwrap_or_default());
    Ok(match metadata.u32(&key)? {
        None | Some(0) => PoolingSetting::Unset,
        Some(1) => PoolingSetting::Set(Pooling::Mean),
        Some(3) => PoolingSetting::Set(Pooling::Last),
        Some(2) => PoolingSetting::Unsupported("its pooling is that of a class token".to_owned()),
        Some(4) => PoolingSetting::Unsupported("it ranks texts".to_owned()),
        Some(other) => PoolingSetting::Unsupported(format!("`{key}` is {other}")),
    })
}
