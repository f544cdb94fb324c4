//! The backend as a whole, on the small seeded checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use thalweg_model::checkpoint::Checkpoint;

use super::linear::Compute;
use super::testing::slot;
use super::*;
use crate::backend::Backend;
use crate::plan::{AdapterSlot, BlockId, BlockTable, Row, RowInput, SlotId, StepPlan, Want};
use crate::runner::forward::forward;
use crate::sampling::SamplingParams;

fn model(family: &str) -> Arc<CpuModel> {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../.cache/tiny");
    let path = std::env::var_os("THALWEG_TINY_MODELS").map_or_else(default, PathBuf::from).join(family);
    assert!(path.exists(), "{} is missing: run make test-models", path.display());
    let checkpoint = Checkpoint::open(&path).expect("a readable checkpoint");
    let model = CpuModel::load(&checkpoint, 2, Compute::F32).expect("a model that fits");
    let (needed, taken) = (CpuModel::bytes_needed(&checkpoint).expect("sizes"), model.bytes());
    assert!(taken.abs_diff(needed) * 20 < needed, "{family}: {taken} bytes taken, {needed} announced");
    model
}

fn backend(family: &str, kv_dtype: KvDtype) -> CpuBackend {
    let config =
        CpuBackendConfig { threads: 2, kv_blocks: [32; 2], kv_dtype, max_slots: 2, max_tokens_per_step: 64 };
    CpuBackend::new(model(family), config).expect("memory")
}

fn plan(tokens: &[u32], context: u32, first: u32, blocks: &[u32], want: Want) -> StepPlan {
    let table = |first: u32| {
        let blocks = blocks[first as usize..].iter().map(|block| BlockId(*block)).collect();
        BlockTable { first, blocks }
    };
    let tables = [table(0), table(first)];
    let input = RowInput::Tokens(tokens.to_vec());
    let slots = if context == 0 { vec![slot(0, SamplingParams::greedy())] } else { Vec::new() };
    StepPlan {
        slots,
        rows: vec![Row { slot: SlotId(0), adapter: AdapterSlot::BASE, input, context, tables, want }],
        ..StepPlan::default()
    }
}

const SAMPLE: Want = Want::Sample { output_index: 0 };

#[test]
fn nothing_unwritten_is_read() {
    for family in ["gemma3", "llama3"] {
        let tokens: Vec<u32> = (0..40).collect();
        let logits = |poison: bool| {
            let mut device = backend(family, KvDtype::Bf16);
            if poison {
                device.fill_kv(0xff);
            }
            forward(&mut device, &plan(&tokens[..20], 0, 0, &[3, 9], Want::Nothing)).expect("a step");
            forward(&mut device, &plan(&tokens[20..], 20, 0, &[3, 9, 30], SAMPLE)).expect("a step");
            device.last_logits()[..320].to_vec()
        };
        let (clean, poisoned) = (logits(false), logits(true));
        assert!(clean.iter().all(|x| x.is_finite()));
        assert_eq!(clean, poisoned, "{family}");
    }
}

#[test]
fn blocks_that_left_the_window_are_not_needed() {
    let tokens: Vec<u32> = (0..49).collect();
    let logits = |first: u32, recycled: bool| {
        let mut device = backend("mistral", KvDtype::F32);
        forward(&mut device, &plan(&tokens[..48], 0, 0, &[1, 2, 3, 4], Want::Nothing)).expect("a step");
        if recycled {
            device.copy_blocks(1, &[(BlockId(20), BlockId(1)), (BlockId(20), BlockId(2))]);
        }
        forward(&mut device, &plan(&tokens[48..], 48, first, &[1, 2, 3, 4], SAMPLE)).expect("a step");
        device.last_logits()[..320].to_vec()
    };
    assert_eq!(logits(0, false), logits(2, true));
}

#[test]
fn copied_blocks_hold_the_same() {
    let tokens: Vec<u32> = (0..17).collect();
    let mut device = backend("gemma3", KvDtype::Bf16);
    forward(&mut device, &plan(&tokens[..16], 0, 0, &[5], Want::Nothing)).expect("a step");
    forward(&mut device, &plan(&tokens[16..], 16, 0, &[5, 6], SAMPLE)).expect("a step");
    let expected = device.last_logits()[..320].to_vec();
    (0..2).for_each(|group| device.copy_blocks(group, &[(BlockId(5), BlockId(7))]));
    forward(&mut device, &plan(&tokens[16..], 16, 0, &[7, 8], SAMPLE)).expect("a step");
    assert_eq!(device.last_logits()[..320], expected);
}

#[test]
fn broken_plans_are_refused_and_change_nothing() {
    let mut device = backend("mistral", KvDtype::F32);
    let good = plan(&[1, 2, 3], 0, 0, &[0], SAMPLE);
    let token = |device: &mut CpuBackend| forward(device, &good).expect("a step").rows[0].sampled[0].token;
    let expected = token(&mut device);
    let mut check = |plan: StepPlan, part: &str| {
        let error = forward(&mut device, &plan).expect_err(part).to_string();
        assert!(error.contains(part), "{error:?} does not say {part:?}");
        assert_eq!(token(&mut device), expected);
    };
    check(plan(&[320], 0, 0, &[0], SAMPLE), "token 320 of a vocabulary of 320");
    check(plan(&[], 0, 0, &[0], SAMPLE), "no tokens");
    check(plan(&[1; 65], 0, 0, &[0, 1, 2, 3, 4], SAMPLE), "65 tokens in a step, room for 64");
    check(plan(&[1; 17], 0, 0, &[0], SAMPLE), "blocks 0..1 of 0..2");
    check(plan(&[1], 40, 3, &[0; 4], SAMPLE), "group 1 has blocks 3..4 of 2..3");
    check(plan(&[1], 0, 0, &[32], SAMPLE), "block 32 of 32");
    let mut other = plan(&[1], 0, 0, &[0], SAMPLE);
    other.rows[0].slot = SlotId(2);
    check(other, "slot 2 of 2");
    let mut other = plan(&[1], 0, 0, &[0], SAMPLE);
    (other.rows[0].slot, other.rows[0].input) = (SlotId(1), RowInput::LastSampled);
    check(other, "slot 1 has sampled nothing yet");
    let mut other = plan(&[1], 1, 0, &[0], SAMPLE);
    other.rows[0].slot = SlotId(1);
    check(other, "slot 1 was never set");
}

#[test]
fn sizes_are_announced() {
    let config = super::testing::config(9, 3, 64, Some(128));
    assert_eq!(kv_block_bytes(&config, KvDtype::Bf16), [2 * 3 * 16 * 64 * 2; 2]);
    assert_eq!(
        kv_block_bytes(&super::testing::config(9, 3, 64, None), KvDtype::Fp8E4m3),
        [4 * 3 * 16 * 64, 0]
    );
    let device = backend("gemma3", KvDtype::F32);
    let per_block = kv_block_bytes(device.model().config(), KvDtype::F32);
    assert_eq!(device.kv_bytes(), 32 * (per_block[0] + per_block[1]) as u64);
}

#[test]
fn a_cache_beyond_memory_is_an_error() {
    let kv_blocks = [1 << 40; 2];
    let config = CpuBackendConfig {
        threads: 1,
        kv_blocks,
        kv_dtype: KvDtype::F32,
        max_slots: 1,
        max_tokens_per_step: 16,
    };
    let error = CpuBackend::new(model("llama2"), config).err().expect("no memory");
    assert!(error.to_string().starts_with("no memory for the KV cache: "), "{error}");
}
