//! Tiny checkpoints written by hand, so that any part of them can be wrong.

#![allow(dead_code, reason = "each test binary uses its own part")]

pub(crate) mod gguf;
pub(crate) mod hub;

use std::path::{Path, PathBuf};

/// A real model's file under THALWEG_TEST_MODELS.
pub(crate) fn real_model(name: &str) -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../.cache/models").to_owned();
    let path = Path::new(&std::env::var("THALWEG_TEST_MODELS").unwrap_or(default)).join(name);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

/// The message of a checkpoint that must not open.
pub(crate) fn refusal(path: &Path) -> String {
    match thalweg_model::checkpoint::Checkpoint::open(path) {
        Ok(_) => panic!("{} opened", path.display()),
        Err(error) => error.to_string(),
    }
}

/// Asserts that a message holds every one of these.
pub(crate) fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "`{message}` does not say `{part}`");
    }
}
