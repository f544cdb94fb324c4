//! What a simulated worker is told: how long steps take, what it says and what it does wrong. A YAML file, hand-written.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::faults::Faults;
use crate::plan::{RowInput, StepPlan};

/// The whole file. Every part may be left out; a key that nobody knows is refused.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profile {
    /// How long a step takes.
    pub step: StepTime,
    /// What is put out.
    pub tokens: Tokens,
    /// After how many tokens a choice ends by itself, unless the request ignores the end. Default: at max_tokens.
    pub output_tokens: Option<OutputTokens>,
    /// What it does wrong. The only part that is read again when the file changes.
    pub faults: Faults,
}

/// Seconds of a step: the sum of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StepTime {
    /// Of every step.
    pub base_seconds: f64,
    /// Per prompt token, or token computed again.
    pub prefill_token_seconds: f64,
    /// Per sequence that decodes.
    pub decode_sequence_seconds: f64,
    /// Per token that is attended to, summed over rows.
    pub context_token_seconds: f64,
    /// Share by which a step takes longer or shorter, at random: 0.1 is up to 10% either way.
    pub jitter: f64,
    /// Where that randomness begins.
    pub jitter_seed: u64,
}

/// What is put out. A seed or a script, not both.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tokens {
    /// Of the function from a sequence's tokens so far to its next one.
    pub seed: u64,
    /// Texts, or lists of token ids. A choice says one of them, by its prompt and index, over and over until it ends.
    pub script: Vec<Text>,
}

/// Tokens, as text or as ids.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum Text {
    /// To be tokenised; control tokens in it are plain text.
    Text(String),
    /// Taken as they are.
    Ids(Vec<u32>),
}

/// Lengths of outputs, the end of sequence token included.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
pub enum OutputTokens {
    /// Always this many.
    Fixed(u32),
    /// Any number from `min` to `max`, each as likely.
    Uniform {
        /// Least.
        min: u32,
        /// Most.
        max: u32,
    },
    /// Exponential with this mean; at least 1.
    Mean(f64),
}

/// The file is no profile.
#[derive(Debug, thiserror::Error)]
#[error("--profile {}: {reason}", path.display())]
pub struct ProfileError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

impl Profile {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Self, ProfileError> {
        let failed = |reason: String| ProfileError { path: path.to_owned(), reason };
        let text = std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&text).map_err(failed)
    }

    /// Parses and checks a file's text; the error tells what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let profile: Self = match text.trim() {
            "" => Self::default(),
            text => serde_saphyr::from_str(text).map_err(|error| error.to_string())?,
        };
        profile.check().map(|()| profile)
    }

    fn check(&self) -> Result<(), String> {
        let step = &self.step;
        for (name, seconds) in [
            ("step.base_seconds", step.base_seconds),
            ("step.prefill_token_seconds", step.prefill_token_seconds),
            ("step.decode_sequence_seconds", step.decode_sequence_seconds),
            ("step.context_token_seconds", step.context_token_seconds),
            ("faults.delay_seconds", self.faults.delay_seconds),
            ("faults.slow_seconds", self.faults.slow_seconds),
        ] {
            if !(0.0..=SECONDS_MAX).contains(&seconds) {
                return Err(format!("{name} is {seconds}, must be from 0 to {SECONDS_MAX}"));
            }
        }
        if !(0.0..=1.0).contains(&step.jitter) {
            return Err(format!("step.jitter is {}, must be from 0 to 1", step.jitter));
        }
        if self.tokens.seed != 0 && !self.tokens.script.is_empty() {
            return Err("tokens has a seed and a script; give one of them".to_owned());
        }
        if self.tokens.script.iter().any(Text::is_empty) {
            return Err("tokens.script has an empty entry; each must say something".to_owned());
        }
        let lengths_hold = self.output_tokens.is_none_or(|lengths| match lengths {
            OutputTokens::Fixed(tokens) => tokens >= 1,
            OutputTokens::Uniform { min, max } => min >= 1 && min <= max,
            OutputTokens::Mean(mean) => (1.0..=f64::from(u32::MAX)).contains(&mean),
        });
        if !lengths_hold {
            return Err("output_tokens must be at least 1, and min at most max".to_owned());
        }
        Ok(())
    }
}

impl StepTime {
    /// Seconds of step number `step`. The same step of the same plan always takes as long.
    pub fn seconds(&self, plan: &StepPlan, step: u64) -> f64 {
        let (mut prefill, mut decode, mut context) = (0, 0, 0);
        for row in &plan.rows {
            match &row.input {
                RowInput::Tokens(ids) => prefill += ids.len(),
                RowInput::LastSampled => decode += 1,
            }
            context += row.context as usize + row.input.len();
        }
        self.of(prefill, decode, context)
            * (1.0 + self.jitter * (2.0 * unit(&[self.jitter_seed, step]) - 1.0))
    }

    /// Seconds of a step of so many prompt tokens, decoding sequences and tokens attended to; without jitter.
    pub fn of(&self, prefill_tokens: usize, decode_sequences: usize, context_tokens: usize) -> f64 {
        self.base_seconds
            + self.prefill_token_seconds * prefill_tokens as f64
            + self.decode_sequence_seconds * decode_sequences as f64
            + self.context_token_seconds * context_tokens as f64
    }
}

impl Text {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Ids(ids) => ids.is_empty(),
        }
    }
}

impl OutputTokens {
    /// The length that belongs to `key`; at least 1.
    pub(super) fn draw(&self, key: u64) -> u32 {
        match *self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform { min, max } => min + (mix(&[key]) % (u64::from(max - min) + 1)) as u32,
            Self::Mean(mean) => ((-mean * (1.0 - unit(&[key])).ln()).round() as u32).max(1),
        }
    }
}

/// Longest time that a profile may give anything: a year's typo would only look like a hang.
const SECONDS_MAX: f64 = 3600.0;

/// A number from 0 up to 1.
fn unit(parts: &[u64]) -> f64 {
    (mix(parts) >> 11) as f64 / (1u64 << 53) as f64
}

/// Scrambles numbers into one, in which every bit hangs on every bit of theirs (the finaliser of splitmix64).
pub(super) fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |state, part| {
        let mut x = (state ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}
