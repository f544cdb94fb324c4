//! Memory of a GPU to its last byte: nothing is taken behind the start, and what cannot fit does not start.

use std::sync::Arc;

use clap::Parser;
use thalweg_worker::backend::cpu::kv_block_bytes;
use thalweg_worker::backend::cuda::{CudaBackend, CudaBackendConfig, CudaError, CudaModel};
use thalweg_worker::config::WorkerConfig;
use thalweg_worker::plan::{KV_GROUPS, Row, RowInput, RowOutput, SlotInit, Want};
use thalweg_worker::pooling::Pooling;
use thalweg_worker::runner::DeviceRunner;
use thalweg_worker::sampling::SamplingParams;
use thalweg_worker::worker::SharedModel;

use crate::models::{SLOT_BLOCKS, config, ids, load, row, run, start, tiny, with_logprobs};
use crate::support::{gpu, libraries};

const SLOTS: usize = 20;
const PROMPTS: [usize; 7] = [500, 1, 17, 300, 64, 130, 470];

/// Keys and values take all that is left; steps of every kind run on the last blocks as they do on the first ones of a small pool.
#[test]
fn a_full_gpu_runs_every_kind_of_step() {
    let model = load(&tiny("gemma3"));
    for (deterministic, graphs) in [(false, true), (true, true), (false, false)] {
        let config = CudaBackendConfig { deterministic, graphs, ..config(SLOTS) };
        let small = outputs(CudaBackend::new(model.clone(), config.clone(), libraries().as_deref()), 0);
        let (full, first) = full(&model, config);
        let (free_before, _) = gpu().memory().expect("sizes");
        let large = outputs(Ok(full), first);
        println!("deterministic {deterministic}, graphs {graphs}: {} MiB were free", free_before >> 20);
        assert!(free_before < 256 << 20, "{free_before} bytes were left over");
        assert!(small == large, "deterministic {deterministic}, graphs {graphs}");
    }
}

/// A backend whose blocks take all memory, half of it for each group, and the first of its last blocks.
fn full(model: &Arc<CudaModel>, config: CudaBackendConfig) -> (CudaBackend, usize) {
    let dtype = config.kv_dtype;
    let prepared = CudaBackend::prepare(model.clone(), config, libraries().as_deref()).expect("a start");
    let (free, total) = gpu().memory().expect("sizes");
    let room = prepared.kv_room(free);
    let blocks = kv_block_bytes(model.config(), dtype).map(|bytes| (room / 2) as usize / bytes.max(1));
    let backend = prepared.with_blocks(blocks).expect("memory that was free");
    println!("{} of {} MiB in blocks: {blocks:?}", room >> 20, total >> 20);
    backend.fill_kv(0xff).expect("memory behind every block");
    (backend, blocks.into_iter().min().expect("two groups") - SLOTS * SLOT_BLOCKS)
}

/// Prompts in pieces of all sizes, decode steps of all widths, penalties, logprobs and embeddings.
fn outputs(backend: Result<CudaBackend, CudaError>, first: usize) -> Vec<RowOutput> {
    let mut runner = DeviceRunner::new(backend.unwrap_or_else(|error| panic!("no backend: {error}")));
    let at_end = |mut row: Row| {
        for group in 0..KV_GROUPS {
            Arc::make_mut(&mut row.tables[group].blocks).iter_mut().for_each(|block| block.0 += first as u32);
        }
        row
    };
    let mut outputs = Vec::new();
    for (slot, len) in PROMPTS.into_iter().enumerate() {
        let init = SlotInit {
            prompt: ids(len, slot as u32, 320).into(),
            ..start(slot, SamplingParams { repetition_penalty: 1.1, ..with_logprobs() })
        };
        let tokens = RowInput::Tokens(ids(len, slot as u32, 320));
        let want = match slot {
            3 => Want::PromptLogprobs { top: 5, next: None, output_index: Some(0) },
            4 => Want::Embedding { pooling: Pooling::Mean, ends: true },
            5 => Want::Embedding { pooling: Pooling::Last, ends: true },
            _ => Want::Sample { output_index: 0 },
        };
        outputs.extend(run(&mut runner, vec![init], vec![at_end(row(slot, tokens, 0, want))]));
    }
    for width in 1..=SLOTS {
        let starts = (PROMPTS.len()..width).map(|slot| start(slot, with_logprobs())).collect();
        let rows = (0..width).map(|slot| {
            let tokens = RowInput::Tokens(vec![slot as u32, 7]);
            let context = PROMPTS.get(slot).copied().unwrap_or(0);
            at_end(row(slot, tokens, context, Want::Sample { output_index: 1 }))
        });
        outputs.extend(run(&mut runner, starts, rows.collect()));
    }
    outputs
}

#[derive(clap::Parser)]
struct Flags {
    #[command(flatten)]
    config: WorkerConfig,
}

fn start_with(flags: &str) -> Result<Arc<SharedModel>, String> {
    let path = tiny("llama3");
    let model = path.to_str().expect("a path").to_owned();
    let args = ["x", "--device", "cuda", "--model", &model].map(str::to_owned).into_iter();
    let Flags { config } =
        Flags::parse_from(args.chain(flags.split_whitespace().map(str::to_owned)).chain(
            libraries().into_iter().flat_map(|path| {
                ["--cuda-library-path".to_owned(), path.to_str().expect("a path").to_owned()]
            }),
        ));
    SharedModel::load(&path, &config, 1).map_err(|error| error.to_string())
}

#[test]
fn what_cannot_fit_does_not_start_and_says_the_numbers() {
    let gpu = gpu();
    let (free_before, _) = gpu.memory().expect("sizes");
    for (flags, parts) in [
        (
            "--gpu-memory-utilization 0.0001",
            &["does not fit on the GPU", "of weights", "--gpu-memory-utilization"][..],
        ),
        ("--kv-cache-memory-bytes 4TiB", &["a KV cache of 4TiB", "leave", "--kv-cache-memory-bytes"]),
        (
            "--kv-cache-memory-bytes 64KiB --max-model-len 500",
            &["one sequence of 500 tokens needs", "at most"],
        ),
    ] {
        let error = start_with(flags).err().unwrap_or_else(|| panic!("{flags} starts"));
        println!("{flags}: {error}");
        for part in parts {
            assert!(error.contains(part), "{flags}: {error:?} does not say {part:?}");
        }
        let (free, _) = gpu.memory().expect("sizes");
        assert!(
            free_before - free.min(free_before) < 64 << 20,
            "{flags}: it left {free} of {free_before} bytes"
        );
    }
}

#[test]
fn a_worker_takes_the_share_that_it_was_given() {
    let gpu = gpu();
    for share in [0.5, 0.97] {
        let model = start_with(&format!("--gpu-memory-utilization {share}")).expect("a start");
        let (free, total) = gpu.memory().expect("sizes");
        let used = (total - free) as f64 / total as f64;
        println!("{share} asked for, {used:.4} used, blocks {:?}", model.plan().kv_blocks);
        assert!(used <= share + 1e-4 && used > share - 0.005, "{used} of {share}");
        drop(model.runner().expect("the first one"));
        let second = model.runner().err().expect("a GPU has one worker").to_string();
        assert!(second.contains("--workers"), "{second}");
    }
}
