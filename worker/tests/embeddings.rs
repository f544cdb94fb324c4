//! Embeddings on the CPU backend: against a plain decoder in float64 (tests/reference), and bitwise the same however the prompt is
//! cut and whoever runs beside it.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cpu::{CpuModel, KvDtype};
use thalweg_worker::plan::AdapterSlot;
use thalweg_worker::pooling::Pooling;

mod support;

use support::Device;
use support::plans::{Embed, bits};

/// Of a number of a vector of length 1, in f32 arithmetic.
const TOLERANCE_F32: f64 = 2e-6;
/// Of the angle to the reference where activations are rounded to int8 and keys and values to bf16: its cosine at least.
const COSINE_INT8_MIN: f64 = 0.99;

const POOLINGS: [(Pooling, &str); 2] = [(Pooling::Last, "last"), (Pooling::Mean, "mean")];

#[test]
fn tiny_models_of_every_family() {
    for family in ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma3"] {
        let path = support::tiny_model(family);
        let model = support::load(&path, Compute::F32);
        let references = reference(&path.join("reference.json"));
        check(family, &model, &references["embeddings"], AdapterSlot::BASE);
    }
}

/// Against the reference's weights with the adapter merged in.
#[test]
fn tiny_llama_with_adapters() {
    let model = support::load_adapted("llama3", Compute::F32);
    let folder = support::tiny_model("llama3").join("adapters");
    for (index, name) in support::TINY_ADAPTERS.into_iter().enumerate() {
        let references = reference(&folder.join(name).join("reference.json"));
        check(name, &model, &references["embeddings"], AdapterSlot(index as u32 + 1));
    }
}

#[test]
fn smollm2() {
    let path = support::test_model("SmolLM2-135M-Instruct.Q4_1.gguf");
    let golden = reference(&support::workspace("tests/golden/smollm2-135m-instruct-q4_1-embeddings.json"));
    check("smollm2", &support::load(&path, Compute::F32), &golden, AdapterSlot::BASE);
    let model = support::load(&path, Compute::Int8);
    for (case, pooling, expected) in cases(&golden) {
        let mut device = Device::new(model.clone(), 1, KvDtype::Bf16, 1);
        let ours = Embed::alone(AdapterSlot::BASE).run(&mut device.runner, &case, pooling);
        let cosine: f64 = ours.iter().zip(&expected).map(|(a, b)| f64::from(*a) * b).sum();
        eprintln!("smollm2 in int8, {} tokens, {pooling:?}: cosine {cosine:.5}", case.len());
        assert!(cosine > COSINE_INT8_MIN, "{} tokens, {pooling:?}: {cosine}", case.len());
    }
}

fn reference(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).expect("a reference")).expect("JSON")
}

/// Ids, pooling and the reference's vector.
fn cases(references: &Value) -> Vec<(Vec<u32>, Pooling, Vec<f64>)> {
    let references = references.as_array().expect("embeddings; run make test-models");
    let of = |case: &Value| {
        let ids = support::ids(&case["ids"]);
        POOLINGS.map(|(pooling, name)| {
            let vector = case[name].as_array().expect("a vector");
            (ids.clone(), pooling, vector.iter().map(|x| x.as_f64().expect("a number")).collect())
        })
    };
    references.iter().flat_map(of).collect()
}

/// Close to the reference alone, and the same to the bit in every other way.
fn check(name: &str, model: &Arc<CpuModel>, references: &Value, adapter: AdapterSlot) {
    let mut worst = 0f64;
    for (ids, pooling, expected) in cases(references) {
        let what = format!("{name}, {} tokens, {pooling:?}", ids.len());
        let mut device = Device::new(model.clone(), 1, KvDtype::F32, 1);
        let alone = Embed::alone(adapter).run(&mut device.runner, &ids, pooling);
        assert_eq!(alone.len(), expected.len(), "{what}");
        for (ours, expected) in alone.iter().zip(&expected) {
            worst = worst.max((f64::from(*ours) - expected).abs());
        }
        assert!(worst < TOLERANCE_F32, "{what}: {worst:.1e} off the reference");
        for (threads, piece, mates) in [(2, 1, 0), (1, 7, 2), (2, 15, 1), (2, 16, 3), (1, 17, 0), (2, 64, 2)]
        {
            let way = Embed { piece, mates, adapter };
            let mut device = Device::new(model.clone(), threads, KvDtype::F32, mates + 1);
            let ours = way.run(&mut device.runner, &ids, pooling);
            assert!(
                bits(&ours) == bits(&alone),
                "{what}: {way:?} in {threads} threads differs from the prompt alone"
            );
        }
    }
    eprintln!("{name}: embeddings within {worst:.1e}");
}
