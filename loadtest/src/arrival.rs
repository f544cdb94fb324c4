//! When conversations begin in an open loop.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;

/// Times from the start of a test at which a Poisson process fires, without end.
pub(crate) fn poisson(per_second: f64, mut rng: StdRng) -> impl Iterator<Item = Duration> {
    let mut seconds = 0.0;
    std::iter::repeat_with(move || {
        // 1 - u is above 0, so that its logarithm is finite.
        let uniform: f64 = rng.random();
        seconds += -(1.0 - uniform).ln() / per_second;
        Duration::from_secs_f64(seconds)
    })
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn gaps(per_second: f64, seed: u64, count: usize) -> Vec<f64> {
        let times: Vec<f64> = poisson(per_second, StdRng::seed_from_u64(seed))
            .take(count)
            .map(|time| time.as_secs_f64())
            .collect();
        std::iter::once(times[0]).chain(times.windows(2).map(|pair| pair[1] - pair[0])).collect()
    }

    /// An exponential distribution's mean and deviation are both 1/rate, and its gaps are independent.
    #[test]
    fn gaps_are_exponential() {
        let (rate, seed, count) = (20.0, 11, 50_000);
        let gaps = gaps(rate, seed, count);
        let mean = gaps.iter().sum::<f64>() / count as f64;
        let covariance = |shift: usize| {
            let pairs = gaps.iter().zip(&gaps[shift..]);
            pairs.map(|(a, b)| (a - mean) * (b - mean)).sum::<f64>() / (count - shift) as f64
        };
        let deviation = covariance(0).sqrt();
        let median = crate::report::percentile(&mut gaps.clone(), 50.0);
        let check = |name: &str, found: f64, expected: f64| {
            assert!((found * rate - expected).abs() < 0.03, "seed {seed}: {name} is {}", found * rate);
        };
        check("mean", mean, 1.0);
        check("deviation", deviation, 1.0);
        check("median", median, std::f64::consts::LN_2);
        check("correlation", covariance(1) * rate, 0.0);
    }

    #[test]
    fn a_seed_gives_the_same_times() {
        assert_eq!(gaps(5.0, 1, 10), gaps(5.0, 1, 10));
        assert_ne!(gaps(5.0, 1, 10), gaps(5.0, 2, 10));
    }
}
