//! Counts and samples for metrics.

use std::time::Duration;

use super::load::{Counters, OBSERVATIONS_MAX, Observations};
use crate::scheduler::FinishReason;

/// What has happened so far.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    pub(super) counters: Counters,
    observations: Observations,
}

impl Ledger {
    /// A request's first sequence left the queue.
    pub(super) fn request_started(&mut self, queued: Duration, looked_up: usize, cached: usize) {
        self.counters.prefix_queries += looked_up as u64;
        self.counters.prefix_hits += cached as u64;
        keep(&mut self.observations.queue, queued);
    }

    /// A request's prompt is computed, and its first token drawn so long after its arrival if it is to have any.
    pub(super) fn first_event(&mut self, prompt_tokens: usize, first_token: Option<Duration>) {
        self.counters.prompt_tokens += prompt_tokens as u64;
        first_token.into_iter().for_each(|time| keep(&mut self.observations.time_to_first_token, time));
    }

    pub(super) fn tokens_put_out(&mut self, tokens: usize) {
        self.counters.generation_tokens += tokens as u64;
    }

    /// `since_first`: from its first token, of `tokens` put out here, to its last.
    pub(super) fn choice_finished(&mut self, reason: FinishReason, tokens: usize, since_first: Duration) {
        match reason {
            FinishReason::Stop | FinishReason::Complete => self.counters.finished_stop += 1,
            FinishReason::Length => self.counters.finished_length += 1,
            FinishReason::Abort => self.counters.finished_abort += 1,
        }
        if tokens > 1 {
            keep(&mut self.observations.time_per_output_token, since_first / (tokens as u32 - 1));
        }
    }

    pub(super) fn request_finished(&mut self, since_arrival: Duration) {
        keep(&mut self.observations.end_to_end, since_arrival);
    }

    pub(super) fn request_aborted(&mut self) {
        self.counters.aborted += 1;
    }

    /// Moves the samples to where metrics take them from, as far as there is room.
    pub(super) fn hand_over(&mut self, to: &mut Observations) {
        let from = &mut self.observations;
        let kinds = [
            (&mut from.time_to_first_token, &mut to.time_to_first_token),
            (&mut from.time_per_output_token, &mut to.time_per_output_token),
            (&mut from.end_to_end, &mut to.end_to_end),
            (&mut from.queue, &mut to.queue),
        ];
        for (from, to) in kinds {
            let room = OBSERVATIONS_MAX.saturating_sub(to.len());
            to.extend(from.drain(..).take(room));
        }
    }

    /// Nothing to hand over.
    pub(super) fn has_no_samples(&self) -> bool {
        let Observations { time_to_first_token, time_per_output_token, end_to_end, queue } =
            &self.observations;
        [time_to_first_token, time_per_output_token, end_to_end, queue]
            .iter()
            .all(|samples| samples.is_empty())
    }
}

fn keep(samples: &mut Vec<f64>, duration: Duration) {
    samples.push(duration.as_secs_f64());
}
