//! From what a user calls a model to a path: a file, a folder, or a repository of the Hugging Face hub.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo};
use thalweg_model::checkpoint::{BareModel, Checkpoint};
use thalweg_worker::config::{LoadFormat, WorkerConfig};

use crate::options::BadOption;

/// Files beside the weights that a checkpoint of safetensors needs, where the repository has them.
const COMPANIONS: [&str; 6] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

/// Opens the model where it is on this machine, so that a wrong one is told before anything listens. What only the hub knows
/// is told when it is asked.
pub(crate) fn check(config: &WorkerConfig) -> anyhow::Result<()> {
    let path = PathBuf::from(&config.model);
    let path = match HubId::parse(&config.model) {
        _ if path.exists() => path,
        None => return Err(unknown(&config.model)),
        Some(id) if is_offline() => id.cached()?,
        Some(_) => return Ok(()),
    };
    match config.gpu.load_format {
        LoadFormat::Dummy => drop(BareModel::open(&path)?),
        LoadFormat::Auto => drop(Checkpoint::open(&path)?),
    }
    Ok(())
}

fn unknown(reference: &str) -> anyhow::Error {
    BadOption::because(format!(
        "--model {reference}: no such file or folder, and no hub id (owner/name or owner/name:part-of-file)"
    ))
}

fn is_offline() -> bool {
    std::env::var("HF_HUB_OFFLINE").is_ok_and(|v| !["", "0", "false"].contains(&&*v.to_lowercase()))
}

/// The path of a model; downloads it first where it is a hub id that the cache does not have.
pub(crate) async fn resolve(reference: &str) -> anyhow::Result<PathBuf> {
    let path = PathBuf::from(reference);
    if path.exists() {
        return Ok(path);
    }
    let Some(id) = HubId::parse(reference) else { return Err(unknown(reference)) };
    tokio::task::spawn_blocking(move || id.fetch()).await?
}

/// `owner/name`, and after a colon what the wanted GGUF file's name holds, such as its quantisation.
#[derive(Debug, PartialEq)]
struct HubId {
    repository: String,
    part: Option<String>,
}

impl HubId {
    fn parse(text: &str) -> Option<Self> {
        let (repository, part) = match text.split_once(':') {
            Some((repository, part)) => (repository, Some(part.to_owned())),
            None => (text, None),
        };
        let (owner, name) = repository.split_once('/')?;
        let plain = |s: &str| {
            s.starts_with(|c: char| c.is_ascii_alphanumeric())
                && s.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let file = [".gguf", ".safetensors", ".json"].iter().any(|ending| name.ends_with(ending));
        (plain(owner) && plain(name) && !file && part.as_deref() != Some(""))
            .then(|| Self { repository: repository.to_owned(), part })
    }

    fn fetch(&self) -> anyhow::Result<PathBuf> {
        if is_offline() { self.cached() } else { self.download() }
    }

    /// What an earlier download left.
    fn cached(&self) -> anyhow::Result<PathBuf> {
        let cache = Cache::from_env();
        let missing =
            || format!("--model {}: not in the hub cache, and HF_HUB_OFFLINE is set", self.repository);
        let folder = cache.path().join(Repo::model(self.repository.clone()).folder_name());
        let commit = std::fs::read_to_string(folder.join("refs/main")).with_context(missing)?;
        let snapshot = folder.join("snapshots").join(commit.trim());
        let entries = std::fs::read_dir(&snapshot).with_context(missing)?;
        let names: Vec<String> =
            entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        match self.wanted(&names)? {
            Wanted::Gguf(parts) => Ok(snapshot.join(&parts[0])),
            Wanted::Folder(_) => Ok(snapshot),
        }
    }

    fn download(&self) -> anyhow::Result<PathBuf> {
        let failed = || {
            let id = &self.repository;
            format!(
                "--model {id}: no such file or folder here, and the hub cannot be asked; is there a network?"
            )
        };
        let repository = ApiBuilder::from_env().build().with_context(failed)?.model(self.repository.clone());
        let listing = repository.info().with_context(failed)?;
        let names: Vec<String> = listing.siblings.into_iter().map(|s| s.rfilename).collect();
        match self.wanted(&names)? {
            Wanted::Gguf(parts) => get(&repository, &parts),
            Wanted::Folder(files) => {
                let first = get(&repository, &files)?;
                Ok(first.parent().unwrap_or(Path::new(".")).to_owned())
            }
        }
    }

    fn wanted(&self, names: &[String]) -> anyhow::Result<Wanted> {
        let top = || names.iter().filter(|name| !name.contains('/'));
        let has_safetensors = top().any(|name| name.ends_with(".safetensors"));
        if has_safetensors && self.part.is_none() {
            ensure!(
                top().any(|name| name == "config.json"),
                "{}: the repository has no config.json",
                self.repository
            );
            let weights = |n: &str| n.ends_with(".safetensors") || n.ends_with(".safetensors.index.json");
            return Ok(Wanted::Folder(
                top().filter(|n| COMPANIONS.contains(&&***n) || weights(n)).cloned().collect(),
            ));
        }
        let part = self.part.clone().unwrap_or_default().to_lowercase();
        let fits = |name: &&String| name.ends_with(".gguf") && name.to_lowercase().contains(&part);
        let mut files: Vec<String> = names.iter().filter(fits).cloned().collect();
        files.sort();
        let stems: std::collections::BTreeSet<&str> = files.iter().map(|name| split_stem(name)).collect();
        match stems.len() {
            1 => Ok(Wanted::Gguf(files)),
            0 => bail!("{}: the repository has no such GGUF file and no safetensors", self.repository),
            _ => {
                let choice = files.join(", ");
                bail!("{0}: which of {choice}? Name a part, such as {0}:Q4_K_M", self.repository)
            }
        }
    }
}

#[derive(Debug, PartialEq)]
enum Wanted {
    /// Parts in order.
    Gguf(Vec<String>),
    /// Files of one folder.
    Folder(Vec<String>),
}

/// Name without `-00001-of-00003.gguf`: parts of one model share it.
fn split_stem(name: &str) -> &str {
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let cut = stem.rsplit_once("-of-").and_then(|(front, total)| {
        let (front, number) = front.rsplit_once('-')?;
        let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
        (digits(total) && digits(number)).then_some(front)
    });
    cut.unwrap_or(stem)
}

/// Downloads what the cache lacks; the first file's path.
fn get(repository: &ApiRepo, files: &[String]) -> anyhow::Result<PathBuf> {
    let mut first = None;
    for file in files {
        tracing::info!(file, "fetching from the hub, unless cached");
        let path = repository.get(file).with_context(|| format!("downloading {file} from the hub"))?;
        first.get_or_insert(path);
    }
    first.context("nothing to download")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_told_from_paths() {
        let id = |text: &str| HubId::parse(text).map(|id| (id.repository, id.part));
        assert_eq!(id("org/name-1.5"), Some(("org/name-1.5".to_owned(), None)));
        assert_eq!(id("org/name:Q4_K_M"), Some(("org/name".to_owned(), Some("Q4_K_M".to_owned()))));
        for path in ["name", "/a/b", "./a/b", "../b", "a/b/c", "a/b.gguf", "a b/c", "", "/", "a/", "a/b:"] {
            assert_eq!(id(path), None, "{path:?}");
        }
    }

    fn check(id: &str, names: &[&str], expected: Result<Wanted, &str>) {
        let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
        let result = HubId::parse(id).unwrap().wanted(&names);
        match (result, expected) {
            (Ok(wanted), Ok(expected)) => assert_eq!(wanted, expected, "{id} {names:?}"),
            (Err(error), Err(says)) => assert!(error.to_string().contains(says), "{id}: {error}"),
            (result, expected) => panic!("{id} {names:?}: {result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn files_are_chosen_from_a_listing() {
        let own = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let folder =
            ["README.md", "config.json", "model.safetensors", "onnx/model.safetensors", "tokenizer.json"];
        check(
            "o/n",
            &folder,
            Ok(Wanted::Folder(own(&["config.json", "model.safetensors", "tokenizer.json"]))),
        );
        check("o/n", &["model.safetensors"], Err("no config.json"));
        check("o/n", &["a.Q4_0.gguf"], Ok(Wanted::Gguf(own(&["a.Q4_0.gguf"]))));
        check("o/n:q8", &["a.Q4_0.gguf", "a.Q8_0.gguf"], Ok(Wanted::Gguf(own(&["a.Q8_0.gguf"]))));
        check("o/n", &["a.Q4_0.gguf", "a.Q8_0.gguf"], Err("which of a.Q4_0.gguf, a.Q8_0.gguf"));
        check("o/n:q5", &["a.Q4_0.gguf"], Err("no such GGUF"));
        check("o/n", &["README.md"], Err("no such GGUF"));
        let split = ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"];
        check("o/n", &split, Ok(Wanted::Gguf(own(&split))));
    }
}
