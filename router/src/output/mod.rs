//! From a worker's tokens to what the client reads: text, stops, logprobs, counts.

pub(crate) mod choice;
pub(crate) mod echo;
pub(crate) mod logprobs;
pub(crate) mod part;
pub(crate) mod reader;
pub(crate) mod reasoning;
mod stop;
pub(crate) mod tools;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;

use crate::dispatch::GenerationEvent;
use crate::error::RouterError;
use crate::request::ValidRequest;
use crate::tokenize::TokenizedPrompt;
use crate::usage::Usage;

use choice::{Choice, Piece, Rules};
use echo::Echo;

/// The state of a whole answer: every choice of every prompt, in the order of the reply.
pub(crate) struct Assembly {
    request: Arc<ValidRequest>,
    prompts: Vec<PromptState>,
    /// Choices of prompt p are `p * n ..  (p + 1) * n`.
    choices: Vec<Choice>,
}

struct PromptState {
    ids: Arc<[u32]>,
    echo: Option<Echo>,
    info: Option<v1::PromptInfo>,
}

impl Assembly {
    pub(crate) fn new(request: Arc<ValidRequest>, prompts: &[TokenizedPrompt]) -> Self {
        let rules = rules(&request);
        let per_prompt = request.choices() as usize;
        let mut states = Vec::with_capacity(prompts.len());
        let mut choices = Vec::with_capacity(prompts.len() * per_prompt);
        for tokenized in prompts {
            let echo = request.reply().echo.then(|| Echo::new(&rules, tokenized));
            let characters = echo.as_ref().map_or(0, Echo::characters);
            choices.extend((0..per_prompt).map(|_| Choice::new(&rules, &tokenized.ids, characters)));
            states.push(PromptState { ids: Arc::clone(&tokenized.ids), echo, info: None });
        }
        Self { request, prompts: states, choices }
    }

    /// Takes an event of one prompt's generation; what came of it is appended to `pieces`.
    pub(crate) fn push(
        &mut self,
        prompt: usize,
        event: GenerationEvent,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), RouterError> {
        match event {
            GenerationEvent::Prompt(info) => {
                self.prompts[prompt].info.get_or_insert(info);
                Ok(())
            }
            GenerationEvent::Deltas(deltas) => {
                deltas.into_iter().try_for_each(|delta| self.push_delta(prompt, delta, pieces))
            }
        }
    }

    /// Every choice of this prompt has ended.
    pub(crate) fn prompt_finished(&self, prompt: usize) -> bool {
        let n = self.request.choices() as usize;
        self.choices[prompt * n..(prompt + 1) * n].iter().all(Choice::finished)
    }

    /// Every choice has ended.
    pub(crate) fn finished(&self) -> bool {
        self.choices.iter().all(Choice::finished)
    }

    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }

    /// The prompt that a choice continues.
    pub(crate) fn prompt_of(&self, choice: usize) -> usize {
        choice / self.request.choices() as usize
    }

    pub(crate) fn prompt_ids(&self, prompt: usize) -> &[u32] {
        &self.prompts[prompt].ids
    }

    /// The prompt's text and logprobs, if the answer begins with them.
    pub(crate) fn echo(&self, prompt: usize) -> Option<&Echo> {
        self.prompts[prompt].echo.as_ref()
    }

    /// One per prompt token; empty unless asked for.
    pub(crate) fn prompt_logprobs(&self, prompt: usize) -> &[v1::TokenLogprobs] {
        self.prompts[prompt].info.as_ref().map_or(&[], |info| &info.prompt_logprobs)
    }

    pub(crate) fn usage(&self) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|p| p.ids.len() as u64).sum();
        let cached = |p: &PromptState| p.info.as_ref().map_or(0, |info| u64::from(info.cached_tokens));
        let cached_tokens = self.prompts.iter().map(cached).sum();
        let completion_tokens = self.choices.iter().map(|c| u64::from(c.tokens())).sum();
        let reasoning = |c: &Choice| u64::from(c.reasoning_tokens());
        let reasoning_tokens =
            self.request.reply().reading.reasoning.map(|_| self.choices.iter().map(reasoning).sum());
        Usage { prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens }
    }

    fn push_delta(
        &mut self,
        prompt: usize,
        delta: v1::ChoiceDelta,
        pieces: &mut Vec<Piece>,
    ) -> Result<(), RouterError> {
        let n = self.request.choices();
        if delta.index >= n {
            let message = format!("the worker sent a choice {} of {n}", delta.index);
            return Err(RouterError::new(ErrorCode::Internal, message));
        }
        let at = prompt * n as usize + delta.index as usize;
        let choice = &mut self.choices[at];
        if !choice.finished() {
            let piece = choice.push(&rules(&self.request), delta)?;
            pieces.push(Piece { choice: at, ..piece });
        }
        Ok(())
    }
}

fn rules(request: &ValidRequest) -> Rules<'_> {
    Rules {
        tokenizer: &request.model().tokenizer,
        options: request.reply(),
        min_tokens: request.sampling().min_tokens,
        stop_token_ids: &request.sampling().stop_token_ids,
    }
}
