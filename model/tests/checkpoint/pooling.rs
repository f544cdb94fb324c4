//! What checkpoints say of their embeddings.

use serde_json::{Value, json};
use thalweg_model::checkpoint::Checkpoint;
use thalweg_model::pooling::{Pooling, PoolingSetting};

use crate::support::hub::Folder;
use crate::support::{assert_says, gguf, refusal};

fn unsupported(setting: &PoolingSetting, says: &str) {
    let PoolingSetting::Unsupported(reason) = setting else { panic!("{setting:?} is no refusal") };
    assert!(reason.contains(says), "{reason:?} does not say {says:?}");
}

/// Of a folder with these files beside the model.
fn of_folder(files: &[(&str, Value)]) -> Result<PoolingSetting, String> {
    let folder = tempfile::tempdir().unwrap();
    Folder::tiny().write(folder.path());
    for (name, content) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content.to_string()).unwrap();
    }
    Checkpoint::open(folder.path()).unwrap().pooling().map_err(|error| error.to_string())
}

fn modules(kinds: &[(&str, &str)]) -> Value {
    let module = |(kind, path): &(&str, &str)| json!({"idx": 0, "name": "0", "path": path, "type": format!("sentence_transformers.models.{kind}")});
    kinds.iter().map(module).collect()
}

#[test]
fn sentence_transformers_files_are_read() {
    let modes = |on: &[&str]| {
        let mut modes = json!({"word_embedding_dimension": 32, "include_prompt": true});
        for mode in ["cls_token", "mean_tokens", "max_tokens", "lasttoken"] {
            modes[format!("pooling_mode_{mode}")] = on.contains(&mode).into();
        }
        modes
    };
    let place = "1_Pooling/config.json";
    assert_eq!(of_folder(&[]), Ok(PoolingSetting::Unset));
    assert_eq!(of_folder(&[(place, modes(&["lasttoken"]))]), Ok(PoolingSetting::Set(Pooling::Last)));
    assert_eq!(of_folder(&[(place, modes(&["mean_tokens"]))]), Ok(PoolingSetting::Set(Pooling::Mean)));
    assert_eq!(of_folder(&[(place, modes(&[]))]), Ok(PoolingSetting::Unset));
    unsupported(&of_folder(&[(place, modes(&["cls_token"]))]).unwrap(), "cls_token");
    unsupported(&of_folder(&[(place, modes(&["cls_token", "mean_tokens"]))]).unwrap(), "cls_token with mean");

    let whole = modules(&[("Transformer", ""), ("Pooling", "9_Pooling"), ("Normalize", "2_Normalize")]);
    let elsewhere = [("modules.json", whole), ("9_Pooling/config.json", modes(&["mean_tokens"]))];
    assert_eq!(of_folder(&elsewhere), Ok(PoolingSetting::Set(Pooling::Mean)));
    let dense = modules(&[("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]);
    let dense = of_folder(&[("modules.json", dense), (place, modes(&["mean_tokens"]))]);
    unsupported(&dense.unwrap(), "`Dense`");

    let outside = of_folder(&[("modules.json", modules(&[("Pooling", "../1_Pooling")]))]).unwrap_err();
    assert!(outside.contains("modules.json") && outside.contains("../1_Pooling"), "{outside}");
    let broken = of_folder(&[("modules.json", json!({"modules": 1}))]).unwrap_err();
    assert!(broken.contains("modules.json") && broken.contains("list of modules"), "{broken}");
    let broken = of_folder(&[(place, json!([1]))]).unwrap_err();
    assert!(broken.contains("1_Pooling"), "{broken}");
}

#[test]
fn gguf_files_name_it_by_number() {
    let of = |kind: Option<u32>| {
        let folder = tempfile::tempdir().unwrap();
        let (path, mut file) = (folder.path().join("tiny.gguf"), gguf::Gguf::tiny(1));
        kind.into_iter().for_each(|kind| file.set("llama.pooling_type", gguf::Value::U32(kind)));
        file.write(&path);
        Checkpoint::open(&path).unwrap().pooling().unwrap()
    };
    assert_eq!(of(None), PoolingSetting::Unset);
    assert_eq!(of(Some(0)), PoolingSetting::Unset);
    assert_eq!(of(Some(1)), PoolingSetting::Set(Pooling::Mean));
    assert_eq!(of(Some(3)), PoolingSetting::Set(Pooling::Last));
    unsupported(&of(Some(2)), "class token");
    unsupported(&of(Some(4)), "ranks");
    unsupported(&of(Some(9)), "llama.pooling_type");
}

/// Tokens that see those behind them: answers would be wrong, embeddings too.
#[test]
fn models_without_causal_attention_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Folder::tiny();
    model.set("is_causal", json!(false));
    model.write(folder.path());
    assert_says(&refusal(folder.path()), &["config.json", "is_causal"]);
    let (path, mut file) = (folder.path().join("tiny.gguf"), gguf::Gguf::tiny(1));
    file.set("llama.attention.causal", gguf::Value::Bool(false));
    file.write(&path);
    assert_says(&refusal(&path), &["tiny.gguf", "llama.attention.causal"]);
    let mut bert = gguf::Gguf::tiny(1);
    bert.set("general.architecture", gguf::Value::String("bert".to_owned()));
    bert.write(&path);
    assert_says(&refusal(&path), &["architecture `bert`"]);
}
