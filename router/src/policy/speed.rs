//! How fast a worker is: measured where there are samples enough, assumed before.

use thalweg_proto::v1;

/// Samples from which on a measurement is believed.
const SAMPLES_MIN: u32 = 20;
/// A measurement is believed within this factor of what like workers measure.
const OUTLIER_FACTOR: f64 = 4.0;
/// Assumed where nothing at all is known; only its proportions matter then.
const UNKNOWN: (f64, f64) = (1_000.0, 0.05);

/// Work per busy second.
#[derive(Clone, Debug, PartialEq)]
pub struct Speed {
    prefill_tokens_per_second: f64,
    /// (sequences, seconds of a step), by rising number of sequences, never empty.
    steps: Vec<(f64, f64)>,
}

impl Default for Speed {
    fn default() -> Self {
        Self { prefill_tokens_per_second: UNKNOWN.0, steps: vec![(1.0, UNKNOWN.1)] }
    }
}

impl Speed {
    /// From a table as it stands, samples not looked at; None if it holds no usable figure.
    pub fn of_table(rates: &v1::Rates) -> Option<Self> {
        let steps = usable_steps(rates, 0);
        let prefill = rates.prefill_tokens_per_second;
        (positive(prefill) && !steps.is_empty()).then_some(Self { prefill_tokens_per_second: prefill, steps })
    }

    /// What to reckon with: `measured` where it has 20 samples, bounded by the `median` of workers on the same hardware;
    /// else that median, this worker's own included; else its `profile` of Describe. One worker's profile is a handful of
    /// steps: held against a twin's, its noise alone would send a whole burst to one of them.
    pub fn choose(measured: Option<&v1::Rates>, profile: Option<&v1::Rates>, median: Option<&Speed>) -> Self {
        let assumed = median.cloned().or_else(|| profile.and_then(Self::of_table)).unwrap_or_default();
        let Some(measured) = measured else { return assumed };
        let bound = |value: f64, peer: Option<f64>| match peer {
            Some(peer) => value.clamp(peer / OUTLIER_FACTOR, peer * OUTLIER_FACTOR),
            None => value,
        };
        let prefill = measured.prefill_tokens_per_second;
        let prefill_tokens_per_second = if measured.prefill_samples >= SAMPLES_MIN && positive(prefill) {
            bound(prefill, median.map(|m| m.prefill_tokens_per_second))
        } else {
            assumed.prefill_tokens_per_second
        };
        let steps = usable_steps(measured, SAMPLES_MIN)
            .into_iter()
            .map(|(batch, seconds)| (batch, bound(seconds, median.map(|m| m.step_seconds(batch)))))
            .collect();
        Self { prefill_tokens_per_second, steps: assumed.corrected_by(steps) }
    }

    /// Only what was measured with samples enough; None if that is not both, prefill and decode.
    pub fn measured(rates: &v1::Rates) -> Option<Self> {
        let steps = usable_steps(rates, SAMPLES_MIN);
        let enough = rates.prefill_samples >= SAMPLES_MIN && positive(rates.prefill_tokens_per_second);
        (enough && !steps.is_empty())
            .then_some(Self { prefill_tokens_per_second: rates.prefill_tokens_per_second, steps })
    }

    /// Term by term, over workers.
    pub fn median(workers: &[Self]) -> Option<Self> {
        let middle = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[(values.len() - 1) / 2]
        };
        let batches = &workers.first()?.steps;
        let step = |batch: f64| middle(workers.iter().map(|w| w.step_seconds(batch)).collect());
        Some(Self {
            prefill_tokens_per_second: middle(workers.iter().map(|w| w.prefill_tokens_per_second).collect()),
            steps: batches.iter().map(|(batch, _)| (*batch, step(*batch))).collect(),
        })
    }

    /// Seconds to compute so many prompt tokens.
    pub fn prefill_seconds(&self, tokens: f64) -> f64 {
        tokens / self.prefill_tokens_per_second
    }

    /// Seconds of one decode step, linear between the measured batches and beyond them by the last slope.
    pub fn step_seconds(&self, batch: f64) -> f64 {
        let above = self.steps.partition_point(|(b, _)| *b < batch);
        match (above.checked_sub(1).map(|i| self.steps[i]), self.steps.get(above)) {
            (Some(low), Some(high)) => line(low, *high, batch),
            (None, Some(first)) => first.1,
            (Some(last), None) => match above.checked_sub(2).map(|i| self.steps[i]) {
                Some(before) => line(before, last, batch).max(last.1),
                None => last.1,
            },
            (None, None) => UNKNOWN.1,
        }
    }

    /// The assumed curve through the measured points: where nothing is measured, its shape is kept and its height follows
    /// the nearest measured batch, so that the curve does not jump.
    fn corrected_by(&self, measured: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
        if measured.is_empty() {
            return self.steps.clone();
        }
        let correction = |batch: f64| {
            let nearest = measured.iter().min_by(|a, b| (a.0 - batch).abs().total_cmp(&(b.0 - batch).abs()));
            nearest.map_or(1.0, |(b, seconds)| seconds / self.step_seconds(*b))
        };
        let assumed = self
            .steps
            .iter()
            .filter(|(batch, _)| measured.iter().all(|(b, _)| b != batch))
            .map(|(batch, seconds)| (*batch, seconds * correction(*batch)));
        let mut steps: Vec<(f64, f64)> = assumed.chain(measured.iter().copied()).collect();
        steps.sort_by(|a, b| a.0.total_cmp(&b.0));
        steps
    }
}

fn usable_steps(rates: &v1::Rates, samples_min: u32) -> Vec<(f64, f64)> {
    let mut steps: Vec<(f64, f64)> = rates
        .decode
        .iter()
        .filter(|d| d.samples >= samples_min && positive(d.step_seconds) && d.batch > 0)
        .map(|d| (f64::from(d.batch), d.step_seconds))
        .collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    steps.dedup_by(|a, b| a.0 == b.0);
    steps
}

fn line((x0, y0): (f64, f64), (x1, y1): (f64, f64), x: f64) -> f64 {
    y0 + (y1 - y0) * (x - x0) / (x1 - x0)
}

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(prefill: f64, prefill_samples: u32, decode: &[(u32, f64, u32)]) -> v1::Rates {
        let decode = decode
            .iter()
            .map(|&(batch, step_seconds, samples)| v1::DecodeRate { batch, step_seconds, samples })
            .collect();
        v1::Rates { prefill_tokens_per_second: prefill, prefill_samples, decode }
    }

    #[test]
    fn steps_are_interpolated() {
        let speed = Speed::of_table(&rates(1.0, 0, &[(8, 0.03, 0), (1, 0.01, 0), (16, 0.05, 0)])).unwrap();
        let check =
            |batch, expected: f64| assert!((speed.step_seconds(batch) - expected).abs() < 1e-12, "{batch}");
        check(0.0, 0.01);
        check(1.0, 0.01);
        check(4.5, 0.02);
        check(8.0, 0.03);
        check(16.0, 0.05);
        check(24.0, 0.07);
    }

    #[test]
    fn figures_come_from_measurement_profile_or_peers() {
        let profile = rates(1_000.0, 0, &[(1, 0.010, 0), (8, 0.020, 0)]);
        let peers: Vec<Speed> = [500.0, 600.0, 9_000.0]
            .map(|prefill| Speed::of_table(&rates(prefill, 0, &[(1, 0.008, 0)])).unwrap())
            .to_vec();
        let check = |measured: Option<v1::Rates>,
                     profile: Option<&v1::Rates>,
                     peers: &[Speed],
                     expected: [f64; 3]| {
            let speed = Speed::choose(measured.as_ref(), profile, Speed::median(peers).as_ref());
            let got = [1.0 / speed.prefill_seconds(1.0), speed.step_seconds(1.0), speed.step_seconds(8.0)];
            assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-9), "{got:?}, not {expected:?}");
        };
        check(None, Some(&profile), &[], [1_000.0, 0.010, 0.020]);
        check(None, None, &peers, [600.0, 0.008, 0.008]);
        // Twins count for as much as one's own few steps.
        check(None, Some(&profile), &peers, [600.0, 0.008, 0.008]);
        check(None, None, &[], [1_000.0, 0.05, 0.05]);
        // Too few samples: still the profile.
        check(Some(rates(9e9, 19, &[(1, 9.0, 19)])), Some(&profile), &[], [1_000.0, 0.010, 0.020]);
        // Measured at one batch: the rest of the curve follows.
        check(Some(rates(800.0, 20, &[(1, 0.005, 20)])), Some(&profile), &[], [800.0, 0.005, 0.010]);
        // A fantastic measurement is bounded by four times the peers' median, both ways.
        check(Some(rates(9e9, 50, &[(1, 9.0, 50)])), Some(&profile), &peers, [2_400.0, 0.032, 0.032]);
        check(Some(rates(1.0, 50, &[(1, 1e-9, 50)])), Some(&profile), &peers, [150.0, 0.002, 0.002]);
        // Nonsense is no figure.
        check(Some(rates(f64::NAN, 50, &[(0, 1.0, 50)])), Some(&profile), &[], [1_000.0, 0.010, 0.020]);
    }
}
