//! Rotary position embedding and the ways to stretch it.

use super::HEAD_DIM_MAX;

/// Rotary position embedding, half-split layout: dimension i pairs with i + head_dim / 2.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f32,
    /// How frequencies are stretched for longer contexts.
    pub scaling: RopeScaling,
}

/// Stretching of rope frequencies.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(clippy::large_enum_variant, reason = "two of them per model, copied while it loads")]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Positions divided by the factor.
    Linear {
        /// Stretch.
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided by the factor, high ones kept, smooth between.
    Llama3 {
        /// Stretch.
        factor: f32,
        /// Wavelengths above original / this are stretched.
        low_freq_factor: f32,
        /// Wavelengths below original / this are kept.
        high_freq_factor: f32,
        /// Context of the first training.
        original_max_position: usize,
    },
    /// Each frequency divided by its own factor: how GGUF files store Llama 3.1's rule.
    Factors(FrequencyFactors),
}

/// One factor per pair of dimensions.
#[derive(Clone, Copy, PartialEq)]
pub struct FrequencyFactors {
    values: [f32; HEAD_DIM_MAX / 2],
    len: usize,
}

impl Rope {
    /// Angle per position of each of the head_dim / 2 pairs, in f64 to be rounded once by the user.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        (0..head_dim / 2)
            .map(|pair| {
                let plain = f64::from(self.theta).powf(-2.0 * pair as f64 / head_dim as f64);
                self.scaling.apply(pair, plain)
            })
            .collect()
    }
}

impl RopeScaling {
    fn apply(&self, pair: usize, frequency: f64) -> f64 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / f64::from(*factor),
            Self::Factors(factors) => {
                frequency / factors.as_slice().get(pair).map_or(1.0, |factor| f64::from(*factor))
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let (factor, low, high) =
                    (f64::from(*factor), f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                let turns = *original_max_position as f64 * frequency / std::f64::consts::TAU;
                if turns < low {
                    frequency / factor
                } else if turns > high {
                    frequency
                } else {
                    let smooth = (turns - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

impl FrequencyFactors {
    /// None for more factors than the widest head has pairs, or one that is not positive and finite.
    pub fn new(factors: &[f32]) -> Option<Self> {
        let mut values = [1.0; HEAD_DIM_MAX / 2];
        values.get_mut(..factors.len())?.copy_from_slice(factors);
        let sound = values.iter().all(|factor| factor.is_finite() && *factor > 0.0);
        sound.then_some(Self { values, len: factors.len() })
    }

    /// The factors, lowest pair first.
    pub fn as_slice(&self) -> &[f32] {
        &self.values[..self.len]
    }
}

impl std::fmt::Debug for FrequencyFactors {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl serde::Serialize for FrequencyFactors {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_slice().serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of Hugging Face transformers' `_compute_llama3_parameters` rule, worked out in numpy float64.
    #[test]
    fn llama3_scaling_keeps_high_and_stretches_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        };
        let got = Rope { theta: 500_000.0, scaling }.frequencies(128);
        let expected = [
            (0, 1.0),
            (28, 0.0032114459947525913),
            (30, 0.0013718935677611381),
            (35, 9.556212353964683e-05),
            (40, 3.428102195952591e-05),
            (63, 3.068925988914511e-07),
        ];
        for (pair, value) in expected {
            let error: f64 = (got[pair] / value - 1.0).abs();
            assert!(error < 1e-12, "pair {pair}: {} is not {value}", got[pair]);
        }
    }

    #[test]
    fn factors_must_fit_and_be_positive() {
        assert_eq!(FrequencyFactors::new(&[1.0, 8.0]).map(|f| f.as_slice().to_vec()), Some(vec![1.0, 8.0]));
        for wrong in [vec![0.0], vec![f32::NAN], vec![-1.0], vec![1.0; 129]] {
            assert_eq!(FrequencyFactors::new(&wrong), None);
        }
    }
}
