//! How a sequence's tokens are drawn: parsed once, then trusted.

use thalweg_model::grammar::Grammar;

/// Sampling parameters of one request. Built by the service from the wire form, which checks every bound.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// Subtracted once from logits of tokens put out before.
    pub presence_penalty: f32,
    /// Subtracted per time put out.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Key of the random numbers, together with the choice's index.
    pub seed: u64,
    /// Outputs before which `end_ids` cannot be drawn.
    pub min_tokens: u32,
    /// Ids that end the sequence: the model's own unless ignored, and the request's stop_token_ids. Sorted.
    pub end_ids: Vec<u32>,
    /// None: no logprobs; else the number of alternatives.
    pub logprobs: Option<u32>,
    /// Added to logits, by id. Sorted by id.
    pub logit_bias: Vec<(u32, f32)>,
    /// What the output must be a text of. Whoever plans steps follows it; devices get masks.
    pub grammar: Option<Grammar>,
}

impl SamplingParams {
    /// The likeliest token each time, until the request's limit: no end ids, no logprobs.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            min_tokens: 0,
            end_ids: Vec::new(),
            logprobs: None,
            logit_bias: Vec::new(),
            grammar: None,
        }
    }
}
