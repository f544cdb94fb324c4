//! LoRA adapters in whole models.

use thalweg_model::adapter::Adapter;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_worker::backend::cpu::CpuModel;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cuda::{CudaBackendConfig, CudaModel, WeightSource};
use thalweg_worker::plan::{AdapterSlot, Row, RowInput, StepPlan, Want};
use thalweg_worker::runner::Runner;

use crate::models::{config, cpu_runner, ids, row, run, runner, start, tiny, with_logprobs};
use crate::support::gpu;

/// Adapters of the tiny Llama: against the CPU, and rows of all of them in one step to the bit as alone.
#[test]
fn adapters_are_those_of_the_cpu_and_rows_those_alone() {
    let path = tiny("llama3");
    let checkpoint = Checkpoint::open(&path).expect("a readable checkpoint");
    let adapters = ["all", "few"].map(|name| {
        Adapter::open(&path.join("adapters").join(name), checkpoint.config()).expect("a sound adapter")
    });
    let source = WeightSource::Checkpoint(&checkpoint);
    let model = CudaModel::load_with(&gpu(), checkpoint.config(), &source, &adapters).expect("a model");
    let on_cpu = CpuModel::load_with(&checkpoint, &adapters, 2, Compute::F32).expect("a model");
    let mut on_cpu = cpu_runner(on_cpu, 1);
    let adapted = |slot: usize, tokens: &[u32], context, want, adapter| {
        let adapter = AdapterSlot(adapter);
        Row { adapter, ..row(slot, RowInput::Tokens(tokens.to_vec()), context, want) }
    };
    let want = Want::PromptLogprobs { top: 5, next: Some(3), output_index: Some(0) };
    let sequences = [(0, 100), (1, 100), (2, 100), (1, 1), (2, 5), (0, 3)];
    for deterministic in [true, false] {
        let mut alone = runner(&model, CudaBackendConfig { deterministic, ..config(1) });
        let mut answers = Vec::new();
        for (adapter, len) in sequences {
            let tokens = ids(len, 1, 320);
            let row = adapted(0, &tokens, 0, want, adapter);
            let ours = run(&mut alone, vec![start(0, with_logprobs())], vec![row.clone()]).remove(0);
            let theirs = run(&mut on_cpu, vec![start(0, with_logprobs())], vec![row]).remove(0);
            let pairs = ours.prompt.iter().zip(&theirs.prompt);
            let worst = pairs.map(|(a, b)| (a.logprob - b.logprob).abs()).fold(0f32, f32::max);
            println!("adapter {adapter}, {len} tokens, deterministic {deterministic}: within {worst:.4}");
            assert!(worst < 0.15, "adapter {adapter}, {len} tokens: {worst}");
            answers.push(ours);
        }
        if !deterministic {
            continue;
        }
        let mut together = runner(&model, config(sequences.len()));
        let starts = (0..sequences.len()).map(|slot| start(slot, with_logprobs())).collect();
        let rows = sequences.into_iter().enumerate();
        let rows = rows.map(|(slot, (adapter, len))| adapted(slot, &ids(len, 1, 320), 0, want, adapter));
        assert!(run(&mut together, starts, rows.collect()) == answers, "rows differ from those alone");
    }
    let mut alone = runner(&model, config(1));
    let plan = StepPlan { rows: vec![adapted(0, &[1], 0, Want::Nothing, 3)], ..StepPlan::default() };
    let error = alone.submit(plan).expect_err("two adapters").to_string();
    assert!(error.contains("adapter 3 of 2"), "{error}");
}
