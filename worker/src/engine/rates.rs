//! Work per busy second, measured step by step.

use super::load::{DecodeRate, Rates};

/// Share of the past that each new step keeps: figures follow a change of speed within some twenty steps.
const KEEP: f64 = 0.95;

/// Running sums that forget.
#[derive(Debug, Default)]
pub(super) struct RateMeter {
    prefill: Sums,
    /// By the power of two that holds the batch: 1, 2, 4...
    decode: Vec<Sums>,
}

#[derive(Clone, Debug, Default)]
struct Sums {
    work: f64,
    seconds: f64,
    samples: u32,
}

impl RateMeter {
    /// One step. Of a mixed one, what a pure decode step of its batch takes is not counted as prefill.
    pub(super) fn record(&mut self, prefill_tokens: usize, decode_rows: usize, seconds: f64) {
        if seconds.is_nan() || seconds <= 0.0 {
            return;
        }
        let bucket = bucket_of(decode_rows);
        if prefill_tokens > 0 {
            let decoding =
                if decode_rows == 0 { 0.0 } else { self.decode.get(bucket).map_or(0.0, Sums::mean) };
            self.prefill.add(prefill_tokens as f64, (seconds - decoding).max(seconds / 10.0));
        } else if decode_rows > 0 {
            self.decode.resize_with(self.decode.len().max(bucket + 1), Sums::default);
            self.decode[bucket].add(1.0, seconds);
        }
    }

    pub(super) fn rates(&self) -> Rates {
        let decode =
            self.decode.iter().enumerate().filter(|(_, sums)| sums.samples > 0).map(|(bucket, sums)| {
                DecodeRate { batch: 1 << bucket, step_seconds: sums.mean(), samples: sums.samples }
            });
        let Sums { work, seconds, samples } = self.prefill;
        let prefill_tokens_per_second = if samples == 0 { 0.0 } else { work / seconds };
        Rates { prefill_tokens_per_second, prefill_samples: samples, decode: decode.collect() }
    }
}

impl Sums {
    fn add(&mut self, work: f64, seconds: f64) {
        self.work = self.work * KEEP + work;
        self.seconds = self.seconds * KEEP + seconds;
        self.samples = self.samples.saturating_add(1);
    }

    /// Seconds per unit of work.
    fn mean(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.seconds / self.work }
    }
}

fn bucket_of(batch: usize) -> usize {
    batch.max(1).next_power_of_two().trailing_zeros() as usize
}
