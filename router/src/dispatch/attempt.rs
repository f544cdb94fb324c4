//! One try of a request on one worker, up to its first new tokens.

use futures::FutureExt;
use futures::future::BoxFuture;
use thalweg_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::broken::Broken;
use super::progress::Progress;
use super::stage::{Hashed, Placed, Streaming};
use crate::admission::Permit;
use crate::workers::Booking;
use crate::workers::health::HealthState;

/// A worker's answer as it arrives.
pub(super) struct Source {
    stream: tonic::Streaming<v1::GenerateResponse>,
    /// What ends it from outside: made once, since a timer for each token would cost more than the token.
    ended: BoxFuture<'static, Broken>,
    attempt_id: u64,
}

/// A try that failed; what is needed for another one.
pub(super) struct Failed {
    pub(super) hashed: Hashed,
    pub(super) permit: Permit,
    pub(super) booking: Booking,
    pub(super) broken: Broken,
}

type Opened = (Source, v1::PromptInfo, Vec<v1::ChoiceDelta>);

impl Placed {
    /// Opens the stream and waits for the first new tokens.
    pub(super) async fn open(mut self, router_id: &str) -> Result<Streaming, Box<Failed>> {
        match self.try_open(router_id).await {
            Ok((source, prompt, first)) => Ok(Streaming { placed: self, source, prompt, first }),
            Err(broken) => Err(Box::new(self.failed(broken))),
        }
    }

    /// What is left of it when the answer broke.
    pub(super) fn failed(self, broken: Broken) -> Failed {
        Failed { hashed: self.hashed, permit: self.permit, booking: self.booking, broken }
    }

    async fn try_open(&mut self, router_id: &str) -> Result<Opened, Broken> {
        let message = self.message(router_id);
        let mut source = self.call(message).await?;
        let mut prompt = None;
        loop {
            let Some(message) = source.next().await? else { return Err(Broken::ended_early()) };
            prompt = message.prompt.or(prompt);
            let first = self.hashed.journey.progress.take(message.deltas).map_err(Broken::of_nonsense)?;
            if !first.is_empty() {
                return Ok((source, prompt.unwrap_or_default(), first));
            }
        }
    }

    async fn call(&self, message: v1::GenerateRequest) -> Result<Source, Broken> {
        let worker = self.booking.worker();
        let mut client = worker.client();
        let mut ended = ends(worker.watch_state(), self.hashed.request.deadline).boxed();
        let stream = tokio::select! {
            biased;
            answer = client.generate(message) => answer.map_err(|status| Broken::of(&status))?.into_inner(),
            broken = &mut ended => return Err(broken),
        };
        Ok(Source { stream, ended, attempt_id: self.attempt_id })
    }

    fn message(&self, router_id: &str) -> v1::GenerateRequest {
        let request = &self.hashed.request;
        let progress = &self.hashed.journey.progress;
        let mut sampling = request.sampling.clone();
        if progress.tokens() > 0 {
            // They came with the first token, and would cost a prefill without the cache.
            sampling.prompt_logprobs = None;
        }
        v1::GenerateRequest {
            request_id: request.request_id.clone(),
            attempt_id: self.attempt_id,
            model: request.model.name.clone(),
            prompt_ids: request.prompt_ids.to_vec(),
            sampling: Some(sampling),
            choices: progress.unfinished(),
            cache_scope: Some(request.scope.clone()),
            adapter: request.adapter.clone(),
            priority: request.priority,
            router_id: router_id.to_owned(),
            booking: self.booking.number(),
            fingerprint: request.model.fingerprint.clone(),
            traceparent: request.traceparent.clone(),
        }
    }
}

impl Source {
    /// The next message of this attempt; None at the end.
    pub(super) async fn next(&mut self) -> Result<Option<v1::GenerateResponse>, Broken> {
        loop {
            // A broken stream is noticed here, at once; the worker's health need not say so first.
            let message = tokio::select! {
                biased;
                message = self.stream.message() => message.map_err(|status| Broken::of(&status))?,
                broken = &mut self.ended => return Err(broken),
            };
            match message {
                Some(late) if late.attempt_id != self.attempt_id => {}
                message => return Ok(message),
            }
        }
    }

    /// The next deltas that `progress` has not seen.
    pub(super) async fn deltas(&mut self, progress: &mut Progress) -> Result<Vec<v1::ChoiceDelta>, Broken> {
        let Some(message) = self.next().await? else { return Err(Broken::ended_early()) };
        progress.take(message.deltas).map_err(Broken::of_nonsense)
    }
}

/// Returns when the worker is given up or the request's time is over.
async fn ends(mut state: watch::Receiver<HealthState>, deadline: Instant) -> Broken {
    let gone = async {
        // The sender lives in the worker, which the booking holds; without it nobody can say more.
        if state.wait_for(|s| *s == HealthState::Gone).await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        () = gone => Broken::silent(),
        () = sleep_until(deadline) => Broken::Late,
    }
}
