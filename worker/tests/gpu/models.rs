//! Whole models: against the CPU backend, and against themselves in another shape.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thalweg_model::checkpoint::{BareModel, Checkpoint};
use thalweg_worker::backend::Backend;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cpu::{CpuBackend, CpuBackendConfig, CpuModel, KvDtype};
use thalweg_worker::backend::cuda::{
    CudaBackend, CudaBackendConfig, CudaModel, Gpu, OnFault, PlanSearch, WeightSource,
};
use thalweg_worker::plan::{BlockId, Logprobs, Row, RowInput, RowOutput, SlotId, SlotInit, StepPlan, Want};
use thalweg_worker::runner::{DeviceRunner, ModelRunner, Runner};
use thalweg_worker::sampling::SamplingParams;

pub(crate) use crate::plans::{SLOT_BLOCKS, row, run, start};
use crate::support::{gpu, libraries, model, workspace};

pub(crate) const FAMILIES: [&str; 6] = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma3"];

/// Small, exact, everything on.
pub(crate) fn config(slots: usize) -> CudaBackendConfig {
    CudaBackendConfig {
        kv_blocks: [slots * SLOT_BLOCKS; 2],
        kv_dtype: KvDtype::Bf16,
        max_slots: slots,
        max_tokens_per_step: 512,
        max_model_len: SLOT_BLOCKS * 16,
        deterministic: true,
        graphs: true,
        overlapped: false,
        step_timeout: Duration::from_secs(60),
        partials_max: 0,
        on_fault: OnFault::Report,
        plans: PlanSearch::FirstChoice,
    }
}

pub(crate) fn load(path: &Path) -> Arc<CudaModel> {
    let checkpoint = Checkpoint::open(path).expect("a readable checkpoint");
    CudaModel::load(&gpu(), checkpoint.config(), &WeightSource::Checkpoint(&checkpoint))
        .expect("a model that fits")
}

pub(crate) fn tiny(family: &str) -> std::path::PathBuf {
    model("THALWEG_TINY_MODELS", ".cache/tiny", family)
}

pub(crate) fn runner(model: &Arc<CudaModel>, config: CudaBackendConfig) -> DeviceRunner<CudaBackend> {
    gpu();
    let backend = CudaBackend::new(model.clone(), config, libraries().as_deref());
    DeviceRunner::new(backend.unwrap_or_else(|error| panic!("no backend: {error}")))
}

pub(crate) fn on_cpu(family: &str, slots: usize) -> ModelRunner {
    let checkpoint = Checkpoint::open(&tiny(family)).expect("a readable checkpoint");
    cpu_runner(CpuModel::load(&checkpoint, 2, Compute::F32).expect("a model that fits"), slots)
}

pub(crate) fn cpu_runner(model: Arc<CpuModel>, slots: usize) -> ModelRunner {
    let config = CpuBackendConfig {
        threads: 2,
        kv_blocks: [slots * SLOT_BLOCKS; 2],
        kv_dtype: KvDtype::F32,
        max_slots: slots,
        max_tokens_per_step: 512,
    };
    ModelRunner::start(CpuBackend::new(model, config).expect("memory")).expect("a thread")
}

pub(crate) fn with_logprobs() -> SamplingParams {
    SamplingParams { logprobs: Some(3), ..SamplingParams::greedy() }
}

pub(crate) fn ids(count: usize, seed: u32, vocab: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i.wrapping_mul(7919).wrapping_add(seed * 104_729 + i * i)) % vocab).collect()
}

pub(crate) fn score(runner: &mut impl Runner, tokens: &[u32]) -> Vec<Logprobs> {
    let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: Some(0) };
    let rows = vec![row(0, RowInput::Tokens(tokens.to_vec()), 0, want)];
    run(runner, vec![start(0, SamplingParams::greedy())], rows).remove(0).prompt
}

#[test]
fn logprobs_are_those_of_the_cpu() {
    for family in FAMILIES {
        for deterministic in [true, false] {
            let model = load(&tiny(family));
            let mut on_gpu = runner(&model, CudaBackendConfig { deterministic, ..config(1) });
            let mut on_cpu = on_cpu(family, 1);
            for len in [1, 2, 17, 100, 300] {
                let tokens = ids(len, 1, 320);
                let (ours, theirs) = (score(&mut on_gpu, &tokens), score(&mut on_cpu, &tokens));
                assert_eq!(ours.len(), len);
                let mut worst = 0f32;
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    assert_eq!(ours.token, theirs.token);
                    worst = worst.max((ours.logprob - theirs.logprob).abs());
                }
                println!("{family} {len} tokens, deterministic {deterministic}: logprobs within {worst:.4}");
                assert!(worst < 0.15, "{family}: {len} tokens, {worst}");
            }
        }
    }
}

/// Greedy outputs of a few prompts with everything in one batch: tokens, and logprobs to the bit.
fn outputs(model: &Arc<CudaModel>, config: CudaBackendConfig, deep: bool) -> Vec<(u32, u32)> {
    let slots = config.max_slots;
    let mut runner = runner(model, config);
    // Contexts that pass blocks and a chunk while they decode.
    let lens = [1, 5, 17, 33, 64, 120, 250];
    let prompts: Vec<Vec<u32>> = (0..slots).map(|slot| ids(lens[slot], slot as u32, 320)).collect();
    let starts = (0..slots).map(|slot| start(slot, with_logprobs())).collect();
    let rows = prompts.iter().enumerate().map(|(slot, prompt)| {
        row(slot, RowInput::Tokens(prompt.clone()), 0, Want::Sample { output_index: 0 })
    });
    let mut outputs = run(&mut runner, starts, rows.collect());
    let decode = |output: u32| StepPlan {
        slots: Vec::new(),
        rows: (0..slots)
            .map(|slot| {
                let context = prompts[slot].len() + output as usize - 1;
                row(slot, RowInput::LastSampled, context, Want::Sample { output_index: output })
            })
            .collect(),
        ..StepPlan::default()
    };
    let mut in_flight = std::collections::VecDeque::new();
    for output in 1..24 {
        in_flight.push_back(runner.submit(decode(output)).expect("room"));
        if !deep || in_flight.len() == 2 {
            outputs.extend(runner.collect(in_flight.pop_front().unwrap()).expect("a step").rows);
        }
    }
    for step in in_flight {
        outputs.extend(runner.collect(step).expect("a step").rows);
    }
    let bits =
        |row: RowOutput| row.sampled.into_iter().map(|s| (s.token, s.logprob.to_bits())).collect::<Vec<_>>();
    outputs.into_iter().flat_map(bits).collect()
}

#[test]
fn recorded_steps_are_those_launched_one_by_one() {
    for family in FAMILIES {
        let model = load(&tiny(family));
        let eager = outputs(&model, CudaBackendConfig { graphs: false, ..config(7) }, false);
        assert_eq!(eager.len(), 7 * 24);
        assert!(eager == outputs(&model, config(7), false), "{family}: recorded");
        assert!(eager == outputs(&model, config(7), true), "{family}: two steps deep");
        let overlapped = CudaBackendConfig { overlapped: true, ..config(7) };
        assert!(eager == outputs(&model, overlapped.clone(), true), "{family}: overlapped");
        let overlapped = CudaBackendConfig { graphs: false, ..overlapped };
        assert!(eager == outputs(&model, overlapped, true), "{family}: overlapped, one by one");
        let short = CudaBackendConfig { partials_max: 1, ..config(7) };
        assert!(eager == outputs(&model, short, false), "{family}: without partial results");
        // The library's sums may differ by rounding, but not when recorded.
        let library = |graphs| CudaBackendConfig { deterministic: false, graphs, ..config(7) };
        let tokens = |outputs: Vec<(u32, u32)>| outputs.iter().take(7).map(|o| o.0).collect::<Vec<_>>();
        let both = [false, true].map(|graphs| tokens(outputs(&model, library(graphs), true)));
        println!("{family}: cublasLt's first tokens {both:?}");
    }
}

#[test]
fn nothing_unwritten_is_read() {
    for family in ["gemma3", "llama3"] {
        let model = load(&tiny(family));
        let logprobs = |poison: bool| {
            let mut runner = runner(&model, config(1));
            if poison {
                runner.device().fill_kv(0xff).expect("a fill");
            }
            let tokens = ids(300, 2, 320);
            let rows = vec![row(0, RowInput::Tokens(tokens[..270].to_vec()), 0, Want::Nothing)];
            run(&mut runner, vec![start(0, SamplingParams::greedy())], rows);
            let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: None };
            let rows = vec![row(0, RowInput::Tokens(tokens[270..].to_vec()), 270, want)];
            run(&mut runner, Vec::new(), rows).remove(0).prompt
        };
        let (clean, poisoned) = (logprobs(false), logprobs(true));
        assert!(clean.iter().all(|l| l.logprob.is_finite()));
        assert_eq!(clean, poisoned, "{family}");
    }
}

#[test]
fn copied_blocks_hold_the_same() {
    let model = load(&tiny("gemma3"));
    let mut runner = runner(&model, config(2));
    let tokens = ids(40, 3, 320);
    let rows = vec![row(0, RowInput::Tokens(tokens[..32].to_vec()), 0, Want::Nothing)];
    run(&mut runner, vec![start(0, SamplingParams::greedy()), start(1, SamplingParams::greedy())], rows);
    for group in 0..2 {
        let pair = |block: usize| {
            (BlockId((SLOT_BLOCKS - 1 - block) as u32), BlockId((2 * SLOT_BLOCKS - 1 - block) as u32))
        };
        runner.device().copy_blocks(group, &[pair(0), pair(1)]);
    }
    let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: None };
    let rows = |slot| vec![row(slot, RowInput::Tokens(tokens[32..].to_vec()), 32, want)];
    assert_eq!(run(&mut runner, Vec::new(), rows(0)), run(&mut runner, Vec::new(), rows(1)));
}

/// A pool whose elements are more than 32 bits can count, used at its end.
#[test]
fn blocks_beyond_four_billion_elements() {
    let model = load(&tiny("llama3"));
    // 2 KV heads of 64: 2,048 elements a block and layer.
    let blocks = (1 << 32) / 2048 + 100;
    let tokens = ids(300, 4, 320);
    let answer = |blocks: usize, first: usize| {
        let config = CudaBackendConfig { kv_blocks: [blocks, 0], ..config(1) };
        let mut runner = runner(&model, config);
        let mut answer = Vec::new();
        for (from, to) in [(0, 270), (270, 300)] {
            let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: None };
            let mut row = row(0, RowInput::Tokens(tokens[from..to].to_vec()), from, want);
            Arc::make_mut(&mut row.tables[0].blocks).iter_mut().for_each(|block| block.0 += first as u32);
            let slots = if from == 0 { vec![start(0, SamplingParams::greedy())] } else { Vec::new() };
            answer.extend(run(&mut runner, slots, vec![row]).remove(0).prompt);
        }
        answer
    };
    assert_eq!(answer(SLOT_BLOCKS, 0), answer(blocks, blocks - SLOT_BLOCKS));
}

#[test]
fn broken_plans_are_refused() {
    let model = load(&tiny("mistral"));
    let good = || row(0, RowInput::Tokens(vec![1, 2, 3]), 0, Want::Sample { output_index: 0 });
    let check = |change: &dyn Fn(&mut Row), part: &str| {
        let mut runner = runner(&model, CudaBackendConfig { graphs: false, ..config(2) });
        let mut row = good();
        change(&mut row);
        let plan = StepPlan {
            slots: vec![start(0, SamplingParams::greedy())],
            rows: vec![row],
            ..StepPlan::default()
        };
        let error = runner.submit(plan).expect_err(part).to_string();
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    };
    check(&|row| row.input = RowInput::Tokens(vec![320]), "token 320 of a vocabulary of 320");
    check(&|row| row.input = RowInput::Tokens(Vec::new()), "no tokens");
    check(&|row| row.input = RowInput::Tokens(vec![1; 513]), "513 tokens in a step, room for 512");
    check(&|row| Arc::make_mut(&mut row.tables[1].blocks)[0] = BlockId(9999), "block 9999 of 128");
    check(&|row| row.slot = SlotId(2), "slot 2 of 2");
    check(
        &|row| (row.slot, row.input) = (SlotId(1), RowInput::LastSampled),
        "slot 1 has sampled nothing yet",
    );
}

/// A step that takes longer than allowed is told as one, and nothing waits for the GPU after that.
#[test]
fn a_hung_step_is_an_error() {
    let gpu = Gpu::open(0, libraries().as_deref()).expect("a GPU");
    let checkpoint = Checkpoint::open(&tiny("llama3")).expect("a readable checkpoint");
    let model =
        CudaModel::load(&gpu, checkpoint.config(), &WeightSource::Checkpoint(&checkpoint)).expect("a model");
    let mut runner = runner(&model, CudaBackendConfig { step_timeout: Duration::ZERO, ..config(1) });
    let rows = vec![row(0, RowInput::Tokens(ids(500, 1, 320)), 0, Want::Nothing)];
    let step = runner
        .submit(StepPlan { slots: vec![start(0, SamplingParams::greedy())], rows, ..StepPlan::default() })
        .expect("a plan");
    let error = runner.collect(step).expect_err("no time").to_string();
    assert!(error.contains("a kernel hangs"), "{error}");
    let after = runner.submit(StepPlan::default()).expect_err("its state is lost").to_string();
    assert!(after.contains("an earlier step failed"), "{after}");
    gpu.bind().expect("a context");
}

/// Random weights in the shape of a served model: prompts and decode steps give finite logprobs.
#[test]
fn dummy_weights_of_any_shape() {
    let shape = BareModel::open(&workspace("tests/gpu-models/llama-3.1-8b")).expect("a shape");
    let mut shape = shape.config;
    shape.layers.truncate(3);
    let gpu = gpu();
    let model = CudaModel::load(&gpu, &shape, &WeightSource::Dummy { seed: 1 }).expect("a model that fits");
    for deterministic in [true, false] {
        let mut runner = runner(&model, CudaBackendConfig { deterministic, ..config(3) });
        println!("{} recorded shapes", runner.device().recorded());
        let starts = (0..3).map(|slot| start(slot, with_logprobs())).collect();
        let tokens = |slot: usize| RowInput::Tokens(ids(100 + slot, slot as u32, 128_256));
        let rows = (0..3).map(|slot| row(slot, tokens(slot), 0, Want::Sample { output_index: 0 }));
        let mut all = run(&mut runner, starts, rows.collect());
        for output in 1..20 {
            let rows = (0..3).map(|slot| {
                let context = 100 + slot + output - 1;
                row(slot, RowInput::LastSampled, context, Want::Sample { output_index: output as u32 })
            });
            all.extend(run(&mut runner, Vec::new(), rows.collect()));
        }
        assert!(all.iter().all(|row| row.sampled[0].logprob.is_finite() && row.sampled[0].rank == 1));
        assert!(all.iter().all(|row| row.sampled[0].top.len() == 3));
    }
}

/// More tokens of new slots than one copy carries: all of them count for penalties.
#[test]
fn many_long_sequences_begin_at_once() {
    let model = load(&tiny("llama3"));
    let slots = 70;
    let init = |slot: usize| SlotInit {
        sampling: Arc::new(SamplingParams { repetition_penalty: 1.5, ..with_logprobs() }),
        prompt: ids(1000, slot as u32, 320 - slot as u32).into(),
        ..start(slot, SamplingParams::greedy())
    };
    let rows = |slots: std::ops::Range<usize>| -> Vec<Row> {
        let tokens = |slot: usize| RowInput::Tokens(vec![slot as u32, 300]);
        slots.map(|slot| row(slot, tokens(slot), 0, Want::Sample { output_index: 0 })).collect()
    };
    let mut at_once = runner(&model, config(slots));
    let together = run(&mut at_once, (0..slots).map(init).collect(), rows(0..slots));
    let mut one_by_one = runner(&model, config(slots));
    for (slot, together) in together.iter().enumerate() {
        let alone = run(&mut one_by_one, vec![init(slot)], rows(slot..slot + 1));
        assert_eq!(alone[0], *together, "slot {slot}");
    }
}
