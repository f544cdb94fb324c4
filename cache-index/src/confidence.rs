//! How far a worker's predicted hits come true.

/// Weight of the newest observation.
const ALPHA: f64 = 0.1;

/// Moving average of actual over predicted cached tokens, from 0 to 1. Starts at full trust.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Confidence(f64);

impl Default for Confidence {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Confidence {
    /// Takes in one request's outcome. A prediction of nothing says nothing.
    pub fn observe(&mut self, predicted_tokens: u32, actual_tokens: u32) {
        if predicted_tokens > 0 {
            let ratio = (f64::from(actual_tokens) / f64::from(predicted_tokens)).min(1.0);
            self.0 += ALPHA * (ratio - self.0);
        }
    }

    /// Cached tokens to count on where the index says `indexed_tokens`.
    pub fn discount(self, indexed_tokens: u32) -> u32 {
        (f64::from(indexed_tokens) * self.0) as u32
    }

    /// The average.
    pub fn ratio(self) -> f64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn confidence_follows_outcomes() {
        let check = |outcomes: &[(u32, u32)], expected: f64| {
            let mut confidence = Confidence::default();
            outcomes.iter().for_each(|(predicted, actual)| confidence.observe(*predicted, *actual));
            assert!((confidence.ratio() - expected).abs() < 1e-9, "{outcomes:?}: {confidence:?}");
        };
        check(&[], 1.0);
        check(&[(0, 0), (0, 64)], 1.0);
        check(&[(100, 200)], 1.0);
        check(&[(100, 0)], 0.9);
        check(&[(100, 0), (100, 100)], 0.91);
        check(&[(64, 0); 200], 0.0);
    }
}
