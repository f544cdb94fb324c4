//! Folders of safetensors, whole and sharded.

use std::path::Path;

use thalweg_model::checkpoint::{Checkpoint, LayerWeight, Weight};

use crate::support::hub::Folder;
use crate::support::{assert_says, refusal};

const SHARD_2: &str = "model-00002-of-00003.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn check_sharded(spoil: impl Fn(&Path), expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    Folder::tiny().write_sharded(folder.path());
    spoil(folder.path());
    assert_says(&refusal(folder.path()), expected);
}

fn check_whole(spoil: impl Fn(&mut Folder), expected: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Folder::tiny();
    spoil(&mut model);
    model.write(folder.path());
    assert_says(&refusal(folder.path()), expected);
}

fn cut(path: &Path, bytes: usize) {
    let content = std::fs::read(path).unwrap();
    std::fs::write(path, &content[..content.len() - bytes]).unwrap();
}

#[test]
fn shards_and_one_file_are_one_model() {
    let (whole, sharded) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    Folder::tiny().write(whole.path());
    Folder::tiny().write_sharded(sharded.path());
    let whole = Checkpoint::open(whole.path()).unwrap();
    let sharded = Checkpoint::open(sharded.path()).unwrap();
    assert_eq!(whole.fingerprint(), sharded.fingerprint());
    assert_eq!(whole.weight_bytes(), sharded.weight_bytes());
    let q = sharded.matrix(Weight::Layer(1, LayerWeight::Q)).unwrap();
    assert_eq!((q.rows, q.cols, q.interleaved), (32, 32, false));
    assert_eq!(sharded.matrix(Weight::Output).unwrap().rows, 32);
}

#[test]
fn shards_that_are_not_whole_are_refused() {
    check_sharded(|folder| std::fs::remove_file(folder.join(SHARD_2)).unwrap(), &[SHARD_2, "missing"]);
    check_sharded(|folder| cut(&folder.join(SHARD_2), 1), &[SHARD_2, "cut short"]);
    check_sharded(|folder| cut(&folder.join(SHARD_2), 4096), &[SHARD_2, "cut short"]);
    check_sharded(|folder| std::fs::write(folder.join(SHARD_2), b"").unwrap(), &[SHARD_2, "empty"]);
    let swap = |folder: &Path| {
        let first = folder.join("model-00001-of-00003.safetensors");
        std::fs::copy(first, folder.join(SHARD_2)).unwrap();
    };
    check_sharded(swap, &[SHARD_2, "has no tensor", "of another model"]);
    check_sharded(|folder| std::fs::write(folder.join(INDEX), "{").unwrap(), &[INDEX, "JSON"]);
    check_sharded(
        |folder| std::fs::write(folder.join(INDEX), "{}").unwrap(),
        &[INDEX, "weight_map", "missing"],
    );
    let escape = r#"{"weight_map": {"model.norm.weight": "../secret.safetensors"}}"#;
    check_sharded(
        |folder| std::fs::write(folder.join(INDEX), escape).unwrap(),
        &[INDEX, "../secret.safetensors"],
    );
    let partial = r#"{"weight_map": {}}"#;
    check_sharded(
        |folder| std::fs::write(folder.join(INDEX), partial).unwrap(),
        &["embed_tokens", "missing"],
    );
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    check_whole(|m| drop(m.tensors.remove("model.norm.weight")), &["model.norm.weight", "missing"]);
    check_whole(
        |m| m.add("model.norm.weight", &[16]),
        &["model.norm.weight", "[16]", "[32]", "model.safetensors"],
    );
    check_whole(
        |m| m.add("model.layers.2.mlp.up_proj.weight", &[64, 32]),
        &["model.layers.2.mlp.up_proj.weight"],
    );
    check_whole(|m| m.add("model.layers.0.self_attn.o_proj.bias", &[32]), &["o_proj.bias", "not supported"]);
    check_whole(
        |m| m.tensors.get_mut("model.norm.weight").unwrap().dtype = "I32",
        &["model.norm.weight", "I32", "bf16"],
    );
    check_whole(|m| m.tensors.get_mut("model.norm.weight").unwrap().shape = vec![0], &["model.safetensors"]);
    check_whole(|m| m.set("tie_word_embeddings", false.into()), &["lm_head.weight", "missing"]);
}

#[test]
fn folders_without_their_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    Folder::tiny().write_config(folder.path());
    assert_says(&refusal(folder.path()), &["model.safetensors", "fetch"]);
    std::fs::write(folder.path().join("model.safetensors"), b"no safetensors").unwrap();
    assert_says(&refusal(folder.path()), &["model.safetensors", "not a safetensors file"]);
    std::fs::write(folder.path().join("config.json"), "[]").unwrap();
    assert_says(&refusal(folder.path()), &["config.json", "object"]);
}

#[test]
fn gemma_norms_gain_one_and_its_embedding_scale_is_rounded_as_stored() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = Folder::gemma();
    model.write(folder.path());
    let opened = Checkpoint::open(folder.path()).unwrap();
    for weight in
        [Weight::OutputNorm, Weight::Layer(1, LayerWeight::QNorm), Weight::Layer(0, LayerWeight::PostMlpNorm)]
    {
        assert_eq!(opened.vector(weight).unwrap().unwrap()[0], 1.5);
    }
    assert_eq!(opened.config().embedding_scale, 32f32.sqrt());
    let embedding = model.tensors.get_mut("model.embed_tokens.weight").unwrap();
    embedding.dtype = "BF16";
    embedding.bytes.truncate(32 * 32 * 2);
    model.write(folder.path());
    // sqrt(32) = 5.657 lies between the bf16 numbers 5.65625 and 5.6875.
    assert_eq!(Checkpoint::open(folder.path()).unwrap().config().embedding_scale, 5.65625);
}

#[test]
fn the_fingerprint_covers_the_tokenizer_files() {
    let folder = tempfile::tempdir().unwrap();
    Folder::tiny().write(folder.path());
    let before = Checkpoint::open(folder.path()).unwrap().fingerprint();
    std::fs::write(folder.path().join("tokenizer.json"), "{}").unwrap();
    assert_ne!(Checkpoint::open(folder.path()).unwrap().fingerprint(), before);
}
