//! Predicted seconds of a request on a worker: the one formula.
//!
//! While a request decodes, the sequences that it met leave one by one and others take their places, as many as an average
//! worker has. So its steps are reckoned for the mean of both. Its prefill delays those that are there and those that
//! come before the delay is worked off: twice as many as the worker had lately. Reckoning with the present alone chases
//! every fluctuation: conversations leave their prefix for a worker that is less busy for a moment, and their recomputed
//! prompts slow down everybody who comes after.
//!
//! An adapter adds no term: workers load all of theirs before they serve (`--max-loras` below their number is refused at the start),
//! so that the first request of one finds it where the hundredth does, and workers without it are no candidates. That steps with
//! adapters take longer is part of the measured rates.

use super::{Ask, Candidate};

/// Predicted seconds, term by term.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Until its prefill begins.
    pub wait: f64,
    /// Of the prompt tokens that the worker does not hold.
    pub prefill: f64,
    /// Of the expected output.
    pub decode: f64,
    /// Brought to the sequences that already run, weighted.
    pub harm: f64,
}

impl Cost {
    /// What candidates are compared by.
    pub fn total(&self) -> f64 {
        self.wait + self.prefill + self.decode + self.harm
    }

    /// Seconds to the first token.
    pub fn first_token(&self) -> f64 {
        self.wait + self.prefill
    }
}

/// Sequences that a worker has on average, as far as they run at once.
pub(super) fn mean_batch(workers: &[Candidate]) -> f64 {
    workers.iter().map(present).sum::<f64>() / workers.len().max(1) as f64
}

/// The prediction for one worker of a fleet with this mean batch.
pub(super) fn predict(ask: &Ask, worker: &Candidate, mean_batch: f64) -> Cost {
    let speed = &worker.speed;
    let batch = (present(worker) + mean_batch) / 2.0;
    let with_us = batch + f64::from(ask.choices);
    // The last prompt token is always computed.
    let uncached = f64::from(ask.prompt_tokens.saturating_sub(worker.cached_tokens).max(1));

    let prefill = speed.prefill_seconds(uncached);
    let prefill_wait = speed.prefill_seconds(worker.prefill_tokens_ahead as f64);
    let wait = prefill_wait.max(seconds_until_slot(ask, worker)).max(seconds_until_blocks(ask, worker));
    let decode = ask.expected_output * speed.step_seconds(with_us);
    // Of a running sequence on average half of the output is still to come.
    let step_increase = (speed.step_seconds(with_us) - speed.step_seconds(batch)).max(0.0);
    let slower_steps = batch * ask.expected_output / 2.0 * step_increase;
    let interference = 2.0 * worker.recent_sequences * prefill;
    Cost { wait, prefill, decode, harm: ask.harm_weight * (slower_steps + interference) }
}

fn present(worker: &Candidate) -> f64 {
    f64::from(worker.sequences().min(worker.max_num_seqs))
}

/// Slots come free as running sequences end, each having half of its expected output to go on average.
fn seconds_until_slot(ask: &Ask, worker: &Candidate) -> f64 {
    let wanted = u64::from(worker.sequences()) + u64::from(ask.choices);
    let short = wanted.saturating_sub(u64::from(worker.max_num_seqs));
    short as f64 * seconds_per_finish(ask, worker)
}

/// Blocks come free as running sequences end, each giving back its share of the running context.
fn seconds_until_blocks(ask: &Ask, worker: &Candidate) -> f64 {
    let block = worker.block_tokens.max(1);
    let tokens = ask.prompt_tokens.saturating_sub(worker.cached_tokens).saturating_add(ask.choices);
    let needed = u64::from(tokens.div_ceil(block));
    let short = needed.saturating_sub(worker.kv_blocks_available);
    let running = u64::from(worker.running.max(1));
    let given_back = (worker.running_context_tokens / running / u64::from(block)).max(1);
    short.div_ceil(given_back) as f64 * seconds_per_finish(ask, worker)
}

fn seconds_per_finish(ask: &Ask, worker: &Candidate) -> f64 {
    let batch = f64::from(worker.running.clamp(1, worker.max_num_seqs.max(1)));
    ask.expected_output.max(1.0) * worker.speed.step_seconds(batch) / batch
}
