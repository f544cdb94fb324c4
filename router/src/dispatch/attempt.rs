//! One try of a request on one worker, up to its first tokens.

use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::RETRY_AFTER;
use super::progress::Progress;
use super::stage::{Hashed, Placed, Streaming};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::workers::health::HealthState;

/// A worker's answer as it arrives.
pub(super) struct Source {
    stream: tonic::Streaming<v1::GenerateResponse>,
    state: watch::Receiver<HealthState>,
    attempt_id: u64,
    deadline: Instant,
}

/// Why the answer ended early.
#[derive(Clone, Debug)]
pub(super) enum Broken {
    /// The worker or the way to it failed; nothing says that the request was at fault.
    Lost(String),
    /// The worker refused or failed, and said so.
    Refused(RouterError),
    /// The request's time is over.
    Late,
}

/// A try that brought no token; what is needed for another one.
pub(super) struct Failed {
    pub(super) hashed: Hashed,
    pub(super) permit: Permit,
    pub(super) broken: Broken,
}

impl Placed {
    /// Opens the stream and waits for the first tokens.
    pub(super) async fn open(self, router_id: &str) -> Result<Streaming, Box<Failed>> {
        match self.try_open(router_id).await {
            Ok((source, progress, prompt, first)) => {
                Ok(Streaming { placed: self, source, progress, prompt, first })
            }
            Err(broken) => Err(Box::new(Failed { hashed: self.hashed, permit: self.permit, broken })),
        }
    }

    async fn try_open(
        &self,
        router_id: &str,
    ) -> Result<(Source, Progress, v1::PromptInfo, Vec<v1::ChoiceDelta>), Broken> {
        let request = &self.hashed.request;
        let mut progress = Progress::new(request.n, request.sampling.max_tokens);
        let message = self.message(router_id, &progress);
        let mut source = self.call(message).await?;
        let mut prompt = None;
        loop {
            let Some(message) = source.next().await? else {
                return Err(Broken::Lost("it ended its answer before the first token".to_owned()));
            };
            prompt = message.prompt.or(prompt);
            let first = progress.take(message.deltas).map_err(Broken::Refused)?;
            if !first.is_empty() {
                return Ok((source, progress, prompt.unwrap_or_default(), first));
            }
        }
    }

    async fn call(&self, message: v1::GenerateRequest) -> Result<Source, Broken> {
        let worker = self.booking.worker();
        let (mut client, mut state) = (worker.client(), worker.watch_state());
        let deadline = self.hashed.request.deadline;
        let gone = worker.watch_state();
        let stream = tokio::select! {
            () = given_up(&mut state) => return Err(silent()),
            answer = timeout_at(deadline, client.generate(message)) => {
                answer.map_err(|_| Broken::Late)?.map_err(|status| Broken::of(&status))?.into_inner()
            }
        };
        Ok(Source { stream, state: gone, attempt_id: self.attempt_id, deadline })
    }

    fn message(&self, router_id: &str, progress: &Progress) -> v1::GenerateRequest {
        let request = &self.hashed.request;
        v1::GenerateRequest {
            request_id: request.request_id.clone(),
            attempt_id: self.attempt_id,
            model: request.model.name.clone(),
            prompt_ids: request.prompt_ids.to_vec(),
            sampling: Some(request.sampling.clone()),
            choices: progress.choices().to_vec(),
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
            let message = tokio::select! {
                biased;
                message = self.stream.message() => message.map_err(|status| Broken::of(&status))?,
                () = given_up(&mut self.state) => return Err(silent()),
                () = tokio::time::sleep_until(self.deadline) => return Err(Broken::Late),
            };
            match message {
                Some(late) if late.attempt_id != self.attempt_id => {}
                message => return Ok(message),
            }
        }
    }
}

impl Broken {
    fn of(status: &tonic::Status) -> Self {
        // A status with a source was made on this side: the connection failed.
        let local = std::error::Error::source(status).is_some();
        let code = ErrorCode::of(status);
        if local || (code == ErrorCode::Unavailable && status.metadata().is_empty()) {
            return Self::Lost(status.message().to_owned());
        }
        Self::Refused(RouterError::of_status(status))
    }

    /// Nothing was done that another worker could not do.
    pub(super) fn retry_elsewhere(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Refused(error) => error.code.retry_elsewhere(),
            Self::Late => false,
        }
    }

    /// Short name for metrics.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Lost(_) => "lost",
            Self::Refused(error) => error.code.as_str(),
            Self::Late => "late",
        }
    }

    /// What the client is told when there is no other try.
    pub(super) fn into_error(self, tokens: usize) -> RouterError {
        match self {
            Self::Lost(why) if tokens == 0 => {
                let message =
                    format!("the worker could not be reached before the first token: {why}; try again");
                RouterError::new(ErrorCode::Unavailable, message).retry_after(RETRY_AFTER)
            }
            Self::Lost(why) => {
                let message = format!("the worker was lost after {tokens} tokens: {why}; try again");
                RouterError::new(ErrorCode::Unavailable, message)
            }
            Self::Refused(error) if error.code == ErrorCode::Overloaded => error.retry_after(RETRY_AFTER),
            Self::Refused(error) => error,
            Self::Late => RouterError::new(
                ErrorCode::DeadlineExceeded,
                format!("the request took longer than allowed; it ended after {tokens} tokens"),
            ),
        }
    }
}

async fn given_up(state: &mut watch::Receiver<HealthState>) {
    // The sender lives in the worker, which the booking holds; without it nobody can say more.
    if state.wait_for(|s| *s == HealthState::Gone).await.is_err() {
        std::future::pending::<()>().await;
    }
}

fn silent() -> Broken {
    Broken::Lost("it fell silent or hangs".to_owned())
}
