//! One try of a request on one worker, up to its first new tokens.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::broken::Broken;
use super::buffer::Buffer;
use super::channel::{Joined, Relayed};
use super::progress::Progress;
use super::stage::{Hashed, Placed, Streaming};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::metrics::Metrics;
use crate::workers::Booking;
use crate::workers::health::HealthState;

/// What the last tokens may take longer in the channel than the end of their stream.
const LAST_TOKENS: Duration = Duration::from_secs(1);

/// A worker's answer as it arrives.
pub(super) struct Source {
    stream: tonic::Streaming<v1::GenerateResponse>,
    /// What ends it from outside: made once, since a timer for each token would cost more than the token.
    ended: BoxFuture<'static, Broken>,
    attempt_id: u64,
    /// The way that its messages take, unless the worker sends them by the stream.
    joined: Option<Joined>,
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
    pub(super) async fn open(mut self, router_id: &str, metrics: &Metrics) -> Result<Streaming, Box<Failed>> {
        match self.try_open(router_id, metrics).await {
            Ok((source, prompt, first)) => Ok(Streaming { placed: self, source, prompt, first }),
            Err(broken) => Err(Box::new(self.failed(broken))),
        }
    }

    /// What is left of it when the answer broke.
    pub(super) fn failed(self, broken: Broken) -> Failed {
        Failed { hashed: self.hashed, permit: self.permit, booking: self.booking, broken }
    }

    async fn try_open(&mut self, router_id: &str, metrics: &Metrics) -> Result<Opened, Broken> {
        let joined = self.channel.take().and_then(|channel| channel.join(self.attempt_id));
        let message = self.message(router_id, joined.as_ref());
        let mut source = self.call(message, joined).await?;
        self.taken(metrics);
        let mut prompt = None;
        loop {
            let Some(message) = source.next().await? else { return Err(Broken::ended_early()) };
            prompt = message.prompt.or(prompt);
            // Before its end is taken for one: another worker would have nothing left to do.
            if message.deltas.iter().any(is_regular_end) {
                self.check_embedding(prompt.as_ref()).map_err(Broken::of_nonsense)?;
            }
            let first = self.hashed.journey.progress.take(message.deltas).map_err(Broken::of_nonsense)?;
            if !first.is_empty() {
                return Ok((source, prompt.unwrap_or_default(), first));
            }
        }
    }

    async fn call(&self, message: v1::GenerateRequest, joined: Option<Joined>) -> Result<Source, Broken> {
        let worker = self.booking.worker();
        let mut client = worker.client();
        let mut ended = ends(worker.watch_state(), self.hashed.request.deadline).boxed();
        let stream = tokio::select! {
            biased;
            answer = client.generate(message) => answer.map_err(|status| Broken::of(&status))?.into_inner(),
            broken = &mut ended => return Err(broken),
        };
        Ok(Source { stream, ended, attempt_id: self.attempt_id, joined })
    }

    /// The worker did not refuse it.
    fn taken(&mut self, metrics: &Metrics) {
        let Self { hashed, booking, .. } = self;
        let worker = &booking.worker().id;
        metrics.dispatch.picked(worker.as_str());
        match hashed.left_by.take() {
            Some(reason) if hashed.journey.begun() => metrics.resumes.began(reason),
            Some(reason) => metrics.dispatch.retried(reason),
            None => {}
        }
        if !std::mem::replace(&mut hashed.is_taken, true) {
            hashed.request.taken.add(worker, hashed.request.prompt_ids.len() as u64);
        }
    }

    fn message(&self, router_id: &str, joined: Option<&Joined>) -> v1::GenerateRequest {
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
            model: self.booking.worker().name_of(&request.model).to_owned(),
            prompt_ids: request.prompt_ids.to_vec(),
            sampling: Some(sampling),
            choices: progress.unfinished(),
            cache_scope: Some(request.scope.clone()),
            adapter: request.model.adapter_name().to_owned(),
            adapter_fingerprint: request.model.weights().adapter.unwrap_or_default(),
            priority: request.priority,
            router_id: router_id.to_owned(),
            booking: self.booking.number(),
            fingerprint: request.model.fingerprint.clone(),
            traceparent: request.traceparent.clone(),
            tracestate: request.tracestate.clone(),
            channel: joined.map_or(0, Joined::number),
            on_trial: self.hashed.trial.is_some(),
            grammar: request.grammar.as_deref().cloned(),
            pooling: request.embedding.map_or(0, |wanted| wanted.pooling),
        }
    }

    /// What ends a prompt that is to be embedded comes with its embedding.
    fn check_embedding(&self, prompt: Option<&v1::PromptInfo>) -> Result<(), RouterError> {
        let Some(wanted) = self.hashed.request.embedding else { return Ok(()) };
        let embedding = prompt.map(|prompt| prompt.embedding.as_slice()).unwrap_or_default();
        let is_sound = embedding.len() == wanted.width as usize && embedding.iter().all(|x| x.is_finite());
        if is_sound {
            return Ok(());
        }
        let message = format!(
            "the worker sent {} values for an embedding of {} numbers",
            embedding.len(),
            wanted.width
        );
        Err(RouterError::new(ErrorCode::Internal, message))
    }
}

impl Source {
    /// The next message of this attempt; None at the end.
    pub(super) async fn next(&mut self) -> Result<Option<v1::GenerateResponse>, Broken> {
        loop {
            let joined = self.joined.as_ref();
            let from_channel = async move {
                match joined {
                    Some(joined) => joined.next().await,
                    None => std::future::pending().await,
                }
            };
            // A broken stream is noticed here, at once; the worker's health need not say so first.
            let message = tokio::select! {
                biased;
                message = from_channel => match message {
                    Some(message) => return Ok(Some(message)),
                    // The stream will tell why.
                    None => {
                        self.joined = None;
                        continue;
                    }
                },
                message = self.stream.message() => message.map_err(|status| Broken::of(&status))?,
                broken = &mut self.ended => return Err(broken),
            };
            match (message, self.joined.take()) {
                (Some(late), _) if late.attempt_id != self.attempt_id => {}
                (None, Some(joined)) => {
                    let last = timeout(LAST_TOKENS, joined.next()).await.ok().flatten();
                    self.joined = last.is_some().then_some(joined);
                    return Ok(last);
                }
                (message, _) => return Ok(message),
            }
        }
    }

    /// Its messages come by a channel.
    pub(super) fn has_channel(&self) -> bool {
        self.joined.is_some()
    }

    /// Lets the channel put new tokens into `buffer` until the last one, a failure, or `interrupt`.
    pub(super) async fn relay(
        &mut self,
        progress: &mut Progress,
        buffer: &Arc<Buffer>,
        interrupt: impl Future<Output = ()>,
    ) -> Result<(), Broken> {
        let Some(joined) = &self.joined else { return Ok(()) };
        joined.relay(std::mem::replace(progress, Progress::new(0, 0, 0)), Arc::clone(buffer));
        let ended = tokio::select! {
            biased;
            relayed = joined.relayed() => Ok(relayed),
            message = self.stream.message() => match message {
                Ok(None) => timeout(LAST_TOKENS, joined.relayed()).await.map_err(|_| Broken::ended_early()),
                Ok(Some(_)) => Err(Broken::of_nonsense(two_ways())),
                Err(status) => Err(Broken::of(&status)),
            },
            broken = &mut self.ended => Err(broken),
            () = interrupt => Ok(Relayed::Finished),
        };
        if let Some(relayed) = joined.unrelay() {
            *progress = relayed;
        }
        match ended? {
            Relayed::Finished => {}
            Relayed::Failed(error) => return Err(Broken::of_nonsense(error)),
            // The stream will tell why.
            Relayed::Closed => self.joined = None,
        }
        Ok(())
    }

    /// Lets the worker close its stream in order.
    pub(super) async fn close(mut self) {
        while let Ok(Some(_)) = self.stream.message().await {}
    }

    /// The next deltas that `progress` has not seen.
    pub(super) async fn deltas(&mut self, progress: &mut Progress) -> Result<Vec<v1::ChoiceDelta>, Broken> {
        let Some(message) = self.next().await? else { return Err(Broken::ended_early()) };
        progress.take(message.deltas).map_err(Broken::of_nonsense)
    }
}

fn is_regular_end(delta: &v1::ChoiceDelta) -> bool {
    !matches!(delta.finish_reason(), v1::FinishReason::Unspecified | v1::FinishReason::Abort)
}

fn two_ways() -> RouterError {
    RouterError::new(ErrorCode::Internal, "the worker sent tokens by its channel and by a stream")
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
