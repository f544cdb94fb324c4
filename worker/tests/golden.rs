//! Real models against other engines: tests/golden/README.md has the rules.

use serde_json::Value;
use thalweg_worker::backend::cpu::KvDtype;
use thalweg_worker::backend::cpu::linear::Compute;

mod support;

const SMOLLM2: (&str, &str) = ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct-q4_1.json");
const GEMMA3: (&str, &str) = ("gemma-3-270m-q4_k_m.gguf", "gemma3-270m-q4km.json");
/// Gap between the reference's best two logits from which on everyone must agree on the best.
const CLEAR_GAP: f64 = 0.5;

/// One way to compute, and what its first token's logprobs are held against.
struct Mode {
    compute: Compute,
    kv_dtype: KvDtype,
    reference: &'static str,
    tolerance: f64,
}

const INT8: Mode =
    Mode { compute: Compute::Int8, kv_dtype: KvDtype::Bf16, reference: "kv_f32", tolerance: 0.6 };
const F32: Mode =
    Mode { compute: Compute::F32, kv_dtype: KvDtype::F32, reference: "ref_f32", tolerance: 0.05 };

#[test]
fn smollm2_int8() {
    check(SMOLLM2, &INT8);
}

#[test]
fn smollm2_f32() {
    check(SMOLLM2, &F32);
}

#[test]
fn gemma3_int8() {
    check(GEMMA3, &INT8);
}

#[test]
fn gemma3_f32() {
    check(GEMMA3, &F32);
}

fn check((model, golden): (&str, &str), mode: &Mode) {
    let path = support::workspace("tests/golden").join(golden);
    let golden: Value = serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("JSON");
    let mut sequence = support::Sequence::open(&support::test_model(model), mode.compute, mode.kv_dtype);
    let cases = golden["cases"].as_array().expect("cases");
    assert!(!cases.is_empty());
    let (mut worst, mut ambiguous, mut clear) = (0f64, 0, 0);
    for case in cases {
        let outcome = check_case(&mut sequence, case, mode);
        worst = worst.max(outcome.worst_difference);
        ambiguous += outcome.ambiguous;
        clear += outcome.clear;
    }
    eprintln!("{clear} clear positions agree, {ambiguous} others differ; first logprobs within {worst:.4}");
}

struct Outcome {
    worst_difference: f64,
    clear: usize,
    ambiguous: usize,
}

fn check_case(sequence: &mut support::Sequence, case: &Value, mode: &Mode) -> Outcome {
    let name = case["name"].as_str().expect("a name");
    let prompt = support::ids(&case["prompt_ids"]);
    let forced = support::ids(&case["kv_f32"]["greedy_ids"]);
    let expected = support::ids(&case["ref_f32"]["teacher_forced_argmax"]);
    let gaps = &case["ref_f32"]["teacher_forced_top1_top2_gap"];
    let mut outcome = Outcome { worst_difference: 0.0, clear: 0, ambiguous: 0 };
    sequence.clear();
    let (last, before) = prompt.split_last().expect("a prompt");
    sequence.feed(before);
    let inputs: Vec<u32> = std::iter::once(last).chain(&forced[..forced.len() - 1]).copied().collect();
    let scored = sequence.score(&inputs, *forced.last().expect("32 tokens"), 5);
    assert_eq!(scored.len(), expected.len(), "{name}");
    outcome.worst_difference = compare_first(name, &scored[0].top, &case[mode.reference]["top5_first"], mode);
    for (index, (scored, expected)) in scored.iter().zip(expected).enumerate() {
        let gap = gaps[index].as_f64().expect("a gap");
        if gap > CLEAR_GAP {
            assert_eq!(scored.top[0].0, expected, "{name}, output {index}, gap {gap}");
            outcome.clear += 1;
        } else {
            outcome.ambiguous += usize::from(scored.top[0].0 != expected);
        }
    }
    outcome
}

fn compare_first(name: &str, ours: &[(u32, f32)], reference: &Value, mode: &Mode) -> f64 {
    let mut worst = 0f64;
    let mut shared = 0;
    for entry in reference.as_array().expect("top five") {
        let id = entry["id"].as_u64().expect("an id") as u32;
        let logprob = entry["logprob"].as_f64().expect("a logprob");
        if let Some((_, ours)) = ours.iter().find(|(ours, _)| *ours == id) {
            let difference = (f64::from(*ours) - logprob).abs();
            let tolerance = mode.tolerance;
            assert!(
                difference <= tolerance,
                "{name}, token {id}: {ours} against {logprob} of {}",
                mode.reference
            );
            worst = worst.max(difference);
            shared += 1;
        }
    }
    assert!(shared > 0, "{name}: no token is in both top fives");
    worst
}
