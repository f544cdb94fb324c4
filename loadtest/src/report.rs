//! What a test showed, for people and for machines.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::plan::{Plan, Slo};
use crate::record::Record;

/// Sums and percentiles of a test. Times are of complete answers only.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The model that was asked for.
    pub model: String,
    /// Of arrivals and prompts.
    pub seed: u64,
    /// From the first request to the end of the last.
    pub duration_s: f64,
    /// Complete answers.
    pub completed: u64,
    /// Requests without a complete answer.
    pub failed: u64,
    /// How many failed, by reason.
    pub errors: BTreeMap<String, u64>,
    /// Complete answers a second.
    pub requests_per_second: f64,
    /// Prompt tokens of complete answers.
    pub prompt_tokens: u64,
    /// Of these, found in a cache.
    pub cached_tokens: u64,
    /// Tokens of complete answers.
    pub output_tokens: u64,
    /// Prompt tokens a second.
    pub prompt_tokens_per_second: f64,
    /// Tokens of answers a second.
    pub output_tokens_per_second: f64,
    /// Answers that kept the limits.
    pub goodput: Goodput,
    /// Time to the first token.
    pub ttft_ms: Option<Percentiles>,
    /// Time for each further token, by answer.
    pub tpot_ms: Option<Percentiles>,
    /// Time between two pieces of an answer.
    pub itl_ms: Option<Percentiles>,
    /// Time to the end of an answer.
    pub e2e_ms: Option<Percentiles>,
    /// Requests by the worker that the server named.
    pub workers: BTreeMap<String, Share>,
}

/// Answers that kept the limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The limit on the time to the first token.
    pub slo_ttft_ms: Option<f64>,
    /// The limit on the time for each further token.
    pub slo_tpot_ms: Option<f64>,
    /// Good answers a second.
    pub requests_per_second: f64,
    /// Good answers over all requests.
    pub share: f64,
}

/// One worker's part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Share {
    /// Requests, failed ones included.
    pub requests: u64,
    /// Of all requests with a worker.
    pub share: f64,
}

/// Of a distribution, with its mean beside them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct Percentiles {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Report {
    pub(crate) fn new(plan: &Plan, model: &str, records: &[Record], duration: Duration) -> Self {
        let duration_s = duration.as_secs_f64();
        let complete: Vec<&Record> = records.iter().filter(|record| record.failure.is_none()).collect();
        let sum = |of: fn(&Record) -> u64| complete.iter().map(|record| of(record)).sum::<u64>();
        let ms = |of: &dyn Fn(&Record) -> Option<Duration>| {
            Percentiles::new(complete.iter().filter_map(|record| of(record)).map(as_ms).collect())
        };
        let per_second = |count: u64| if duration_s > 0.0 { count as f64 / duration_s } else { 0.0 };
        let good = complete.iter().filter(|record| is_good(record, plan.slo)).count() as u64;
        let (prompt_tokens, output_tokens) =
            (sum(|record| record.prompt_tokens), sum(|record| record.output_tokens));
        Self {
            model: model.to_owned(),
            seed: plan.seed,
            duration_s,
            completed: complete.len() as u64,
            failed: (records.len() - complete.len()) as u64,
            errors: errors(records),
            requests_per_second: per_second(complete.len() as u64),
            prompt_tokens,
            cached_tokens: sum(|record| record.cached_tokens),
            output_tokens,
            prompt_tokens_per_second: per_second(prompt_tokens),
            output_tokens_per_second: per_second(output_tokens),
            goodput: Goodput {
                slo_ttft_ms: plan.slo.ttft_ms,
                slo_tpot_ms: plan.slo.tpot_ms,
                requests_per_second: per_second(good),
                share: good as f64 / records.len().max(1) as f64,
            },
            ttft_ms: ms(&|record| record.ttft),
            tpot_ms: ms(&Record::tpot),
            itl_ms: Percentiles::new(
                complete.iter().flat_map(|record| &record.gaps_s).map(|gap| f64::from(*gap) * 1e3).collect(),
            ),
            e2e_ms: ms(&|record| Some(record.total)),
            workers: workers(records),
        }
    }
}

fn as_ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn errors(records: &[Record]) -> BTreeMap<String, u64> {
    let mut errors = BTreeMap::new();
    for failure in records.iter().filter_map(|record| record.failure.as_ref()) {
        *errors.entry(failure.to_string()).or_default() += 1;
    }
    errors
}

fn workers(records: &[Record]) -> BTreeMap<String, Share> {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for worker in records.iter().filter_map(|record| record.worker.as_ref()) {
        *counts.entry(worker.clone()).or_default() += 1;
    }
    let total = counts.values().sum::<u64>();
    let share = |requests: u64| Share { requests, share: requests as f64 / total as f64 };
    counts.into_iter().map(|(worker, requests)| (worker, share(requests))).collect()
}

/// An answer with a single token has no time for further ones, and keeps that limit.
fn is_good(record: &Record, slo: Slo) -> bool {
    let within = |time: Option<Duration>, limit: Option<f64>, missing: bool| match (time, limit) {
        (_, None) => true,
        (Some(time), Some(limit)) => as_ms(time) <= limit,
        (None, Some(_)) => missing,
    };
    within(record.ttft, slo.ttft_ms, false) && within(record.tpot(), slo.tpot_ms, true)
}

impl Percentiles {
    /// None where there are no values.
    pub fn new(mut values: Vec<f64>) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let mut at = |percent: f64| percentile(&mut values, percent);
        Some(Self { mean, p50: at(50.0), p90: at(90.0), p95: at(95.0), p99: at(99.0), max: at(100.0) })
    }
}

/// The value that `percent` of all values are below, between the two nearest in proportion. Sorts the values.
pub(crate) fn percentile(values: &mut [f64], percent: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let place = percent / 100.0 * (values.len() - 1) as f64;
    let (low, high) = (values[place.floor() as usize], values[place.ceil() as usize]);
    low + (high - low) * place.fract()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model               {}", self.model)?;
        writeln!(
            f,
            "requests            {} completed, {} failed in {:.2} s",
            self.completed, self.failed, self.duration_s
        )?;
        for (reason, count) in &self.errors {
            writeln!(f, "  failed            {count} x {reason}")?;
        }
        writeln!(f, "request throughput  {:.3} /s", self.requests_per_second)?;
        writeln!(
            f,
            "token throughput    {:.1} output/s, {:.1} prompt/s",
            self.output_tokens_per_second, self.prompt_tokens_per_second
        )?;
        let reused = 100.0 * self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64;
        writeln!(
            f,
            "tokens              {} output, {} prompt, {reused:.1}% of these cached",
            self.output_tokens, self.prompt_tokens
        )?;
        self.fmt_goodput(f)?;
        writeln!(
            f,
            "\n{:<10}{:>11}{:>11}{:>11}{:>11}{:>11}{:>11}",
            "ms", "p50", "p90", "p95", "p99", "max", "mean"
        )?;
        let rows =
            [("ttft", self.ttft_ms), ("tpot", self.tpot_ms), ("itl", self.itl_ms), ("e2e", self.e2e_ms)];
        for (name, values) in rows.into_iter().filter_map(|(name, values)| Some((name, values?))) {
            let Percentiles { mean, p50, p90, p95, p99, max } = values;
            writeln!(f, "{name:<10}{p50:>11.2}{p90:>11.2}{p95:>11.2}{p99:>11.2}{max:>11.2}{mean:>11.2}")?;
        }
        if !self.workers.is_empty() {
            writeln!(f, "\n{:<30}{:>10}{:>10}", "worker", "requests", "share")?;
        }
        for (worker, share) in &self.workers {
            writeln!(f, "{worker:<30}{:>10}{:>9.1}%", share.requests, share.share * 100.0)?;
        }
        Ok(())
    }
}

impl Report {
    fn fmt_goodput(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Goodput { slo_ttft_ms, slo_tpot_ms, requests_per_second, share } = self.goodput;
        if slo_ttft_ms.is_none() && slo_tpot_ms.is_none() {
            return Ok(());
        }
        let limit =
            |name: &str, ms: Option<f64>| ms.map_or_else(String::new, |ms| format!(", {name} <= {ms} ms"));
        let limits = limit("ttft", slo_ttft_ms) + &limit("tpot", slo_tpot_ms);
        writeln!(
            f,
            "goodput             {requests_per_second:.3} /s, {:.1}% of requests{limits}",
            share * 100.0
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// numpy.percentile of the same values.
    #[test]
    fn percentiles_are_numpy_s() {
        let check = |values: &[f64], percent: f64, expected: f64| {
            let found = percentile(&mut values.to_vec(), percent);
            assert!((found - expected).abs() < 1e-9, "{percent}% of {values:?} is {found}");
        };
        let ten = [7.0, 1.0, 10.0, 4.0, 2.0, 9.0, 3.0, 8.0, 5.0, 6.0];
        check(&ten, 50.0, 5.5);
        check(&ten, 90.0, 9.1);
        check(&ten, 95.0, 9.55);
        check(&ten, 99.0, 9.91);
        check(&ten, 100.0, 10.0);
        check(&[15.0, 20.0, 35.0, 40.0, 50.0], 40.0, 29.0);
        check(&[3.5], 99.0, 3.5);
        assert_eq!(Percentiles::new(Vec::new()), None);
    }

    #[test]
    fn a_good_answer_keeps_both_limits() {
        let ms = Duration::from_millis;
        let record = |ttft: u64, last: u64, output_tokens: u64| Record {
            ttft: Some(ms(ttft)),
            last_token: Some(ms(last)),
            output_tokens,
            ..Record::default()
        };
        let slo = Slo { ttft_ms: Some(100.0), tpot_ms: Some(10.0) };
        let check =
            |record: Record, expected: bool| assert_eq!(is_good(&record, slo), expected, "{record:?}");
        check(record(100, 200, 11), true);
        check(record(101, 200, 11), false);
        check(record(100, 201, 11), false);
        check(record(100, 100, 1), true);
        check(Record::default(), false);
        assert!(is_good(&Record::default(), Slo::default()));
    }
}
