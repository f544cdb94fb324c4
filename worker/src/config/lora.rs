//! Settings of LoRA adapters.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use crate::backend::cpu::RANK_MAX;

/// Adapters that a worker serves beside its model. All are loaded at the start.
#[derive(Args, Clone, Debug)]
pub struct LoraConfig {
    /// Serve LoRA adapters beside the model
    #[arg(long, env = "THALWEG_ENABLE_LORA")]
    pub enable_lora: bool,

    /// Adapters, each a name for requests and a folder that PEFT has written
    #[arg(long, env = "THALWEG_LORA_MODULES", value_name = "NAME=FOLDER", num_args = 1.., value_delimiter = ',')]
    pub lora_modules: Vec<LoraModule>,

    /// Adapters that the device has room for. Default: as many as --lora-modules names
    #[arg(long, env = "THALWEG_MAX_LORAS", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_loras: Option<u32>,

    /// Largest rank of an adapter
    #[arg(long, env = "THALWEG_MAX_LORA_RANK", value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=RANK_MAX as i64))]
    pub max_lora_rank: u32,
}

/// An adapter by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraModule {
    /// What requests call it.
    pub name: String,
    /// Where it lies.
    pub path: PathBuf,
}

impl FromStr for LoraModule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err("expected a name and a folder, such as sql=/models/sql-adapter".to_owned()),
        }
    }
}
