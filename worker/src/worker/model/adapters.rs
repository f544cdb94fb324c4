//! LoRA adapters of a worker, held against flags and model before anything is loaded.

use thalweg_model::adapter::Adapter;
use thalweg_model::config::ModelConfig;

use crate::config::{LoraModule, WorkerConfig};
use crate::service::ServedAdapter;
use crate::worker::StartError;

/// Opens every adapter that the flags name, in their order.
pub(super) fn open(config: &WorkerConfig, model: &ModelConfig) -> Result<Vec<Adapter>, StartError> {
    check(config)?;
    let lora = &config.lora;
    let mut adapters = Vec::with_capacity(lora.lora_modules.len());
    for module in &lora.lora_modules {
        let adapter = Adapter::open(&module.path, model)?;
        let (rank, most) = (adapter.rank(), lora.max_lora_rank);
        if rank > most as usize {
            let reason = format!("its rank is {rank}; raise --max-lora-rank from {most} to {rank}");
            return Err(refused(&module.name, reason));
        }
        tracing::info!(adapter = module.name, rank, path = %module.path.display(), "adapter loaded");
        adapters.push(adapter);
    }
    Ok(adapters)
}

/// What requests may name, of adapters that [`open`] has opened.
pub(super) fn served(config: &WorkerConfig, adapters: &[Adapter]) -> Vec<ServedAdapter> {
    let fingerprints = adapters.iter().map(Adapter::fingerprint);
    let modules = config.lora.lora_modules.iter().zip(fingerprints);
    modules.map(|(module, fingerprint)| adapter(module, fingerprint.to_vec())).collect()
}

/// The same where no adapter is read, since no weights are: its name stands for what it does.
pub(super) fn named(config: &WorkerConfig) -> Vec<ServedAdapter> {
    config.lora.lora_modules.iter().map(|module| adapter(module, module.name.clone().into())).collect()
}

fn adapter(module: &LoraModule, fingerprint: Vec<u8>) -> ServedAdapter {
    ServedAdapter { name: module.name.clone(), fingerprint: fingerprint.into() }
}

/// What flags alone decide.
pub(super) fn check(config: &WorkerConfig) -> Result<(), StartError> {
    let lora = &config.lora;
    let Some(first) = lora.lora_modules.first() else { return Ok(()) };
    if !lora.enable_lora {
        return Err(refused(&first.name, "adapters are served with --enable-lora".into()));
    }
    let count = lora.lora_modules.len();
    if let Some(most) = lora.max_loras.filter(|most| count > *most as usize) {
        let reason = format!("{count} adapters are named; raise it to {count}, or name fewer");
        return Err(StartError::config("max-loras", most, reason));
    }
    for (index, module) in lora.lora_modules.iter().enumerate() {
        if lora.lora_modules[..index].iter().any(|before| before.name == module.name) {
            return Err(refused(&module.name, "the name stands for two adapters".into()));
        }
    }
    Ok(())
}

fn refused(name: &str, reason: String) -> StartError {
    StartError::config("lora-modules", name, reason)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        config: WorkerConfig,
    }

    fn check_flags(flags: &str, expected: Option<&str>) {
        let args = ["x", "--model", "m"].into_iter().chain(flags.split_whitespace());
        let error = check(&Flags::parse_from(args).config).err().map(|error| error.to_string());
        match (&error, expected) {
            (None, None) => {}
            (Some(error), Some(part)) => assert!(error.contains(part), "{flags}: {error:?} lacks {part:?}"),
            _ => panic!("{flags}: {error:?}"),
        }
    }

    #[test]
    fn flags_are_held_against_each_other() {
        check_flags("", None);
        check_flags("--enable-lora", None);
        check_flags("--enable-lora --lora-modules a=/a b=/b", None);
        check_flags("--enable-lora --lora-modules a=/a b=/b --max-loras 2", None);
        check_flags("--lora-modules a=/a", Some("--enable-lora"));
        check_flags("--enable-lora --lora-modules a=/a b=/b --max-loras 1", Some("raise it to 2"));
        check_flags("--enable-lora --lora-modules a=/a a=/b", Some("two adapters"));
    }
}
