//! How long outputs usually get: a moving average per model and tenant.

use hashbrown::HashMap;

/// Expected before anything was seen.
const UNKNOWN_TOKENS: f64 = 256.0;
/// Weight of the newest output.
const ALPHA: f64 = 0.05;
/// Averages kept; a pair beyond them is taken for an unknown one.
const PAIRS_MAX: usize = 10_000;

/// Averages of output tokens per choice.
#[derive(Debug, Default)]
pub(super) struct OutputLengths {
    averages: HashMap<(String, String), f64>,
}

impl OutputLengths {
    /// Tokens to expect of one choice.
    pub(super) fn expected(&self, model: &str, tenant: &str, max_tokens: u32) -> f64 {
        let average = self.averages.get(&(model.to_owned(), tenant.to_owned())).copied();
        average.unwrap_or(UNKNOWN_TOKENS).min(f64::from(max_tokens))
    }

    /// Takes in a finished choice.
    pub(super) fn observe(&mut self, model: &str, tenant: &str, tokens: usize) {
        let key = (model.to_owned(), tenant.to_owned());
        if let Some(average) = self.averages.get_mut(&key) {
            *average += ALPHA * (tokens as f64 - *average);
        } else if self.averages.len() < PAIRS_MAX {
            self.averages.insert(key, tokens as f64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_follow_outputs_per_model_and_tenant() {
        let mut lengths = OutputLengths::default();
        lengths.observe("m", "a", 100);
        lengths.observe("m", "a", 200);
        let check = |model, tenant, max_tokens, expected: f64| {
            let got = lengths.expected(model, tenant, max_tokens);
            assert!((got - expected).abs() < 1e-9, "{model} {tenant} {max_tokens}: {got}");
        };
        check("m", "a", 1_000, 105.0);
        check("m", "a", 50, 50.0);
        check("m", "b", 1_000, UNKNOWN_TOKENS);
        check("n", "a", 10, 10.0);
    }
}
