//! The two real models of the tests, against what their authors publish about them.

use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Weight};
use thalweg_model::config::{Activation, Architecture, LayerKind, ModelConfig, Rope, RopeScaling};
use thalweg_model::dtype::DType;

use crate::support::real_model;

const fn rope(theta: f32) -> Rope {
    Rope { theta, scaling: RopeScaling::None }
}

#[test]
fn smollm2_is_what_its_authors_say() {
    let model = Checkpoint::open(&real_model("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    let expected = ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 576,
        intermediate_size: 1536,
        num_heads: 9,
        num_kv_heads: 3,
        head_dim: 64,
        vocab_size: 49_152,
        max_position: 8192,
        rms_norm_eps: 1e-5,
        attention_scale: 0.125,
        embedding_scale: 1.0,
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: false,
        post_norms: false,
        activation: Activation::Silu,
        layers: vec![LayerKind::Full; 30],
        sliding_window: None,
        rope: rope(100_000.0),
        local_rope: rope(100_000.0),
    };
    assert_eq!(model.config(), &expected);
    assert_eq!(model.name(), "SmolLM2-135M-Instruct.Q4_1");
    let q = model.matrix(Weight::Layer(29, LayerWeight::Q)).unwrap();
    assert_eq!((q.dtype, q.rows, q.cols, q.interleaved), (DType::Q4_1, 576, 576, true));
    let v = model.matrix(Weight::Layer(29, LayerWeight::V)).unwrap();
    assert_eq!((v.rows, v.cols, v.interleaved), (192, 576, false));
    let output = model.matrix(Weight::Output).unwrap();
    assert_eq!((output.dtype, output.rows, output.cols), (DType::Q8_0, 49_152, 576));
    let norm = model.vector(Weight::OutputNorm).unwrap().unwrap();
    assert_eq!(norm.len(), 576);
    assert_eq!(model.vector(Weight::Layer(0, LayerWeight::QNorm)).unwrap(), None);
    assert!(model.weight_bytes() < 98_362_432);
}

#[test]
fn gemma3_is_what_its_authors_say() {
    let model = Checkpoint::open(&real_model("gemma-3-270m-q4_k_m.gguf")).unwrap();
    let kind = |layer: usize| if layer % 6 == 5 { LayerKind::Full } else { LayerKind::Sliding };
    let expected = ModelConfig {
        architecture: Architecture::Gemma3,
        hidden_size: 640,
        intermediate_size: 2048,
        num_heads: 4,
        num_kv_heads: 1,
        head_dim: 256,
        vocab_size: 262_144,
        max_position: 32_768,
        rms_norm_eps: 1e-6,
        attention_scale: 0.0625,
        embedding_scale: 640f32.sqrt(),
        tied_embeddings: true,
        qkv_bias: false,
        qk_norm: true,
        post_norms: true,
        activation: Activation::GeluTanh,
        layers: (0..18).map(kind).collect(),
        sliding_window: Some(512),
        rope: rope(1_000_000.0),
        local_rope: rope(10_000.0),
    };
    assert_eq!(model.config(), &expected);
    let q = model.matrix(Weight::Layer(0, LayerWeight::Q)).unwrap();
    assert_eq!((q.dtype, q.rows, q.cols, q.interleaved), (DType::Q5_0, 1024, 640, false));
    let k_norm = model.vector(Weight::Layer(17, LayerWeight::KNorm)).unwrap().unwrap();
    assert_eq!(k_norm.len(), 256);
}

#[test]
fn opening_twice_gives_one_fingerprint_and_two_models_give_two() {
    let fingerprint = |name| Checkpoint::open(&real_model(name)).unwrap().fingerprint();
    let smollm2 = fingerprint("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert_eq!(smollm2, fingerprint("SmolLM2-135M-Instruct.Q4_1.gguf"));
    assert_ne!(smollm2, fingerprint("gemma-3-270m-q4_k_m.gguf"));
}

#[test]
fn released_pages_come_back_with_the_same_bytes() {
    let model = Checkpoint::open(&real_model("SmolLM2-135M-Instruct.Q4_1.gguf")).unwrap();
    let matrix = model.matrix(Weight::Layer(3, LayerWeight::Down)).unwrap();
    let before = matrix.data.to_vec();
    model.release(&matrix);
    assert!(matrix.data == before);
}
