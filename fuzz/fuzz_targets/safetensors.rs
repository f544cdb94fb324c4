//! A folder whose config.json, up to a NUL, and whose tensors behind it are of anybody's making.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use thalweg_model::checkpoint::Checkpoint;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| TempDir::new().expect("a temporary folder"));

fuzz_target!(|bytes: &[u8]| {
    let Some(at) = bytes.iter().position(|byte| *byte == 0) else { return };
    std::fs::write(FOLDER.path().join("config.json"), &bytes[..at]).expect("a writable folder");
    std::fs::write(FOLDER.path().join("model.safetensors"), &bytes[at + 1..]).expect("a writable folder");
    drop(Checkpoint::open(FOLDER.path()));
});
