//! config.json of every family: what it says, what its class assumes, and what is refused.

use serde_json::{Value, json};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::config::{Activation, Architecture, LayerKind, ModelConfig, RopeScaling};

use crate::support::hub::Folder;
use crate::support::{assert_says, refusal};

use LayerKind::{Full, Sliding};

fn open(folder: &Folder) -> ModelConfig {
    let path = tempfile::tempdir().unwrap();
    folder.write(path.path());
    Checkpoint::open(path.path()).unwrap().config().clone()
}

/// The tiny model's config with these keys instead; null takes a key away.
fn read(base: Folder, changes: Value) -> ModelConfig {
    open(&changed(base, changes))
}

fn changed(mut base: Folder, changes: Value) -> Folder {
    for (key, value) in changes.as_object().unwrap() {
        base.set(key, value.clone());
    }
    base
}

fn check_refused(changes: Value, words: &[&str]) {
    let path = tempfile::tempdir().unwrap();
    changed(Folder::tiny(), changes).write(path.path());
    assert_says(&refusal(path.path()), words);
}

#[test]
fn llama_with_and_without_scaling_in_both_spellings() {
    let plain = read(Folder::tiny(), json!({}));
    assert_eq!((plain.architecture, plain.head_dim, plain.attention_scale), (Architecture::Llama, 16, 0.25));
    assert_eq!((plain.layers.as_slice(), plain.sliding_window), ([Full, Full].as_slice(), None));
    assert_eq!(plain.activation, Activation::Silu);
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    });
    let older = read(Folder::tiny(), json!({ "rope_theta": 5e5, "rope_scaling": scaling }));
    assert_eq!((older.rope.theta, older.rope.scaling), (5e5, llama3));
    let mut parameters = scaling;
    parameters["rope_theta"] = json!(5e5);
    let newer = read(Folder::tiny(), json!({ "rope_theta": null, "rope_parameters": parameters }));
    assert_eq!(newer, older);
    let linear = read(Folder::tiny(), json!({ "rope_scaling": { "type": "linear", "factor": 4 } }));
    assert_eq!(linear.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    assert_eq!(linear.local_rope, linear.rope);
}

#[test]
fn mistral_slides_unless_told_not_to() {
    let mistral = |window: Value| {
        read(Folder::tiny(), json!({ "architectures": ["MistralForCausalLM"], "sliding_window": window }))
    };
    let sliding = mistral(json!(8));
    assert_eq!((sliding.layers.as_slice(), sliding.sliding_window), ([Sliding, Sliding].as_slice(), Some(8)));
    let full = mistral(Value::Null);
    assert_eq!((full.layers.as_slice(), full.sliding_window), ([Full, Full].as_slice(), None));
    let silent = read(Folder::tiny(), json!({ "architectures": ["MistralForCausalLM"] }));
    assert_eq!(silent.sliding_window, Some(4096));
}

#[test]
fn qwen2_has_biases_and_slides_only_when_switched_on() {
    let mut base = Folder::tiny();
    for layer in 0..2 {
        for (name, rows) in [("q", 32), ("k", 16), ("v", 16)] {
            base.add(&format!("model.layers.{layer}.self_attn.{name}_proj.bias"), &[rows]);
        }
    }
    let keys = json!({ "architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 1 });
    let off = read(base.clone(), keys.clone());
    assert!(off.qkv_bias);
    assert_eq!((off.layers.as_slice(), off.sliding_window), ([Full, Full].as_slice(), None));
    base.set("use_sliding_window", json!(true));
    let on = read(base, keys);
    assert_eq!((on.layers.as_slice(), on.sliding_window), ([Full, Sliding].as_slice(), Some(8)));
}

#[test]
fn qwen3_norms_q_and_k() {
    let mut base = Folder::tiny();
    for layer in 0..2 {
        for name in ["q_norm", "k_norm"] {
            base.add(&format!("model.layers.{layer}.self_attn.{name}.weight"), &[16]);
        }
    }
    let config = read(base, json!({ "architectures": ["Qwen3ForCausalLM"], "head_dim": 16 }));
    assert!(config.qk_norm && !config.qkv_bias && !config.post_norms);
}

#[test]
fn gemma3_has_two_ropes_and_two_kinds_of_layers() {
    let by_period = json!({ "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "rope_scaling": { "rope_type": "linear", "factor": 8.0 } });
    let older = read(Folder::gemma(), by_period);
    assert_eq!(older.layers, [Sliding, Full]);
    assert_eq!((older.attention_scale, older.activation), (0.125, Activation::GeluTanh));
    assert_eq!((older.rope.theta, older.rope.scaling), (1e6, RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((older.local_rope.theta, older.local_rope.scaling), (1e4, RopeScaling::None));
    assert!(older.qk_norm && older.post_norms && older.tied_embeddings);
    let by_name = json!({
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": null,
        "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 },
        },
    });
    assert_eq!(read(Folder::gemma(), by_name), older);
    let silent = read(Folder::gemma(), json!({ "rope_theta": null }));
    assert_eq!((silent.rope.theta, silent.local_rope.theta), (1e6, 1e4));
    assert_eq!(silent.layers, [Sliding, Sliding]);
}

#[test]
fn settings_out_of_bounds_name_their_key() {
    check_refused(
        json!({ "num_hidden_layers": 1_000_000 }),
        &["config.json", "num_hidden_layers", "1000000"],
    );
    check_refused(json!({ "num_hidden_layers": 0 }), &["num_hidden_layers"]);
    check_refused(json!({ "num_hidden_layers": -1 }), &["num_hidden_layers"]);
    check_refused(json!({ "hidden_size": "32" }), &["hidden_size"]);
    check_refused(json!({ "hidden_size": null }), &["hidden_size", "missing"]);
    check_refused(json!({ "num_attention_heads": 0 }), &["num_attention_heads"]);
    check_refused(json!({ "num_attention_heads": 5 }), &["hidden_size", "multiple of the 5"]);
    check_refused(json!({ "num_key_value_heads": 0 }), &["num_key_value_heads"]);
    check_refused(
        json!({ "num_attention_heads": 4, "num_key_value_heads": 3 }),
        &["num_key_value_heads", "divisor"],
    );
    check_refused(json!({ "head_dim": 15 }), &["head_dim", "even"]);
    check_refused(json!({ "head_dim": 512 }), &["head_dim", "256"]);
    check_refused(json!({ "rms_norm_eps": 0.0 }), &["rms_norm_eps"]);
    check_refused(json!({ "rms_norm_eps": 1e60 }), &["rms_norm_eps"]);
    check_refused(json!({ "rope_theta": -1.0 }), &["rope_theta"]);
    check_refused(json!({ "vocab_size": 1u64 << 40 }), &["vocab_size"]);
    check_refused(json!({ "vocab_size": 31 }), &["model.embed_tokens.weight", "[31, 32]"]);
    check_refused(json!({ "rope_scaling": { "type": "linear" } }), &["factor", "missing"]);
    check_refused(json!({ "rope_scaling": { "type": "linear", "factor": 0 } }), &["factor"]);
}

#[test]
fn what_the_decoder_does_not_do_is_refused_with_a_way_out() {
    check_refused(json!({ "architectures": ["MixtralForCausalLM"] }), &["MixtralForCausalLM", "use"]);
    check_refused(json!({ "architectures": [] }), &["architecture", "use"]);
    for method in ["fp8", "awq", "gptq", "compressed-tensors"] {
        check_refused(json!({ "quantization_config": { "quant_method": method } }), &[method, "use", "bf16"]);
    }
    check_refused(json!({ "rope_scaling": { "rope_type": "yarn", "factor": 4.0 } }), &["yarn", "use"]);
    check_refused(json!({ "hidden_act": "relu" }), &["relu", "silu"]);
    check_refused(json!({ "attention_bias": true }), &["attention_bias"]);
    check_refused(json!({ "mlp_bias": true }), &["mlp_bias"]);
    check_refused(json!({ "partial_rotary_factor": 0.5 }), &["partial_rotary_factor"]);
    check_refused(json!({ "final_logit_softcapping": 30.0 }), &["final_logit_softcapping"]);
}
