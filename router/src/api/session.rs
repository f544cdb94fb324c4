//! One generation request between its acceptance and its last token: the same for streams and whole replies.

use std::sync::Arc;

use thalweg_proto::code::ErrorCode;
use thalweg_proto::ids::WorkerId;
use thalweg_proto::v1;

use crate::dispatch::{ChoiceEnder, Tokenized};
use crate::error::RouterError;
use crate::output::Assembly;
use crate::output::choice::Piece;
use crate::output::logprobs::TokenNames;
use crate::request::ValidRequest;
use crate::sse::chunk::ReplyHead;
use crate::tokenize::TokenizedPrompt;
use crate::usage::{Outcome, UsageRecord};

use super::Api;
use super::answer::{Answer, Event};
use super::asked::{Asked, prompt_id};

/// A request that runs. Dropping it cancels it down to the worker's KV blocks and writes its record.
pub(super) struct Session {
    pub(super) request: Arc<ValidRequest>,
    pub(super) head: ReplyHead,
    pub(super) assembly: Assembly,
    pub(super) worker: Option<WorkerId>,
    pub(super) record: UsageRecord,
    answer: Answer,
    /// By prompt, once a worker has taken it.
    enders: Vec<Option<ChoiceEnder>>,
}

impl Session {
    /// What log probabilities call tokens.
    pub(super) fn token_names(&self) -> TokenNames<'_> {
        let tokenizer = &self.request.model().tokenizer;
        TokenNames { tokenizer, are_ids: self.request.reply().names_are_ids }
    }

    /// Takes what was parsed and tokenised to the workers, at the first call of `next`.
    pub(super) fn new(
        api: &Api,
        asked: &Asked,
        request: ValidRequest,
        prompts: &[TokenizedPrompt],
        head: ReplyHead,
        record: UsageRecord,
    ) -> Self {
        let grammar = request.structure().map(|structure| Arc::new(structure.wire()));
        let tokenized = |(at, prompt): (usize, &TokenizedPrompt)| Tokenized {
            request_id: prompt_id(&head.id, at, prompts.len()),
            sampling: sampling(&request, prompt.max_tokens),
            grammar: grammar.clone(),
            n: request.choices(),
            priority: request.priority(),
            taken: Arc::clone(record.taken()),
            ..asked.tokenized(api, request.model(), Arc::clone(&prompt.ids), request.cache_salt())
        };
        let requests = prompts.iter().enumerate().map(tokenized).collect();
        let answer = Answer::new(&api.router.dispatcher, requests, None);
        let request = Arc::new(request);
        let assembly = Assembly::new(Arc::clone(&request), prompts);
        let enders = vec![None; prompts.len()];
        Self { request, head, assembly, worker: None, record, answer, enders }
    }

    /// Waits for more output and appends it to `pieces`. False once the answer is complete.
    pub(super) async fn next(&mut self, pieces: &mut Vec<Piece>) -> Result<bool, RouterError> {
        if self.assembly.finished() {
            self.record.end(Outcome::Complete);
            return Ok(false);
        }
        let result = self.step(pieces).await;
        if let Err(error) = &result {
            self.record.end(Outcome::Failed(error.code));
        }
        result.map(|()| true)
    }

    async fn step(&mut self, pieces: &mut Vec<Piece>) -> Result<(), RouterError> {
        let Some(item) = self.answer.next().await else {
            return Err(RouterError::new(
                ErrorCode::Internal,
                "the worker ended the request before its last token",
            ));
        };
        match item? {
            (prompt, Event::Placed(worker, ender)) => {
                self.enders[prompt] = Some(ender);
                self.record.worker(worker.as_str());
                self.worker.get_or_insert(worker);
            }
            (prompt, Event::Output(output)) => {
                let known = pieces.len();
                self.assembly.push(prompt, output, pieces)?;
                self.record.progress(self.assembly.usage());
                if self.assembly.prompt_finished(prompt) {
                    self.answer.finish(prompt);
                } else {
                    self.end_choices(prompt, &pieces[known..]);
                }
            }
        }
        Ok(())
    }

    /// A choice that met a stop string would decode on for nobody.
    fn end_choices(&self, prompt: usize, pieces: &[Piece]) {
        let Some(ender) = &self.enders[prompt] else { return };
        for piece in pieces.iter().filter(|piece| piece.finish.is_some()) {
            ender.end(piece.choice as u32 % self.request.choices());
        }
    }
}

fn sampling(request: &ValidRequest, max_tokens: u32) -> v1::SamplingParams {
    let wanted = request.sampling();
    v1::SamplingParams { max_tokens, min_tokens: wanted.min_tokens.min(max_tokens), ..wanted.clone() }
}
