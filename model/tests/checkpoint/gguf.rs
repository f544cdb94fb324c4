//! GGUF files: split models, and what the architectures leave out of their metadata.

use std::path::{Path, PathBuf};

use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Weight};
use thalweg_model::config::{Architecture, LayerKind, RopeScaling};

use crate::support::gguf::{Gguf, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, Value, f32_tensor};
use crate::support::{assert_says, refusal};

fn open(gguf: &Gguf) -> Checkpoint {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    gguf.write(&path);
    Checkpoint::open(&path).unwrap()
}

/// A split model after something was done to its parts; `give` is the part that is opened.
fn check_split(spoil: impl Fn(&Path, &[PathBuf]), give: usize, expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let parts = Gguf::tiny(1).write_split(folder.path(), "tiny", 3);
    spoil(folder.path(), &parts);
    assert_says(&refusal(&parts[give]), expected);
}

#[test]
fn the_first_part_loads_all() {
    let folder = tempfile::tempdir().unwrap();
    let parts = Gguf::tiny(1).write_split(folder.path(), "tiny", 3);
    assert_eq!(parts.len(), 3);
    let split = Checkpoint::open(&parts[0]).unwrap();
    let whole = open(&Gguf::tiny(1));
    assert_eq!(split.name(), "tiny");
    assert_eq!(split.fingerprint(), whole.fingerprint());
    let last = Weight::Layer(LAYERS - 1, LayerWeight::Down);
    assert_eq!(split.matrix(last).unwrap().data, whole.matrix(last).unwrap().data);
}

#[test]
fn split_models_that_are_not_whole_are_refused() {
    let untouched = |_: &Path, _: &[PathBuf]| {};
    check_split(
        untouched,
        1,
        &["tiny-00002-of-00003.gguf", "part 2 of 3", "give", "tiny-00001-of-00003.gguf"],
    );
    check_split(untouched, 2, &["tiny-00003-of-00003.gguf", "part 3 of 3"]);
    let remove = |_: &Path, parts: &[PathBuf]| std::fs::remove_file(&parts[2]).unwrap();
    check_split(remove, 0, &["tiny-00003-of-00003.gguf", "missing"]);
    let cut = |_: &Path, parts: &[PathBuf]| {
        let bytes = std::fs::read(&parts[1]).unwrap();
        std::fs::write(&parts[1], &bytes[..bytes.len() - 1]).unwrap();
    };
    check_split(cut, 0, &["tiny-00002-of-00003.gguf", "cut short"]);
}

#[test]
fn parts_of_two_models_are_refused() {
    let swap = |_: &Path, parts: &[PathBuf]| {
        std::fs::copy(&parts[1], &parts[2]).unwrap();
    };
    check_split(swap, 0, &["tiny-00003-of-00003.gguf", "part 2 of 3"]);
    let mix = |folder: &Path, parts: &[PathBuf]| {
        let other = Gguf::tiny(2).write_split(folder, "other", 2);
        std::fs::copy(&other[1], &parts[1]).unwrap();
    };
    check_split(mix, 0, &["tiny-00002-of-00003.gguf", "part 2 of 2"]);
    let deeper = |folder: &Path, parts: &[PathBuf]| {
        let mut other = Gguf::tiny(2);
        other.tensors.rotate_left(1);
        let other = other.write_split(folder, "other", 3);
        std::fs::copy(&other[1], &parts[1]).unwrap();
    };
    check_split(deeper, 0, &["tiny-0000", "not parts of one model"]);
    let wider = |folder: &Path, parts: &[PathBuf]| {
        let mut other = Gguf::tiny(2);
        let tensor = other.tensor("blk.0.ffn_up.weight");
        *tensor = f32_tensor("blk.0.ffn_up.weight", &[HIDDEN, 96], &mut 1);
        let other = other.write_split(folder, "other", 3);
        std::fs::copy(&other[1], &parts[1]).unwrap();
    };
    check_split(wider, 0, &["tiny-00002-of-00003.gguf", "blk.0.ffn_up.weight", "[96, 32]"]);
}

#[test]
fn a_renamed_first_part_says_how_parts_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let parts = Gguf::tiny(1).write_split(folder.path(), "tiny", 3);
    let renamed = folder.path().join("renamed.gguf");
    std::fs::copy(&parts[0], &renamed).unwrap();
    assert_says(&refusal(&renamed), &["renamed.gguf", "of-00003"]);
}

#[test]
fn what_is_no_model_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, bytes: &[u8], words: &[&str]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        assert_says(&refusal(&path), &[words, &[name]].concat());
    };
    check("empty.gguf", b"", &["empty"]);
    check("notes.txt", b"not a model at all, but text", &["not a GGUF file"]);
    check("model.safetensors", b"", &["give the folder"]);
    assert_says(&refusal(&folder.path().join("absent.gguf")), &["absent.gguf", "cannot read"]);
    assert_says(&refusal(folder.path()), &["config.json"]);
}

#[test]
fn llama_rows_are_interleaved_and_their_biases_put_in_order() {
    let mut gguf = Gguf::tiny(1);
    for layer in 0..LAYERS {
        let sizes = [("q", HEADS * HEAD_DIM), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)];
        for (name, rows) in sizes {
            let mut tensor = f32_tensor(format!("blk.{layer}.attn_{name}.bias"), &[rows], &mut 1);
            tensor.data = (0..rows).flat_map(|row| (row as f32).to_le_bytes()).collect();
            gguf.tensors.push(tensor);
        }
    }
    let model = open(&gguf);
    assert!(model.config().qkv_bias);
    let expected: Vec<f32> =
        (0..8).map(|i| 2.0 * i as f32).chain((0..8).map(|i| 2.0 * i as f32 + 1.0)).collect();
    let k = model.vector(Weight::Layer(0, LayerWeight::KBias)).unwrap().unwrap();
    assert_eq!(k, expected);
    let q = model.vector(Weight::Layer(0, LayerWeight::QBias)).unwrap().unwrap();
    assert_eq!(q[..16], expected);
    assert_eq!(q[16], 16.0);
    let v = model.vector(Weight::Layer(0, LayerWeight::VBias)).unwrap().unwrap();
    assert_eq!(v[..3], [0.0, 1.0, 2.0]);
}

#[test]
fn rope_factors_stretch_frequencies() {
    let mut gguf = Gguf::tiny(1);
    let mut factors = f32_tensor("rope_freqs.weight", &[HEAD_DIM / 2], &mut 1);
    factors.data = [1.0f32, 1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0].iter().flat_map(|f| f.to_le_bytes()).collect();
    gguf.tensors.push(factors);
    let model = open(&gguf);
    let rope = model.config().rope;
    assert!(matches!(rope.scaling, RopeScaling::Factors(_)));
    let got = rope.frequencies(HEAD_DIM);
    assert_eq!(got[2], 10_000f64.powf(-4.0 / 16.0));
    assert_eq!(got[7], 10_000f64.powf(-14.0 / 16.0) / 8.0);
    let last = gguf.tensors.len() - 1;
    gguf.tensors[last].data[..4].copy_from_slice(&0f32.to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    gguf.write(&folder.path().join("tiny.gguf"));
    assert_says(&refusal(&folder.path().join("tiny.gguf")), &["rope_freqs.weight"]);
}

#[test]
fn a_window_makes_llama_a_mistral() {
    let mut gguf = Gguf::tiny(1);
    gguf.set("llama.attention.sliding_window", Value::U32(8));
    gguf.set("llama.rope.scaling.type", Value::String("linear".into()));
    gguf.set("llama.rope.scaling.factor", Value::F32(2.0));
    let model = open(&gguf);
    assert_eq!(model.config().architecture, Architecture::Mistral);
    assert_eq!(model.config().layers, [LayerKind::Sliding; LAYERS]);
    assert_eq!(model.config().sliding_window, Some(8));
    assert_eq!(model.config().rope.scaling, RopeScaling::Linear { factor: 2.0 });
    assert!(model.matrix(Weight::Layer(0, LayerWeight::Q)).unwrap().interleaved);
}

#[test]
fn the_fingerprint_covers_weights_and_tokenizer() {
    let base = open(&Gguf::tiny(1)).fingerprint();
    let mut tokens = Gguf::tiny(1);
    tokens.set("tokenizer.ggml.pre", Value::String("llama-bpe".into()));
    assert_ne!(open(&tokens).fingerprint(), base);
    assert_ne!(open(&Gguf::tiny(2)).fingerprint(), base);
    let mut name = Gguf::tiny(1);
    name.set("general.name", Value::String("another".into()));
    assert_eq!(open(&name).fingerprint(), base);
}

#[test]
fn a_vocabulary_of_the_wrong_type_is_refused() {
    let mut gguf = Gguf::tiny(1);
    gguf.set("tokenizer.ggml.tokens", Value::Ints(vec![1; 32]));
    let message = open(&gguf).tokenizer_bundle().unwrap_err().to_string();
    assert_says(&message, &["tokenizer.ggml.tokens", "array of integers", "array of strings"]);
}

#[test]
fn qwen2_without_its_biases_is_incomplete() {
    let mut gguf = Gguf::tiny(1);
    for (key, _) in &mut gguf.keys {
        *key = key.replace("llama.", "qwen2.");
    }
    gguf.set("general.architecture", Value::String("qwen2".into()));
    let folder = tempfile::tempdir().unwrap();
    gguf.write(&folder.path().join("tiny.gguf"));
    assert_says(&refusal(&folder.path().join("tiny.gguf")), &["blk.0.attn_q.bias", "missing"]);
}
