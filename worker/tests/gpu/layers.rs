//! Layers as wide as an 8B's in steps of few rows, whose products hand norms to one another, against products that take nothing along.

use thalweg_model::checkpoint::BareModel;
use thalweg_worker::backend::cuda::{CudaBackend, CudaBackendConfig, CudaModel, WeightSource};
use thalweg_worker::plan::{Row, RowInput, Want};
use thalweg_worker::runner::DeviceRunner;
use thalweg_worker::sampling::SamplingParams;

use crate::models::{config, ids, row, run, runner, start};
use crate::support::{close, gpu, workspace};

const SLOTS: usize = 50;

/// Logprobs of given tokens: prompts of three tokens, then so many rows of one token each, then some of these beside a longer prompt.
fn logprobs(runner: &mut DeviceRunner<CudaBackend>) -> Vec<f64> {
    let want = Want::PromptLogprobs { top: 1, next: Some(5), output_index: None };
    let tokens = |slot: usize, count| RowInput::Tokens(ids(count, slot as u32, 128_256));
    let mut starts: Vec<_> = (0..SLOTS).map(|slot| start(slot, SamplingParams::greedy())).collect();
    let mut logprobs = Vec::new();
    let mut step = |starts, rows: Vec<Row>| {
        let told = run(runner, starts, rows).into_iter().flat_map(|row| row.prompt);
        logprobs.extend(told.map(|told| f64::from(told.logprob)));
    };
    for slots in (0..SLOTS).collect::<Vec<_>>().chunks(20) {
        let rows = slots.iter().map(|slot| row(*slot, tokens(*slot, 3), 0, want));
        step(std::mem::take(&mut starts), rows.collect());
    }
    for (index, rows) in [SLOTS - 1, 40, 17, 13].into_iter().enumerate() {
        step(
            Vec::new(),
            (0..rows).map(|slot| row(slot, tokens(slot + 7 * index, 1), 3 + index, want)).collect(),
        );
    }
    // Behind the last layer's attention only the rows that are wanted are left.
    let mut rows: Vec<Row> = (0..13).map(|slot| row(slot, tokens(slot + 99, 1), 7, want)).collect();
    rows.push(row(SLOTS - 1, tokens(3, 40), 3, Want::Nothing));
    step(Vec::new(), rows);
    logprobs
}

/// Each way to run a step, on a cache of NaN.
#[test]
fn layers_by_clusters_answer_as_exact_ones() {
    let mut shape = BareModel::open(&workspace("tests/gpu-models/llama-3.1-8b")).expect("a shape").config;
    shape.layers.truncate(3);
    let model = CudaModel::load(&gpu(), &shape, &WeightSource::Dummy { seed: 1 }).expect("a model that fits");
    let answers = |config: CudaBackendConfig| {
        let mut runner = runner(&model, config);
        runner.device().fill_kv(0xff).expect("a fill");
        logprobs(&mut runner)
    };
    let exact = answers(config(SLOTS));
    for (graphs, overlapped) in [(false, false), (true, false), (false, true), (true, true)] {
        let config = CudaBackendConfig { deterministic: false, graphs, overlapped, ..config(SLOTS) };
        close(&format!("graphs {graphs}, overlapped {overlapped}"), &answers(config), &exact, |_| 0.15);
    }
}
