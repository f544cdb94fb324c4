//! Real models in bf16 against other engines: tests/golden/README.md has the rules.

use serde_json::Value;
use thalweg_worker::backend::cuda::{CudaBackend, CudaBackendConfig};
use thalweg_worker::plan::{Logprobs, RowInput, Want};
use thalweg_worker::runner::DeviceRunner;
use thalweg_worker::sampling::SamplingParams;

use crate::models::{config, load, row, run, runner, start};
use crate::support::{model, workspace};

/// Gap between the reference's best two logits from which on everyone must agree on the best.
const CLEAR_GAP: f64 = 0.5;
const TOLERANCE: f64 = 0.3;

#[test]
fn smollm2() {
    check("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct-q4_1.json");
}

#[test]
fn gemma3() {
    check("gemma-3-270m-q4_k_m.gguf", "gemma3-270m-q4km.json");
}

fn check(file: &str, golden: &str) {
    let path = workspace("tests/golden").join(golden);
    let golden: Value = serde_json::from_slice(&std::fs::read(path).expect("golden file")).expect("JSON");
    let weights = load(&model("THALWEG_TEST_MODELS", ".cache/models", file));
    for deterministic in [true, false] {
        let mut sequence = Sequence {
            runner: runner(&weights, CudaBackendConfig { deterministic, ..config(1) }),
            context: 0,
        };
        let (mut worst, mut clear, mut others) = (0f64, 0, 0);
        for case in golden["cases"].as_array().expect("cases") {
            let (difference, agreed, differed) = check_case(&mut sequence, case);
            worst = worst.max(difference);
            clear += agreed;
            others += differed;
        }
        assert!(clear > 0);
        println!(
            "{file}, deterministic {deterministic}: {clear} clear positions agree, {others} others differ; first \
             logprobs within {worst:.4}"
        );
    }
}

fn check_case(sequence: &mut Sequence, case: &Value) -> (f64, usize, usize) {
    let name = case["name"].as_str().expect("a name");
    let prompt = ids(&case["prompt_ids"]);
    let forced = ids(&case["kv_f32"]["greedy_ids"]);
    let expected = ids(&case["ref_f32"]["teacher_forced_argmax"]);
    let gaps = &case["ref_f32"]["teacher_forced_top1_top2_gap"];
    sequence.context = 0;
    let (last, before) = prompt.split_last().expect("a prompt");
    for part in before.chunks(512) {
        sequence.step(part, Want::Nothing);
    }
    let inputs: Vec<u32> = std::iter::once(last).chain(&forced[..forced.len() - 1]).copied().collect();
    let next = forced.last().copied();
    let scored = sequence.step(&inputs, Want::PromptLogprobs { top: 5, next, output_index: None });
    assert_eq!(scored.len(), expected.len(), "{name}");
    let worst = compare_first(name, &scored[0].top, &case["ref_f32"]["top5_first"]);
    let (mut clear, mut others) = (0, 0);
    for (index, (scored, expected)) in scored.iter().zip(expected).enumerate() {
        let gap = gaps[index].as_f64().expect("a gap");
        if gap > CLEAR_GAP {
            assert_eq!(scored.top[0].0, expected, "{name}, output {index}, gap {gap}");
            clear += 1;
        } else {
            others += usize::from(scored.top[0].0 != expected);
        }
    }
    (worst, clear, others)
}

fn compare_first(name: &str, ours: &[(u32, f32)], reference: &Value) -> f64 {
    let (mut worst, mut shared) = (0f64, 0);
    for entry in reference.as_array().expect("top five") {
        let id = entry["id"].as_u64().expect("an id") as u32;
        let logprob = entry["logprob"].as_f64().expect("a logprob");
        if let Some((_, ours)) = ours.iter().find(|(ours, _)| *ours == id) {
            let difference = (f64::from(*ours) - logprob).abs();
            assert!(difference <= TOLERANCE, "{name}, token {id}: {ours} against {logprob}");
            worst = worst.max(difference);
            shared += 1;
        }
    }
    assert!(shared > 0, "{name}: no token is in both top fives");
    worst
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// One sequence on a device of its own.
struct Sequence {
    runner: DeviceRunner<CudaBackend>,
    context: usize,
}

impl Sequence {
    fn step(&mut self, tokens: &[u32], want: Want) -> Vec<Logprobs> {
        let slots = if self.context == 0 { vec![start(0, SamplingParams::greedy())] } else { Vec::new() };
        let row = row(0, RowInput::Tokens(tokens.to_vec()), self.context, want);
        self.context += tokens.len();
        run(&mut self.runner, slots, vec![row]).remove(0).prompt
    }
}
