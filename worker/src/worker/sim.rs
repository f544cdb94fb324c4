//! A simulated model in place of weights: the checkpoint gives its shape and its tokenizer, the profile the rest.

use std::sync::Arc;

use thalweg_model::error::ModelError;
use thalweg_model::tokenizer::{Specials, Tokenizer, TokenizerBundle};

use super::StartError;
use crate::config::{EngineKind, WorkerConfig};
use crate::engine::{DecodeRate, EngineConfig, Rates};
use crate::runner::Runner;
use crate::runner::sim::{
    FaultSwitch, FaultWatch, Language, OutputTokens, Profile, SimConfig, SimRunner, StepTime, Text, Tokens,
};

/// What `--engine sim` serves.
pub(super) struct SimModel {
    step: StepTime,
    tokens: Tokens,
    output_tokens: Option<OutputTokens>,
    language: Arc<Language>,
    faults: FaultWatch,
}

/// Batches whose step time is told to routers.
const DECODE_BATCHES: [u32; 2] = [1, 8];

impl SimModel {
    /// Reads the profile, which belongs to `--engine sim` and to it alone.
    pub(super) fn load(
        config: &WorkerConfig,
        bundle: &TokenizerBundle,
        hidden_size: usize,
    ) -> Result<Self, StartError> {
        let path = match (config.engine, &config.profile) {
            (EngineKind::Sim, Some(path)) => path,
            (_, None) => {
                return Err(StartError::config(
                    "engine",
                    "sim",
                    "needs --profile FILE, which says how fast it is",
                ));
            }
            (EngineKind::Model, Some(path)) => {
                let reason = "is for --engine sim; leave it out where a model runs";
                return Err(StartError::config("profile", path.display(), reason));
            }
        };
        let Profile { step, tokens, output_tokens, faults } = Profile::read(path)?;
        let language =
            language(&tokens, output_tokens, bundle, hidden_size).map_err(|error| match error {
                Unspeakable::Model(error) => StartError::from(error),
                Unspeakable::Id(id) => {
                    let reason =
                        format!("tokens.script has id {id}, out of the vocabulary of {}", bundle.vocab_size);
                    StartError::config("profile", path.display(), reason)
                }
            })?;
        let bundle = bundle.clone();
        let encode = Box::new(move |text: &str| encodings(&bundle, text));
        let faults = FaultWatch::start(path, faults, encode)?;
        Ok(Self { step, tokens, output_tokens, language: Arc::new(language), faults })
    }

    /// What is said in the place of weights; workers that say the same can go on for each other.
    pub(super) fn said(&self) -> String {
        format!("{:?} {:?}", self.tokens, self.output_tokens)
    }

    pub(super) fn runner(&self) -> Result<Box<dyn Runner>, StartError> {
        let faults = self.faults().clone();
        let config = SimConfig { step: self.step, language: Arc::clone(&self.language), faults };
        Ok(Box::new(SimRunner::start(config)?))
    }

    pub(super) fn faults(&self) -> &FaultSwitch {
        self.faults.switch()
    }

    /// Known, not measured, so that a start takes no time.
    pub(super) fn rates(&self, plan: &EngineConfig) -> Rates {
        let tokens = plan.max_num_batched_tokens;
        let seconds = self.step.of(tokens, 0, tokens);
        let decode = DECODE_BATCHES.map(|batch| DecodeRate {
            batch,
            step_seconds: self.step.of(0, batch as usize, 0),
            samples: 1,
        });
        Rates {
            prefill_tokens_per_second: if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 },
            prefill_samples: 1,
            decode: decode.into_iter().filter(|rate| rate.step_seconds > 0.0).collect(),
        }
    }
}

enum Unspeakable {
    Model(ModelError),
    Id(u32),
}

fn language(
    tokens: &Tokens,
    output_tokens: Option<OutputTokens>,
    bundle: &TokenizerBundle,
    hidden_size: usize,
) -> Result<Language, Unspeakable> {
    let tokenizer = Tokenizer::new(bundle).map_err(Unspeakable::Model)?;
    let vocab_size = bundle.vocab_size as u32;
    let script: Vec<Vec<u32>> = tokens.script.iter().map(|text| ids(text, &tokenizer)).collect();
    if let Some(id) = script.iter().flatten().find(|id| **id >= vocab_size) {
        return Err(Unspeakable::Id(*id));
    }
    Ok(Language {
        seed: tokens.seed,
        script,
        output_tokens,
        vocab_size,
        eos_ids: bundle.eos_ids.clone(),
        special_ids: (0..vocab_size).filter(|id| tokenizer.is_special(*id)).collect(),
        hidden_size,
    })
}

fn ids(text: &Text, tokenizer: &Tokenizer) -> Vec<u32> {
    match text {
        Text::Text(text) => tokenizer.encode(text, Specials::Plain, false),
        Text::Ids(ids) => ids.clone(),
    }
}

/// As a prompt may hold the text: where a text begins, and behind a space.
fn encodings(bundle: &TokenizerBundle, text: &str) -> Vec<Vec<u32>> {
    match Tokenizer::new(bundle) {
        Ok(tokenizer) => [text.to_owned(), format!(" {text}")]
            .iter()
            .map(|text| tokenizer.encode(text, Specials::Plain, false))
            .collect(),
        Err(error) => {
            tracing::error!(%error, "texts of the profile's faults match nothing");
            Vec::new()
        }
    }
}
