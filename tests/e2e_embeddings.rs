//! Embeddings of real models through the whole stack.

use std::path::PathBuf;

use serde_json::{Value, json};
use thalweg_harness::{Cluster, models};

const BINARY: &str = env!("CARGO_BIN_EXE_thalweg");
const EMBEDDINGS: &str = "/v1/embeddings";

/// Embeddings of SmolLM2 by a plain decoder in float64 (tests/reference/embeddings.py).
const GOLDEN: &str = include_str!("golden/smollm2-135m-instruct-q4_1-embeddings.json");
/// Cosine of the angle to it where activations are rounded to int8 and keys and values to bf16, at least.
const COSINE_MIN: f64 = 0.99;
/// Of a number where nothing is rounded but to f32.
const TOLERANCE: f64 = 2e-6;

async fn embed(cluster: &Cluster, fields: Value) -> Vec<Vec<f64>> {
    let mut body = json!({"model": cluster.model});
    fields.as_object().expect("an object").iter().for_each(|(name, value)| body[name] = value.clone());
    let reply = cluster.http.post(EMBEDDINGS, &body).await;
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text);
    let reply = reply.json();
    let data = reply["data"].as_array().expect("data");
    data.iter().map(|item| numbers(&item["embedding"])).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a vector").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[tokio::test]
async fn a_served_model_embeds_as_its_reference() {
    let cluster = Cluster::up(BINARY, &models::smollm2(), 2, &["--kv-cache-memory-bytes", "64MiB"]);
    let golden: Value = serde_json::from_str(GOLDEN).expect("JSON");
    let golden = golden.as_array().expect("cases");
    let inputs: Vec<&Value> = golden.iter().map(|case| &case["ids"]).collect();
    let together = embed(&cluster, json!({"input": inputs})).await;
    for (case, ours) in golden.iter().zip(&together) {
        let cosine: f64 = ours.iter().zip(numbers(&case["last"])).map(|(a, b)| a * b).sum();
        assert!(cosine > COSINE_MIN, "{} tokens: {cosine}", case["ids"].as_array().map_or(0, Vec::len));
        let alone = embed(&cluster, json!({"input": case["ids"]})).await;
        assert_eq!(alone[0], *ours, "alone or with others, on either worker");
    }
    texts_of_one_meaning_are_closer(&cluster).await;
    hundreds_of_inputs_keep_their_order(&cluster).await;
    cluster.stop();
}

async fn texts_of_one_meaning_are_closer(cluster: &Cluster) {
    let texts = [
        "The cat sat on the mat.",
        "The cat is sitting on the mat.",
        "Interest rates rose by 2% in May 1994.",
    ];
    let vectors = embed(cluster, json!({"input": texts})).await;
    let cosine = |a: usize, b: usize| -> f64 { vectors[a].iter().zip(&vectors[b]).map(|(a, b)| a * b).sum() };
    assert!(cosine(0, 1) > cosine(0, 2), "{} and {}", cosine(0, 1), cosine(0, 2));
}

async fn hundreds_of_inputs_keep_their_order(cluster: &Cluster) {
    let texts: Vec<String> = (0..300).map(|i| format!("Number {}", i % 50)).collect();
    let vectors = embed(cluster, json!({"input": texts, "dimensions": 32})).await;
    assert!(vectors.iter().all(|vector| vector.len() == 32));
    for (at, vector) in vectors.iter().enumerate() {
        assert_eq!(*vector, vectors[at % 50], "input {at}");
    }
    assert_ne!(vectors[0], vectors[1]);
}

/// The mean by flag, in the reference's arithmetic, against numpy.
#[tokio::test]
async fn means_are_the_references() {
    let args = ["--pooling-type", "mean", "--dtype", "float32", "--kv-cache-dtype", "float32"];
    let more = ["--max-num-batched-tokens", "48", "--max-num-seqs", "16"];
    let path: PathBuf = models::tiny("qwen3");
    let cluster = Cluster::up(BINARY, &path, 1, &[&args[..], &more[..]].concat());
    let reference = std::fs::read_to_string(path.join("reference.json")).expect("a reference");
    let reference: Value = serde_json::from_str(&reference).expect("JSON");
    let cases = reference["embeddings"].as_array().expect("embeddings");
    let inputs: Vec<&Value> = cases.iter().map(|case| &case["ids"]).collect();
    for (case, ours) in cases.iter().zip(embed(&cluster, json!({"input": inputs})).await) {
        for (ours, expected) in ours.iter().zip(numbers(&case["mean"])) {
            assert!((ours - expected).abs() < TOLERANCE, "{ours} for {expected}");
        }
    }
    cluster.stop();
}
