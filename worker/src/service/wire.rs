//! What the engine says, in the words of the wire.

use thalweg_proto::v1;

use crate::engine::{
    ChannelEvent, ChoiceDelta, EngineEvent, FinishReason, LoadSnapshot, PromptInfo, Rates, Refusal,
};
use crate::plan::Logprobs;
use crate::pooling::Pooling;
use crate::worker::Embedding;

/// Who speaks: part of every load report.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) worker_id: String,
    pub(crate) epoch: u64,
}

/// One message of a Generate stream. `first_token` is the prompt's first, to which no logprob belongs.
pub(crate) fn response(attempt_id: u64, first_token: u32, event: EngineEvent) -> v1::GenerateResponse {
    v1::GenerateResponse {
        attempt_id,
        prompt: event.prompt.map(|info| prompt_info(first_token, *info)),
        deltas: event.deltas.into_iter().map(delta).collect(),
    }
}

/// One request's part of a channel's message.
pub(crate) fn channel_response(ChannelEvent { attempt, event }: ChannelEvent) -> v1::GenerateResponse {
    // The first token is of interest to prompt logprobs alone, which do not come this way.
    response(attempt.0, 0, event)
}

fn prompt_info(first_token: u32, info: PromptInfo) -> v1::PromptInfo {
    let unpredicted =
        v1::TokenLogprobs { token_id: first_token, logprob: f32::NAN, rank: 0, top: Vec::new() };
    let with_first =
        |known: Vec<_>| std::iter::once(unpredicted).chain(known.into_iter().map(logprobs)).collect();
    v1::PromptInfo {
        cached_tokens: info.cached_tokens,
        queue_seconds: info.queue_seconds,
        prompt_logprobs: info.prompt_logprobs.map(with_first).unwrap_or_default(),
        embedding: info.embedding,
    }
}

fn delta(delta: ChoiceDelta) -> v1::ChoiceDelta {
    let finish = match delta.finish {
        None => v1::FinishReason::Unspecified,
        Some(FinishReason::Stop) => v1::FinishReason::Stop,
        Some(FinishReason::Complete) => v1::FinishReason::Complete,
        Some(FinishReason::Length) => v1::FinishReason::Length,
        Some(FinishReason::Abort) => v1::FinishReason::Abort,
    };
    v1::ChoiceDelta {
        index: delta.index,
        token_ids: delta.tokens.into_vec(),
        logprobs: delta.logprobs.into_iter().map(logprobs).collect(),
        finish_reason: finish.into(),
    }
}

fn logprobs(of: Logprobs) -> v1::TokenLogprobs {
    let top = of.top.into_iter().map(|(token_id, logprob)| v1::TopLogprob { token_id, logprob });
    v1::TokenLogprobs { token_id: of.token, logprob: of.logprob, rank: of.rank, top: top.collect() }
}

/// One load report.
pub(crate) fn load_report(who: &Identity, load: &LoadSnapshot) -> v1::LoadReport {
    let state = if load.draining { v1::WorkerState::Draining } else { v1::WorkerState::Ready };
    v1::LoadReport {
        worker_id: who.worker_id.clone(),
        epoch: who.epoch,
        state: state.into(),
        running: load.running,
        waiting: load.waiting,
        prefill_tokens_ahead: load.prefill_tokens_ahead,
        running_context_tokens: load.running_context_tokens,
        kv_blocks_total: load.kv.total,
        kv_blocks_free: load.kv.free,
        kv_blocks_cached: load.kv.cached,
        steps: load.steps,
        rates: Some(rates(&load.rates)),
        booked: load.booked.iter().map(|(router, booking)| (router.clone(), *booking)).collect(),
        waiting_ahead: Some(load.waiting_ahead),
    }
}

/// What embeddings are like.
pub(crate) fn embedding_info(of: Embedding) -> v1::EmbeddingInfo {
    let pooling = match of.pooling {
        Pooling::Last => v1::Pooling::Last,
        Pooling::Mean => v1::Pooling::Mean,
    };
    v1::EmbeddingInfo { width: of.width as u32, pooling: pooling.into() }
}

/// Speed, as measured.
pub(crate) fn rates(of: &Rates) -> v1::Rates {
    let decode = of.decode.iter().map(|d| v1::DecodeRate {
        batch: d.batch,
        step_seconds: d.step_seconds,
        samples: d.samples,
    });
    v1::Rates {
        prefill_tokens_per_second: of.prefill_tokens_per_second,
        prefill_samples: of.prefill_samples,
        decode: decode.collect(),
    }
}

/// A refusal as a status; its code tells whether another worker may take the request.
pub(crate) fn status(refusal: &Refusal) -> tonic::Status {
    refusal.code().status(refusal.to_string())
}
