//! Where the models that tests need lie.

use std::path::{Path, PathBuf};

/// SmolLM2-135M-Instruct, Q4_1.
pub fn smollm2() -> PathBuf {
    model("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// Gemma 3 270M base, Q4_K_M.
pub fn gemma3() -> PathBuf {
    model("gemma-3-270m-q4_k_m.gguf")
}

/// A family's model of random weights, 512 tokens of context and a byte a token, such as `llama3`.
pub fn tiny(family: &str) -> PathBuf {
    model(&format!("../tiny/{family}"))
}

fn model(name: &str) -> PathBuf {
    let of_workspace = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/models");
    let folder = std::env::var_os("THALWEG_TEST_MODELS").map_or_else(of_workspace, PathBuf::from);
    let file = folder.join(name);
    assert!(file.exists(), "{} is missing: run make test-models", file.display());
    file
}
