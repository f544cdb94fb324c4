//! The two real models, opened once.

use std::sync::OnceLock;

use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::tokenizer::{Tokenizer, TokenizerBundle};

use crate::support::real_model;

pub(crate) fn smollm() -> &'static Tokenizer {
    static MODEL: OnceLock<Tokenizer> = OnceLock::new();
    MODEL.get_or_init(|| Tokenizer::new(&bundle("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap())
}

pub(crate) fn gemma() -> &'static Tokenizer {
    static MODEL: OnceLock<Tokenizer> = OnceLock::new();
    MODEL.get_or_init(|| Tokenizer::new(&bundle("gemma-3-270m-q4_k_m.gguf")).unwrap())
}

pub(crate) fn bundle(file: &str) -> TokenizerBundle {
    Checkpoint::open(&real_model(file)).unwrap().tokenizer_bundle().unwrap()
}
