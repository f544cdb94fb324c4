//! A model on the CPU backend, driven step by step as the engine does.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use thalweg_model::adapter::Adapter;
use thalweg_model::checkpoint::Checkpoint;
use thalweg_worker::backend::cpu::linear::Compute;
use thalweg_worker::backend::cpu::{CpuBackend, CpuBackendConfig, CpuModel, KvDtype};
use thalweg_worker::plan::{AdapterSlot, Logprobs, Row, RowInput, RowOutput, SlotInit, Want};
use thalweg_worker::runner::ModelRunner;
use thalweg_worker::sampling::SamplingParams;

pub(crate) mod plans;

use plans::{SLOT_BLOCKS, row, run, start};

/// A folder of the workspace.
pub(crate) fn workspace(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Path of a downloaded model.
pub(crate) fn test_model(file: &str) -> PathBuf {
    existing("THALWEG_TEST_MODELS", ".cache/models", file)
}

/// Folder of a small seeded checkpoint.
pub(crate) fn tiny_model(family: &str) -> PathBuf {
    existing("THALWEG_TINY_MODELS", ".cache/tiny", family)
}

fn existing(variable: &str, default: &str, name: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(|| workspace(default), PathBuf::from).join(name);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    path
}

/// Token ids of a JSON array.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

/// Loads a checkpoint.
pub(crate) fn load(path: &Path, compute: Compute) -> Arc<CpuModel> {
    let checkpoint = Checkpoint::open(path).expect("a readable checkpoint");
    CpuModel::load(&checkpoint, 2, compute).expect("a model that fits")
}

/// Adapters of a small seeded checkpoint, in the order of their slots: on every product, and on a few.
pub(crate) const TINY_ADAPTERS: [&str; 2] = ["all", "few"];

/// Loads a small seeded checkpoint with its adapters.
pub(crate) fn load_adapted(family: &str, compute: Compute) -> Arc<CpuModel> {
    let path = tiny_model(family);
    let checkpoint = Checkpoint::open(&path).expect("a readable checkpoint");
    let adapters = TINY_ADAPTERS.map(|name| {
        Adapter::open(&path.join("adapters").join(name), checkpoint.config()).expect("a sound adapter")
    });
    CpuModel::load_with(&checkpoint, &adapters, 2, compute).expect("a model that fits")
}

const STEP_TOKENS: usize = 512;

/// A backend behind its runner.
pub(crate) struct Device {
    pub(crate) runner: ModelRunner,
}

impl Device {
    pub(crate) fn new(model: Arc<CpuModel>, threads: usize, kv_dtype: KvDtype, slots: usize) -> Self {
        let config = CpuBackendConfig {
            threads,
            kv_blocks: [slots * SLOT_BLOCKS; 2],
            kv_dtype,
            max_slots: slots,
            max_tokens_per_step: STEP_TOKENS,
        };
        let device = CpuBackend::new(model, config).expect("memory for the backend");
        Self { runner: ModelRunner::start(device).expect("a thread") }
    }

    /// Runs one step.
    pub(crate) fn step(&mut self, slots: Vec<SlotInit>, rows: Vec<Row>) -> Vec<RowOutput> {
        run(&mut self.runner, slots, rows)
    }
}

/// One sequence on a device of its own.
pub(crate) struct Sequence {
    device: Device,
    adapter: AdapterSlot,
    context: usize,
}

impl Sequence {
    /// Loads the model.
    pub(crate) fn open(path: &Path, compute: Compute, kv_dtype: KvDtype) -> Self {
        Self::over(load(path, compute), kv_dtype, AdapterSlot::BASE)
    }

    /// A loaded model, and one of its adapters.
    pub(crate) fn over(model: Arc<CpuModel>, kv_dtype: KvDtype, adapter: AdapterSlot) -> Self {
        Self { device: Device::new(model, 2, kv_dtype, 1), adapter, context: 0 }
    }

    /// Begins anew.
    pub(crate) fn clear(&mut self) {
        self.context = 0;
    }

    /// Takes tokens in without looking at logits.
    pub(crate) fn feed(&mut self, tokens: &[u32]) {
        for part in tokens.chunks(STEP_TOKENS) {
            self.step(part, Want::Nothing);
        }
    }

    /// Takes tokens in; logprobs of the token after each, `next` being the last one's, with `top` alternatives.
    pub(crate) fn score(&mut self, tokens: &[u32], next: u32, top: u32) -> Vec<Logprobs> {
        self.step(tokens, Want::PromptLogprobs { top, next: Some(next), output_index: None })
    }

    fn step(&mut self, tokens: &[u32], want: Want) -> Vec<Logprobs> {
        let slots = if self.context == 0 { vec![start(0, SamplingParams::greedy())] } else { Vec::new() };
        let row = row(0, RowInput::Tokens(tokens.to_vec()), self.context, want);
        let row = Row { adapter: self.adapter, ..row };
        self.context += tokens.len();
        self.device.step(slots, vec![row]).into_iter().flat_map(|row| row.prompt).collect()
    }
}
