//! Small seeded checkpoints of every family against a plain decoder in float64 (tests/reference).

use std::path::Path;

use serde_json::Value;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::plan::{AdapterSlot, Logprobs};

mod support;

const VOCABULARY: usize = 320;
/// Of a logprob; the reference's logits have seven decimals.
const TOLERANCE: f64 = 1e-4;

#[test]
fn llama2() {
    check("llama2");
}

#[test]
fn llama3_scaled_rope_and_groups_of_three() {
    check("llama3");
}

#[test]
fn mistral_sliding_window_and_shards() {
    check("mistral");
}

#[test]
fn qwen2_biases() {
    check("qwen2");
}

#[test]
fn qwen3_qk_norm() {
    check("qwen3");
}

#[test]
fn gemma3_sandwich_norms_and_two_ropes() {
    check("gemma3");
}

/// Against the reference's weights with the adapter merged in, the model as it is included.
#[test]
fn llama3_with_adapters() {
    let model = support::load_adapted("llama3", Compute::F32);
    let folder = support::tiny_model("llama3");
    let over = |slot| support::Sequence::over(model.clone(), KvDtype::F32, AdapterSlot(slot));
    check_sequence("llama3", &folder, over(0));
    for (index, name) in support::TINY_ADAPTERS.into_iter().enumerate() {
        check_sequence(
            &format!("llama3 with {name}"),
            &folder.join("adapters").join(name),
            over(index as u32 + 1),
        );
    }
}

fn check(family: &str) {
    let path = support::tiny_model(family);
    check_sequence(family, &path, support::Sequence::open(&path, Compute::F32, KvDtype::F32));
}

fn check_sequence(family: &str, path: &Path, mut sequence: support::Sequence) {
    let reference = std::fs::read(path.join("reference.json")).expect("reference.json");
    let reference: Value = serde_json::from_slice(&reference).expect("JSON");
    let mut worst = 0f64;
    for prompt in reference["prompts"].as_array().expect("prompts") {
        let ids = support::ids(&prompt["ids"]);
        for piece in [ids.len(), 7, 16] {
            sequence.clear();
            let scored: Vec<Logprobs> =
                ids.chunks(piece).flat_map(|part| sequence.score(part, 0, VOCABULARY as u32)).collect();
            worst =
                worst.max(compare(&format!("{family}, {} tokens by {piece}", ids.len()), &scored, prompt));
        }
        if let Some(greedy) = prompt["greedy"].as_array() {
            check_greedy(family, &mut sequence, &ids, greedy, &prompt["greedy_gaps"]);
        }
    }
    eprintln!("{family}: logprobs within {worst:.1e}");
}

fn compare(what: &str, scored: &[Logprobs], prompt: &Value) -> f64 {
    let mut worst = 0f64;
    let positions = prompt["positions"].as_array().expect("positions");
    for (position, logits) in positions.iter().zip(prompt["logits"].as_array().expect("logits")) {
        let logits: Vec<f64> =
            logits.as_array().expect("a row").iter().map(|x| x.as_f64().expect("a number")).collect();
        let normaliser = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
        let ours = &scored[position.as_u64().expect("a position") as usize].top;
        assert_eq!(ours.len(), logits.len(), "{what}");
        for (id, logprob) in ours {
            let expected = logits[*id as usize] - normaliser;
            let difference = (f64::from(*logprob) - expected).abs();
            assert!(
                difference < TOLERANCE,
                "{what}, position {position}, token {id}: {logprob} for {expected}"
            );
            worst = worst.max(difference);
        }
    }
    worst
}

/// The reference's own greedy tokens, fed back one by one.
fn check_greedy(family: &str, sequence: &mut support::Sequence, ids: &[u32], greedy: &[Value], gaps: &Value) {
    sequence.clear();
    let mut input = ids.to_vec();
    for (index, expected) in greedy.iter().enumerate() {
        let expected = expected.as_u64().expect("an id") as u32;
        let scored = sequence.score(&input, expected, 1).pop().expect("the last position");
        if gaps[index].as_f64().expect("a gap") > 2.0 * TOLERANCE {
            assert_eq!(scored.top[0].0, expected, "{family}, {} tokens, output {index}", ids.len());
        }
        input = vec![expected];
    }
}
