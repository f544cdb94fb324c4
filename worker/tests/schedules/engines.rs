//! Engines over the hash model for tests of streams, and what a stream said.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use thalweg_proto::block_hash::BlockHash;
use thalweg_proto::ids::AttemptId;
use thalweg_worker::backend::BackendError;
use thalweg_worker::engine::{
    ChoiceState, Engine, EngineConfig, EngineEvent, EngineHandle, EngineRequest, EngineStream, FinishReason,
    Refusal,
};
use thalweg_worker::kv::KvConfig;
use thalweg_worker::plan::{AdapterSlot, Logprobs, StepId, StepMasks, StepOutput, StepPlan};
use thalweg_worker::runner::Runner;
use thalweg_worker::sampling::SamplingParams;

use crate::hash_model::{HashModel, HashRunner, VOCAB};
use crate::workload::random_ids;

pub(crate) const MODEL: HashModel = HashModel { seed: 5, has_group: [true, true], window: Some(24) };

pub(crate) fn config() -> EngineConfig {
    EngineConfig {
        block_tokens: 8,
        kv_blocks: [40, 20],
        has_group: [true, true],
        sliding_window: Some(24),
        max_model_len: 200,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_num_mixed_tokens: 48,
        max_waiting: 500,
        enable_prefix_caching: true,
        vocab_size: VOCAB as usize,
        prefill_rate: 0.0,
    }
}

pub(crate) fn runner() -> HashRunner {
    let EngineConfig { block_tokens, kv_blocks: blocks, has_group, sliding_window, .. } = config();
    let kv = KvConfig { block_tokens, blocks, has_group, sliding_window, prefix_caching: true };
    HashRunner::new(MODEL, &kv, config().max_num_batched_tokens)
}

pub(crate) fn start() -> EngineHandle {
    Engine::start(config(), Box::new(runner()), None).unwrap()
}

pub(crate) fn request(number: u64, prompt_len: usize, max_tokens: u32) -> EngineRequest {
    use rand::SeedableRng;
    let prompt = random_ids(&mut rand::rngs::StdRng::seed_from_u64(number % 5), prompt_len);
    EngineRequest {
        request_id: format!("request {number}"),
        attempt: AttemptId(number),
        prompt: prompt.into(),
        sampling: Arc::new(SamplingParams { seed: number, ..SamplingParams::greedy() }),
        max_tokens,
        prompt_logprobs: None,
        pooling: None,
        choices: vec![ChoiceState::default()],
        root: BlockHash([0; 16]),
        adapter: AdapterSlot::BASE,
        priority: 0,
        booking: None,
    }
}

/// One choice's tokens and end, events checked for order.
pub(crate) async fn read(mut stream: EngineStream) -> (Vec<EngineEvent>, Option<Refusal>) {
    let mut events = Vec::new();
    while let Some(event) = stream.recv().await {
        match event {
            Ok(event) => events.push(event),
            Err(refusal) => return (events, Some(refusal)),
        }
    }
    (events, None)
}

pub(crate) fn choice(events: &[EngineEvent], index: u32) -> (Vec<u32>, Vec<FinishReason>) {
    let deltas = || events.iter().flat_map(|e| &e.deltas).filter(|d| d.index == index);
    (deltas().flat_map(|d| d.tokens.clone()).collect(), deltas().filter_map(|d| d.finish).collect())
}

pub(crate) fn answer(request: &EngineRequest, index: u32) -> Vec<u32> {
    let ids = |answer: Vec<Logprobs>| answer.iter().map(|t| t.token).collect();
    ids(MODEL.answer(&request.prompt, &[], &request.sampling, index, request.max_tokens as usize).0)
}

/// Lets one step be collected per token sent; all of them when the sender is gone.
pub(crate) struct GatedRunner(HashRunner, Receiver<()>);

impl Runner for GatedRunner {
    fn submit(&mut self, plan: StepPlan) -> Result<StepId, BackendError> {
        self.0.submit(plan)
    }

    fn provide_masks(&mut self, step: StepId, masks: StepMasks) -> Result<(), BackendError> {
        self.0.provide_masks(step, masks)
    }

    fn collect(&mut self, step: StepId) -> Result<StepOutput, BackendError> {
        let _ = self.1.recv();
        self.0.collect(step)
    }
}

pub(crate) fn start_gated(config: EngineConfig) -> (EngineHandle, Sender<()>) {
    let (gate, wait) = channel();
    (Engine::start(config, Box::new(GatedRunner(runner(), wait)), None).unwrap(), gate)
}
