//! What a simulated model says: a function of the sequence's tokens alone, so that a choice which was resumed, preempted
//! or batched differently says the same, and one that was resumed wrongly does not.

use thalweg_model::grammar::TokenMask;

use super::profile::{OutputTokens, mix};
use crate::plan::{Logprobs, SlotInit};
use crate::pooling::normalise;

/// From tokens to tokens.
#[derive(Clone, Debug)]
pub struct Language {
    /// Of the function.
    pub seed: u64,
    /// Instead of the function; each entry has at least one token.
    pub script: Vec<Vec<u32>>,
    /// When choices end by themselves.
    pub output_tokens: Option<OutputTokens>,
    /// Ids are below this.
    pub vocab_size: u32,
    /// The model's end of sequence ids.
    pub eos_ids: Vec<u32>,
    /// Control tokens, sorted: never said, but for the end.
    pub special_ids: Vec<u32>,
    /// Values of an embedding.
    pub hidden_size: usize,
}

/// One sequence, as far as it has got.
#[derive(Debug)]
pub(super) struct Speaker {
    init: SlotInit,
    prompt: u64,
    /// Of prompt and output.
    digest: u64,
    output_len: u32,
}

impl Speaker {
    pub(super) fn new(init: SlotInit) -> Self {
        let prompt = init.prompt.iter().fold(0, extend);
        let digest = init.output.iter().fold(prompt, extend);
        Self { prompt, digest, output_len: init.output.len() as u32, init }
    }

    /// Tokens put out.
    pub(super) fn output_len(&self) -> u32 {
        self.output_len
    }

    /// Seed and choice matter where tokens are drawn at random, and only there.
    fn draws(&self) -> u64 {
        let sampling = &self.init.sampling;
        if sampling.temperature > 0.0 { mix(&[sampling.seed, u64::from(self.init.choice)]) } else { 0 }
    }
}

impl Language {
    /// The next token of a sequence, of those that a mask allows, which it takes in.
    pub(super) fn say(&self, speaker: &mut Speaker, mask: Option<&TokenMask>) -> Logprobs {
        let allowed = |id: &u32| mask.is_none_or(|mask| mask.allows(*id));
        let token = match self.end(speaker).filter(allowed) {
            Some(end) => end,
            None => self.masked(self.next(speaker), mask),
        };
        let logprobs = self.logprobs(token, speaker.digest, speaker.init.sampling.logprobs);
        speaker.digest = extend(speaker.digest, &token);
        speaker.output_len += 1;
        logprobs
    }

    /// A vector of length 1 for the prompt, whatever its pooling.
    pub(super) fn embed(&self, speaker: &Speaker) -> Vec<f32> {
        let value = |at| (mix(&[self.seed, speaker.prompt, at]) >> 40) as f32 / (1u32 << 23) as f32 - 1.0;
        let mut vector: Vec<f32> = (0..self.hidden_size as u64).map(value).collect();
        normalise(&mut vector);
        vector
    }

    /// The id, or the first one behind it that a mask allows, an end of sequence only where there is nothing else.
    fn masked(&self, from: u32, mask: Option<&TokenMask>) -> u32 {
        let Some(mask) = mask.filter(|mask| !mask.allows(from)) else { return from };
        let allowed = || (from..self.vocab_size).chain(0..from).filter(|id| mask.allows(*id));
        allowed().find(|id| !self.eos_ids.contains(id)).or_else(|| allowed().next()).unwrap_or(from)
    }

    /// Logprobs of prompt token number `position`, with `top` alternatives.
    pub(super) fn predict(&self, position: usize, token: u32, top: u32) -> Logprobs {
        self.logprobs(token, mix(&[self.seed, position as u64]), Some(top))
    }

    /// The end of sequence, when its time has come and the request takes one.
    fn end(&self, speaker: &Speaker) -> Option<u32> {
        let sampling = &speaker.init.sampling;
        let length = self.output_tokens?.draw(mix(&[self.seed, speaker.prompt, speaker.draws()]));
        let is_time = speaker.output_len + 1 >= length && speaker.output_len >= sampling.min_tokens;
        self.eos_ids.iter().copied().find(|id| is_time && sampling.end_ids.binary_search(id).is_ok())
    }

    fn next(&self, speaker: &Speaker) -> u32 {
        if !self.script.is_empty() {
            let entry = mix(&[speaker.prompt]).wrapping_add(u64::from(speaker.init.choice));
            let text = &self.script[(entry % self.script.len() as u64) as usize];
            return text[speaker.output_len as usize % text.len()];
        }
        let parts = [self.seed, speaker.digest, u64::from(speaker.output_len), speaker.draws()];
        self.ordinary((mix(&parts) % u64::from(self.vocab_size)) as u32, &speaker.init.sampling.end_ids)
    }

    /// The id, or the first one behind it that is neither a control token nor ends a sequence.
    fn ordinary(&self, from: u32, end_ids: &[u32]) -> u32 {
        let ids = (from..self.vocab_size).chain(0..from);
        let is_ordinary = |id: &u32| {
            self.special_ids.binary_search(id).is_err()
                && end_ids.binary_search(id).is_err()
                && !self.eos_ids.contains(id)
        };
        ids.clone().find(is_ordinary).unwrap_or(from)
    }

    /// The token is the likeliest; the others stand behind it in order.
    fn logprobs(&self, token: u32, digest: u64, top: Option<u32>) -> Logprobs {
        let Some(top) = top else { return Logprobs { token, logprob: f32::NAN, rank: 0, top: Vec::new() } };
        let logprob = -0.1 - (mix(&[digest, u64::from(token)]) % 1000) as f32 / 2000.0;
        let others = (1..self.vocab_size).map(|i| (token + i) % self.vocab_size).zip(1..);
        let others = others.map(|(id, behind)| (id, logprob - behind as f32));
        let top = std::iter::once((token, logprob)).chain(others).take(top as usize).collect();
        Logprobs { token, logprob, rank: 1, top }
    }
}

fn extend(digest: u64, token: &u32) -> u64 {
    mix(&[digest, u64::from(*token)])
}
