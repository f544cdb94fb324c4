//! A GGUF file of anybody's making: opened or refused, and its tokenizer too.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::tokenizer::Tokenizer;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| TempDir::new().expect("a temporary folder"));

fuzz_target!(|bytes: &[u8]| {
    let path = FOLDER.path().join("model.gguf");
    std::fs::write(&path, bytes).expect("a writable folder");
    if let Ok(checkpoint) = Checkpoint::open(&path)
        && let Ok(bundle) = checkpoint.tokenizer_bundle()
    {
        drop(Tokenizer::new(&bundle));
    }
});
