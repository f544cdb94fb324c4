//! The tiny checkpoints of every family (tests/reference/tiny.py): each opens, with its tokenizer, and its
//! configuration is the one that was written.

use std::path::{Path, PathBuf};

use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Weight};
use thalweg_model::config::{Architecture, LayerKind, ModelConfig, RopeScaling};

use LayerKind::{Full, Sliding};

fn tiny_model(name: &str) -> PathBuf {
    let default = concat!(env!("CARGO_MANIFEST_DIR"), "/../.cache/tiny").to_owned();
    let path = Path::new(&std::env::var("THALWEG_TINY_MODELS").unwrap_or(default)).join(name);
    assert!(path.join("config.json").exists(), "{} is missing: run make test-models", path.display());
    path
}

fn check(name: &str, architecture: Architecture, layers: &[LayerKind], says: impl Fn(&ModelConfig) -> bool) {
    let model = Checkpoint::open(&tiny_model(name)).unwrap();
    let config = model.config();
    assert_eq!((model.name(), config.architecture, config.layers.as_slice()), (name, architecture, layers));
    assert_eq!((config.head_dim, config.num_kv_heads, config.vocab_size), (64, 2, 320));
    assert!(says(config), "{config:?}");
    let last = Weight::Layer(layers.len() - 1, LayerWeight::O);
    assert_eq!(model.matrix(last).unwrap().cols, 64 * config.num_heads);
    let bundle = model.tokenizer_bundle().unwrap();
    assert_eq!((bundle.vocab_size, bundle.eos_ids.as_slice()), (320, [257].as_slice()));
    assert!(bundle.chat_template.is_some());
}

#[test]
fn every_family_opens_as_it_was_written() {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    check("llama2", Architecture::Llama, &[Full; 3], |c| c.rope.theta == 1e4 && !c.tied_embeddings);
    check("llama3", Architecture::Llama, &[Full; 2], |c| c.rope.scaling == llama3 && c.gqa_group() == 3);
    check("mistral", Architecture::Mistral, &[Sliding; 2], |c| c.sliding_window == Some(8));
    check("qwen2", Architecture::Qwen2, &[Full; 2], |c| c.qkv_bias && c.tied_embeddings);
    check("qwen3", Architecture::Qwen3, &[Full; 2], |c| c.qk_norm && !c.post_norms);
    let gemma = [Sliding, Sliding, Sliding, Sliding, Sliding, Full, Sliding];
    check("gemma3", Architecture::Gemma3, &gemma, |c| {
        c.attention_scale == 48f32.sqrt().recip()
            && c.rope.scaling == RopeScaling::Linear { factor: 8.0 }
            && (c.local_rope.theta, c.local_rope.scaling) == (1e4, RopeScaling::None)
    });
}
