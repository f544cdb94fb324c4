//! Logits and draws are bitwise those of the sequence alone, whatever the chunking, batch mates, threads and slots.

use std::sync::Arc;

use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cpu::{CpuModel, KvDtype};
use thalweg_worker::plan::{AdapterSlot, Row, RowInput, RowOutput, Want};
use thalweg_worker::sampling::SamplingParams;

mod support;

use support::Device;
use support::plans::{row, start};

/// Tokens drawn behind each prompt.
const OUTPUTS: u32 = 12;

#[test]
fn smollm2_int8_in_every_kv_dtype() {
    let model = support::load(&support::test_model("SmolLM2-135M-Instruct.Q4_1.gguf"), Compute::Int8);
    for kv_dtype in KvDtype::ALL {
        check(&model, kv_dtype, 200);
    }
}

#[test]
fn gemma3_int8() {
    let model = support::load(&support::test_model("gemma-3-270m-q4_k_m.gguf"), Compute::Int8);
    check(&model, KvDtype::Bf16, 120);
}

#[test]
fn tiny_f32_across_chunks_of_attention() {
    // sampling-08.
    for family in ["llama3", "gemma3", "mistral"] {
        let model = support::load(&support::tiny_model(family), Compute::F32);
        check(&model, KvDtype::F32, 300);
        check(&model, KvDtype::Bf16, 300);
    }
}

/// Rows with different adapters, and without, in one batch.
#[test]
fn tiny_with_adapters() {
    for compute in [Compute::F32, Compute::Int8] {
        let model = support::load_adapted("llama3", compute);
        let alone = (0..3).map(|slot| check_adapted(&model, KvDtype::Bf16, 300, AdapterSlot(slot)));
        let alone: Vec<RowOutput> = alone.collect();
        assert!(alone[0] != alone[1] && alone[0] != alone[2] && alone[1] != alone[2]);
    }
}

/// The sequence alone, prompt in one piece, on one thread, is what all others are held against.
fn check(model: &Arc<CpuModel>, kv_dtype: KvDtype, prompt_len: usize) {
    check_adapted(model, kv_dtype, prompt_len, AdapterSlot::BASE);
}

fn check_adapted(
    model: &Arc<CpuModel>,
    kv_dtype: KvDtype,
    prompt_len: usize,
    adapter: AdapterSlot,
) -> RowOutput {
    let prompt = tokens(prompt_len, 1, model);
    let run = |threads, piece, mates| Run { threads, piece, mates, adapter };
    let alone = run(1, prompt_len, 0).outputs(model, kv_dtype, &prompt);
    assert!(alone.sampled.len() == OUTPUTS as usize && alone.prompt.len() == prompt_len - 1);
    for run in [run(1, 1, 0), run(2, 7, 0), run(3, 16, 2), run(2, 100, 5), run(4, prompt_len, 1)] {
        let outputs = run.outputs(model, kv_dtype, &prompt);
        assert!(outputs == alone, "{} {run:?}: differs from the sequence alone", kv_dtype.name());
    }
    alone
}

#[derive(Debug)]
struct Run {
    threads: usize,
    piece: usize,
    mates: usize,
    adapter: AdapterSlot,
}

impl Run {
    /// Prompt logprobs and tokens of the sequence in the last slot; each mate runs its own prompt beside it, one token a step, with
    /// the next adapter where the sequence has one.
    fn outputs(&self, model: &Arc<CpuModel>, kv_dtype: KvDtype, prompt: &[u32]) -> RowOutput {
        let mut device = Device::new(model.clone(), self.threads, kv_dtype, self.mates + 1);
        let sampling = SamplingParams {
            temperature: 0.9,
            top_p: 0.95,
            seed: 7,
            logprobs: Some(3),
            ..SamplingParams::greedy()
        };
        let mut slots: Vec<_> = (0..self.mates).map(|mate| start(mate, SamplingParams::greedy())).collect();
        slots.push(start(self.mates, sampling));
        let mates: Vec<_> = (0..self.mates).map(|mate| tokens(900, 2 + mate as u32, model)).collect();
        let mut collected = RowOutput::default();
        let mut context = 0;
        for (step, input) in self.inputs(prompt).into_iter().enumerate() {
            let end = context + input.len();
            let want = want(prompt, context, end);
            let mut rows: Vec<_> = (mates.iter().enumerate())
                .map(|(mate, ids)| {
                    let one = RowInput::Tokens(vec![ids[step]]);
                    let row = row(mate, one, step, Want::Sample { output_index: step as u32 });
                    let slot = if self.adapter == AdapterSlot::BASE { 0 } else { (mate as u32 + 1) % 3 };
                    Row { adapter: AdapterSlot(slot), ..row }
                })
                .collect();
            let own = row(self.mates, input, context, want);
            rows.insert(self.mates / 2, Row { adapter: self.adapter, ..own });
            let outputs = device.step(std::mem::take(&mut slots), rows);
            let RowOutput { sampled, prompt, .. } = outputs[self.mates / 2].clone();
            collected.sampled.extend(sampled);
            collected.prompt.extend(prompt);
            context = end;
        }
        collected
    }

    fn inputs(&self, prompt: &[u32]) -> Vec<RowInput> {
        let chunks = prompt.chunks(self.piece).map(|chunk| RowInput::Tokens(chunk.to_vec()));
        chunks.chain((1..OUTPUTS).map(|_| RowInput::LastSampled)).collect()
    }
}

/// Prompt logprobs for every position but the last, which draws the first token.
fn want(prompt: &[u32], context: usize, end: usize) -> Want {
    match prompt.len() {
        len if end < len => Want::PromptLogprobs { top: 4, next: Some(prompt[end]), output_index: None },
        len if context < len => Want::PromptLogprobs { top: 4, next: None, output_index: Some(0) },
        len => Want::Sample { output_index: (end - len) as u32 },
    }
}

fn tokens(count: usize, seed: u32, model: &CpuModel) -> Vec<u32> {
    let next = |x: &u32| Some(x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let ids = std::iter::successors(Some(seed), next).skip(1);
    ids.map(|x| (x >> 8) % model.config().vocab_size as u32).take(count).collect()
}
