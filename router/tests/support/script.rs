//! What workers of a test are told to do, and what came of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::{block_hash, v1};
use tokio::sync::watch;
use tonic::Status;

/// How the next `Generate` is answered, whichever worker gets it. Every choice goes on behind what it has already.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// Up to max_tokens tokens, then the end.
    Answer,
    /// The same with a pause before each token.
    Paced(Duration),
    /// An error instead of a stream.
    Refuse(ErrorCode),
    /// A stream with nothing in it.
    EndEmpty,
    /// So many tokens, then silence until the client goes away.
    Hold(u32),
    /// So many tokens, then the end of the stream without a finish.
    BreakAfter(u32),
    /// So many tokens, then an error.
    FailAfter(u32, ErrorCode),
    /// So many tokens, then the whole worker ends without a word.
    CrashAfter(u32),
    /// The same without a token, after a while.
    CrashIn(Duration),
    /// So many tokens, then another one of a choice that nobody asked for.
    NonsenseAfter(u32),
    /// Tokens of another attempt in between.
    LateTokens,
}

/// What all workers of a test share.
#[derive(Default)]
pub(crate) struct Scene {
    steps: Mutex<VecDeque<Step>>,
    seen: watch::Sender<Vec<(String, v1::GenerateRequest)>>,
    cancelled: watch::Sender<usize>,
    /// Prompts that begin with this token are answered by this step, whatever the script says.
    pub(crate) by_first_token: Mutex<HashMap<u32, Step>>,
    /// What workers were told to abort.
    aborts: watch::Sender<Vec<v1::AbortRequest>>,
    pub(crate) tokenizers_sent: AtomicUsize,
    /// What workers say that they had of each prompt.
    pub(crate) cached_tokens: AtomicU32,
}

impl Scene {
    pub(crate) fn new(steps: impl IntoIterator<Item = Step>) -> Arc<Self> {
        Arc::new(Self { steps: Mutex::new(steps.into_iter().collect()), ..Self::default() })
    }

    /// Who got which request, in order.
    pub(crate) fn seen(&self) -> Vec<(String, v1::GenerateRequest)> {
        self.seen.borrow().clone()
    }

    pub(crate) async fn wait_for_seen(&self, count: usize) {
        self.seen.subscribe().wait_for(|seen| seen.len() >= count).await.unwrap();
    }

    pub(crate) async fn wait_for_abort(&self) -> v1::AbortRequest {
        let mut aborts = self.aborts.subscribe();
        let aborts = aborts.wait_for(|aborts| !aborts.is_empty()).await.unwrap();
        aborts[0].clone()
    }

    /// A worker got a request; what it is to do.
    pub(crate) fn begin(&self, worker: &str, request: &v1::GenerateRequest) -> Step {
        self.seen.send_modify(|seen| seen.push((worker.to_owned(), request.clone())));
        let first = request.prompt_ids.first().copied().unwrap_or_default();
        let by_prompt = self.by_first_token.lock().get(&first).cloned();
        by_prompt.or_else(|| self.steps.lock().pop_front()).unwrap_or(Step::Answer)
    }

    /// A request ended before its answer did.
    pub(crate) fn count_cancelled(&self) {
        self.cancelled.send_modify(|n| *n += 1);
    }

    pub(crate) async fn wait_for_cancelled(&self, count: usize) {
        self.cancelled.subscribe().wait_for(|n| *n >= count).await.unwrap();
    }

    /// A worker was told to abort.
    pub(crate) fn note_abort(&self, request: v1::AbortRequest) {
        self.aborts.send_modify(|aborts| aborts.push(request));
    }
}

impl Step {
    /// How many messages come, and what comes behind them; or the refusal.
    pub(crate) fn plays(&self, request: &v1::GenerateRequest) -> Result<(u32, Then), Status> {
        let longest = request.choices.iter().map(|c| c.output_ids.len() as u32).min().unwrap_or(0);
        let max_tokens = request.sampling.as_ref().map_or(0, |s| s.max_tokens);
        // An embedding is one message.
        let rest = if request.pooling == 0 { max_tokens - longest } else { 1 };
        Ok(match *self {
            Self::Refuse(code) => return Err(code.status(format!("scripted {}", code.as_str()))),
            Self::Answer | Self::LateTokens | Self::Paced(_) => (rest, Then::End),
            Self::EndEmpty => (0, Then::End),
            Self::BreakAfter(tokens) => (tokens, Then::End),
            Self::Hold(tokens) => (tokens, Then::Hold),
            Self::FailAfter(tokens, code) => (tokens, Then::Fail(code)),
            Self::CrashAfter(tokens) => (tokens, Then::Crash(Duration::ZERO)),
            Self::CrashIn(time) => (0, Then::Crash(time)),
            Self::NonsenseAfter(tokens) => (tokens, Then::Nonsense(request.attempt_id)),
        })
    }
}

/// What comes behind the messages of an answer.
#[derive(Clone, Copy)]
pub(crate) enum Then {
    End,
    Hold,
    Fail(ErrorCode),
    Crash(Duration),
    Nonsense(u64),
}

/// Width of the embeddings of `embeds`.
pub(crate) const WIDTH: u32 = 4;

/// `about` of a worker that makes embeddings.
pub(crate) fn embeds(id: &str) -> v1::DescribeResponse {
    let embedding = v1::EmbeddingInfo { width: WIDTH, pooling: v1::Pooling::Last.into() };
    v1::DescribeResponse { features: vec!["embed".to_owned()], embedding: Some(embedding), ..about(id) }
}

/// What a worker says of itself, unless a test changes it.
pub(crate) fn about(id: &str) -> v1::DescribeResponse {
    let step = |batch, step_seconds| v1::DecodeRate { batch, step_seconds, samples: 0 };
    v1::DescribeResponse {
        worker_id: id.to_owned(),
        epoch: 1,
        models: vec!["tiny".to_owned()],
        fingerprint: bytes::Bytes::from_static(b"print"),
        block_size: 16,
        hash_version: block_hash::HASH_VERSION,
        max_model_len: 512,
        max_num_seqs: 8,
        max_num_batched_tokens: 512,
        kv_blocks_total: 1_000,
        protocol_min: 1,
        protocol_max: 1,
        hardware: "test".to_owned(),
        version: "0".to_owned(),
        profile: Some(v1::Rates {
            prefill_tokens_per_second: 1_000.0,
            prefill_samples: 0,
            decode: vec![step(1, 0.010), step(8, 0.015)],
        }),
        ..Default::default()
    }
}

/// The next token but `i` of every choice: its position, 100 times the choice added. The last one finishes the choice.
pub(crate) fn message(
    request: &v1::GenerateRequest,
    attempt_id: u64,
    i: u32,
    cached_tokens: u32,
) -> v1::GenerateResponse {
    if request.pooling != 0 {
        return embedding(request, attempt_id, cached_tokens);
    }
    let max_tokens = request.sampling.as_ref().map_or(0, |s| s.max_tokens);
    let delta = |choice: &v1::ChoiceState| {
        let at = choice.output_ids.len() as u32 + i;
        let finish =
            if at + 1 == max_tokens { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
        (at < max_tokens).then(|| v1::ChoiceDelta {
            index: choice.index,
            token_ids: vec![at + 100 * choice.index],
            logprobs: Vec::new(),
            finish_reason: finish.into(),
        })
    };
    v1::GenerateResponse {
        attempt_id,
        prompt: (i == 0).then(|| v1::PromptInfo { cached_tokens, ..Default::default() }),
        deltas: request.choices.iter().filter_map(delta).collect(),
    }
}

/// The unit vector whose direction is the prompt's first token.
fn embedding(request: &v1::GenerateRequest, attempt_id: u64, cached_tokens: u32) -> v1::GenerateResponse {
    let at = request.prompt_ids[0] % WIDTH;
    let embedding = (0..WIDTH).map(|i| if i == at { 1.0 } else { 0.0 }).collect();
    let finish_reason = v1::FinishReason::Length.into();
    v1::GenerateResponse {
        attempt_id,
        prompt: Some(v1::PromptInfo { embedding, cached_tokens, ..Default::default() }),
        deltas: vec![v1::ChoiceDelta { finish_reason, ..Default::default() }],
    }
}

/// A token of a choice that nobody asked for.
pub(crate) fn nonsense(attempt_id: u64) -> v1::GenerateResponse {
    let deltas = vec![v1::ChoiceDelta { index: 77, token_ids: vec![1], ..Default::default() }];
    v1::GenerateResponse { attempt_id, prompt: None, deltas }
}
