//! Match, pick and book: which worker, and its load with this request on it.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use tokio::time::Instant;

use super::stage::{Hashed, Placed, Predicted, Tokenized, Unplaced};
use super::{Dispatcher, RETRY_AFTER};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::policy::{Ask, Candidate, Pick, pick};
use crate::workers::Worker;
use crate::workers::in_flight::OnWorker;
use crate::workers::load::Weight;
use crate::workers::{EMBED, no_embeddings};

/// How workers say that they follow grammars.
const GRAMMAR: &str = "grammar";

/// Within this time after its predicted end a worker has said what a prefill stored.
const CONFIRMATION: Duration = Duration::from_secs(5);

impl Dispatcher {
    /// Picks a worker that has not failed the request, or one that has if there is no other, and books it there. Gives it
    /// back when no worker is ready at this moment.
    pub(super) fn place(
        &self,
        hashed: Hashed,
        mut permit: Permit,
    ) -> Result<Result<Placed, Unplaced>, RouterError> {
        let now = Instant::now();
        let workers = self.eligible(&hashed);
        let matches = self.replica.lookup(&hashed.keys, now);
        let block_tokens = hashed.request.model.block_tokens as u32;
        let indexed_tokens = |w: &Arc<Worker>| {
            // Blocks of another size have other hashes.
            let holder = w.holder.filter(|_| w.about.block_size == block_tokens);
            holder.map_or(0, |h| matches.blocks(h)) * block_tokens
        };
        let indexed: Vec<u32> = workers.iter().map(indexed_tokens).collect();
        let candidates: Vec<Candidate> =
            workers.iter().zip(&indexed).map(|(w, tokens)| candidate(w, *tokens)).collect();
        let Some(Pick { index, cost }) = self.pick(&self.ask(&hashed), &candidates) else {
            return self.nobody(hashed, permit);
        };
        let (worker, candidate) = (&workers[index], &candidates[index]);
        let mut booking = self.workers.book(worker, weight(&hashed, candidate.cached_tokens));
        permit.booked();
        let alone = hashed.trial.as_ref().is_some_and(|trial| trial.alone);
        booking.runs(OnWorker { prompt: hashed.prompt, alone, proven: false });
        let predicted = Predicted {
            cost,
            indexed_tokens: indexed[index],
            cached_tokens: candidate.cached_tokens,
            at: now,
        };
        if let Some(holder) = worker.holder {
            let from = now + Duration::try_from_secs_f64(cost.first_token()).unwrap_or(CONFIRMATION);
            let expected = self.replica.expect(holder, Arc::clone(&hashed.keys), from, from + CONFIRMATION);
            if let Some(expectation) = expected {
                booking.set_expected(Arc::clone(&self.replica), expectation);
            }
        }
        tracing::debug!(
            request = hashed.request.request_id.as_str(), worker = %worker.id, candidates = candidates.len(),
            cached_tokens = candidate.cached_tokens, ?cost, "worker picked"
        );
        let unproven_from = Some(hashed.journey.progress.tokens());
        let attempt_id = self.next_attempt();
        let channel = self.channels.of(worker, self.workers.router_id());
        Ok(Ok(Placed { hashed, permit, booking, predicted, attempt_id, unproven_from, channel }))
    }

    /// No worker is ready: the queue knows what to wait for, save for grammars, embeddings and contexts, about which it knows
    /// nothing.
    fn nobody(&self, hashed: Hashed, permit: Permit) -> Result<Result<Placed, Unplaced>, RouterError> {
        let Tokenized { model, grammar, embedding, .. } = &hashed.request;
        let ready = self.workers.ready_for(model);
        let lack = match () {
            () if ready.is_empty() => None,
            () if !ready.iter().any(|w| holds(w, &hashed)) => Some(format!(
                "has a context of {} tokens any more; send a shorter request",
                hashed.tokens_max()
            )),
            () if embedding.is_some() => return Err(no_embeddings(&model.name)),
            () => grammar
                .is_some()
                .then(|| "knows grammars; upgrade its workers, or ask for plain text".to_owned()),
        };
        let Some(lack) = lack else { return Ok(Err(Unplaced { hashed, permit })) };
        let message = format!("no ready worker of {} {lack}", model.described());
        Err(RouterError::new(ErrorCode::Unavailable, message).retry_after(RETRY_AFTER))
    }

    /// Ready workers, those with room if any has it, and lives that have not failed it if there is any.
    fn eligible(&self, hashed: &Hashed) -> Vec<Arc<Worker>> {
        let mut ready = self.workers.ready_for(&hashed.request.model);
        // Workers of smaller contexts may have come since it was let in.
        ready.retain(|w| holds(w, hashed));
        if hashed.request.grammar.is_some() {
            // An older one would answer whatever it likes.
            ready.retain(|w| w.has_feature(GRAMMAR));
        }
        if hashed.request.embedding.is_some() {
            ready.retain(|w| w.has_feature(EMBED));
        }
        let untried = prefer(ready, |w| !hashed.journey.has_tried(&w.id, w.epoch));
        prefer(untried, |w| w.has_room())
    }

    fn ask(&self, hashed: &Hashed) -> Ask {
        Ask {
            prompt_tokens: hashed.context_tokens() as u32,
            choices: hashed.journey.progress.open_choices(),
            expected_output: self.expected_output(&hashed.request),
            prefix_key: hashed.prefix_key,
            harm_weight: self.harm_weight,
        }
    }

    fn pick(&self, ask: &Ask, candidates: &[Candidate]) -> Option<Pick> {
        pick(self.policy, ask, candidates, self.next_turn(), &mut *self.rng.lock())
    }
}

/// Its context has room for all that the request may come to.
fn holds(worker: &Worker, hashed: &Hashed) -> bool {
    hashed.tokens_max() <= u64::from(worker.about.max_model_len)
}

fn prefer(workers: Vec<Arc<Worker>>, wanted: impl Fn(&Arc<Worker>) -> bool) -> Vec<Arc<Worker>> {
    let (preferred, others): (Vec<_>, Vec<_>) = workers.into_iter().partition(wanted);
    if preferred.is_empty() { others } else { preferred }
}

fn candidate(worker: &Worker, indexed_tokens: u32) -> Candidate {
    let load = worker.load();
    Candidate {
        name_hash: BuildHasherDefault::<DefaultHasher>::default().hash_one(worker.id.as_str()),
        running: load.running,
        waiting: load.waiting_ahead,
        recent_sequences: load.recent_sequences,
        max_num_seqs: worker.about.max_num_seqs,
        prefill_tokens_ahead: load.prefill_tokens_ahead,
        running_context_tokens: load.running_context_tokens,
        kv_blocks_available: load.kv_blocks_available,
        block_tokens: worker.about.block_size,
        cached_tokens: worker.confidence().discount(indexed_tokens),
        speed: worker.speed(),
    }
}

fn weight(hashed: &Hashed, cached_tokens: u32) -> Weight {
    let prefill_tokens = hashed.context_tokens().saturating_sub(u64::from(cached_tokens)).max(1);
    let kv_blocks = prefill_tokens.div_ceil(hashed.request.model.block_tokens as u64);
    Weight { sequences: hashed.journey.progress.open_choices(), prefill_tokens, kv_blocks }
}
