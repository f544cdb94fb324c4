//! LoRA adapters: what is read, and what is refused by name.

use std::path::Path;

use serde_json::{Value, json};
use thalweg_model::adapter::{Adapter, LowRank};
use thalweg_model::checkpoint::{Checkpoint, LayerWeight};
use thalweg_model::config::ModelConfig;

use crate::support::assert_says;
use crate::support::hub::{Folder, file};

const Q0: &str = "base_model.model.model.layers.0.self_attn.q_proj";
const Q: &str = "base_model.model.model.layers.1.self_attn.q_proj";
const DOWN: &str = "base_model.model.model.layers.0.mlp.down_proj";

/// Of rank 4, for the tiny model, on one q and one down projection.
fn sound() -> Folder {
    let config = json!({
        "peft_type": "LORA",
        "base_model_name_or_path": "someone/tiny",
        "r": 4,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "down_proj"],
        "modules_to_save": null,
        "rank_pattern": {},
        "use_dora": false,
        "init_lora_weights": true,
    });
    let mut folder = Folder { config, tensors: Default::default() };
    folder.add(&format!("{Q}.lora_A.weight"), &[4, 32]);
    folder.add(&format!("{Q}.lora_B.weight"), &[32, 4]);
    folder.add(&format!("{DOWN}.lora_A.weight"), &[4, 64]);
    folder.add(&format!("{DOWN}.lora_B.weight"), &[32, 4]);
    folder
}

fn model() -> ModelConfig {
    let folder = tempfile::tempdir().unwrap();
    Folder::tiny().write(folder.path());
    Checkpoint::open(folder.path()).unwrap().config().clone()
}

fn write(adapter: &Folder, folder: &Path) {
    std::fs::write(folder.join("adapter_config.json"), adapter.config.to_string()).unwrap();
    std::fs::write(folder.join("adapter_model.safetensors"), file(adapter.tensors.iter())).unwrap();
}

fn check(spoil: impl Fn(&mut Folder), expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut adapter = sound();
    spoil(&mut adapter);
    write(&adapter, folder.path());
    let error = Adapter::open(folder.path(), &model()).expect_err("a refusal").to_string();
    assert_says(&error, expected);
}

#[test]
fn a_sound_adapter() {
    let folder = tempfile::tempdir().unwrap();
    write(&sound(), folder.path());
    let adapter = Adapter::open(folder.path(), &model()).unwrap();
    assert_eq!((adapter.rank(), adapter.scale(), adapter.path()), (4, 4.0, folder.path()));
    let down = LowRank { a: vec![0.5; 4 * 64], b: vec![0.5; 32 * 4] };
    assert_eq!(adapter.low_rank(0, LayerWeight::Down), Some(down));
    assert!(adapter.low_rank(1, LayerWeight::Q).is_some());
    assert_eq!(adapter.low_rank(0, LayerWeight::Q), None);
    assert_eq!(adapter.low_rank(1, LayerWeight::AttentionNorm), None);
}

#[test]
fn fingerprints_tell_adapters_apart() {
    let fingerprint = |change: fn(&mut Folder)| {
        let folder = tempfile::tempdir().unwrap();
        let mut adapter = sound();
        change(&mut adapter);
        write(&adapter, folder.path());
        Adapter::open(folder.path(), &model()).unwrap().fingerprint()
    };
    let before = fingerprint(|_| {});
    assert_eq!(fingerprint(|adapter| adapter.set("lora_dropout", json!(0.5))), before, "of no account here");
    assert_ne!(fingerprint(|adapter| adapter.set("lora_alpha", json!(2))), before);
    let other = |adapter: &mut Folder| {
        adapter.add(&format!("{Q0}.lora_A.weight"), &[4, 32]);
        adapter.add(&format!("{Q0}.lora_B.weight"), &[32, 4]);
    };
    assert_ne!(fingerprint(other), before);
}

#[test]
fn scales_are_pefts() {
    let scale = |key: &str, value: Value| {
        let folder = tempfile::tempdir().unwrap();
        let mut adapter = sound();
        adapter.set(key, value);
        write(&adapter, folder.path());
        Adapter::open(folder.path(), &model()).unwrap().scale()
    };
    assert_eq!(scale("use_rslora", json!(true)), 8.0);
    assert_eq!(scale("lora_alpha", json!(2)), 0.5);
    assert_eq!(scale("lora_alpha", Value::Null), 2.0);
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let config =
        |key: &'static str, value: Value| move |adapter: &mut Folder| adapter.set(key, value.clone());
    check(config("peft_type", json!("IA3")), &["adapter_config.json", "`peft_type` IA3"]);
    check(config("use_dora", json!(true)), &["`use_dora`: true", "merge"]);
    check(config("bias", json!("all")), &["`bias`: all"]);
    check(config("modules_to_save", json!(["lm_head"])), &["`modules_to_save`"]);
    check(config("rank_pattern", json!({"q_proj": 8})), &["`rank_pattern`"]);
    check(config("init_lora_weights", json!("pissa_niter_4")), &["pissa", "path_initial_model"]);
    check(config("r", json!(0)), &["`r`", "0"]);
    check(config("r", Value::Null), &["`r`", "missing"]);
    check(config("r", json!(8)), &["has shape [4, 64], expected [8, 64]"]);
    let embedding = "base_model.model.model.embed_tokens.lora_embedding_A";
    check(|adapter| adapter.add(embedding, &[4, 32]), &[embedding, "q, k, v, o, gate, up and down"]);
    check(
        |adapter| adapter.add("base_model.model.lm_head.weight", &[32, 32]),
        &["lm_head", "target_modules"],
    );
    let magnitude = format!("{Q}.lora_magnitude_vector");
    check(|adapter| adapter.add(&magnitude, &[32]), &["lora_magnitude_vector", "not supported"]);
}

#[test]
fn what_does_not_fit_the_model_is_refused_by_name() {
    let half = format!("{Q}.lora_B.weight");
    let missing = ["adapter_model.safetensors", &half, "missing"];
    check(|adapter| drop(adapter.tensors.remove(&half)), &missing);
    let beyond = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight";
    check(|adapter| adapter.add(beyond, &[4, 32]), &[beyond, "layer 2, the model has 2"]);
    check(|adapter| adapter.add(&half, &[64, 4]), &["has shape [64, 4], expected [32, 4]", "another model"]);
    check(|adapter| adapter.tensors.clear(), &["has no tensors"]);
    let folder = tempfile::tempdir().unwrap();
    let error = || Adapter::open(folder.path(), &model()).expect_err("a refusal").to_string();
    assert_says(&error(), &["adapter_config.json", "PEFT"]);
    std::fs::write(folder.path().join("adapter_config.json"), sound().config.to_string()).unwrap();
    assert_says(&error(), &["adapter_model.safetensors", "safe_serialization"]);
}
