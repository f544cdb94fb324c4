//! From worker to worker: places a request, and again elsewhere for as long as its journey may go on.

use std::time::Duration;

use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, timeout_at};

use super::attempt::Failed;
use super::broken::Broken;
use super::journey::Verdict;
use super::stage::{Hashed, Streaming};
use super::{Dispatcher, stopping};
use crate::admission::Permit;
use crate::error::RouterError;

/// Between a worker's refusal for want of room and the next try: some of its reports.
const ROOM_PAUSE: Duration = Duration::from_millis(50);

impl Dispatcher {
    /// Takes a request that was let through to its next tokens.
    pub(super) async fn carry(
        &self,
        mut hashed: Hashed,
        mut permit: Permit,
    ) -> Result<Streaming, RouterError> {
        loop {
            let alone = self.wait_for_probation(&hashed).await?;
            let failed = match self.place(hashed, permit)? {
                Ok(placed) => match placed.open(self.workers.router_id()).await {
                    Ok(streaming) => return Ok(streaming),
                    Err(failed) => *failed,
                },
                Err(unplaced) => {
                    // The worker that it was let through for is gone by now.
                    (hashed, permit) = (unplaced.hashed, self.gate.enter_again(unplaced.permit).await?);
                    continue;
                }
            };
            drop(alone);
            (hashed, permit) = self.again(failed).await?;
        }
    }

    /// Continues a begun answer elsewhere with every token that was received.
    pub(super) async fn resume(&self, mut failed: Failed) -> Result<Streaming, RouterError> {
        let lost_at = Instant::now();
        failed.hashed.full_since = None;
        let (hashed, permit) = self.again(failed).await?;
        let streaming = self.carry(hashed, permit).await?;
        self.metrics.resumes.resumed(lost_at.elapsed());
        Ok(streaming)
    }

    /// After a failure: whether it may go on, and if so the leave to do so.
    async fn again(&self, failed: Failed) -> Result<(Hashed, Permit), RouterError> {
        let Failed { mut hashed, permit, booking, broken } = failed;
        let worker = booking.worker();
        let mut most_strikes = 0;
        if broken.is_exit() {
            most_strikes = worker.exit(Instant::now());
        }
        if broken.is_exit() || broken.never_arrived() {
            // No new work until it reports again, so that this request does not come back to it at once.
            self.workers.lost(worker, Instant::now());
        }
        let life = (worker.id.clone(), worker.epoch);
        let verdict = hashed.journey.failed(&broken, life, most_strikes, self.limits);
        let worker = worker.id.clone();
        // It is not on that worker any more while it waits for another one.
        drop(booking);
        let reason = broken.reason();
        match verdict {
            Verdict::Retry => self.metrics.dispatch.retried(reason),
            Verdict::Resume => self.metrics.resumes.began(reason),
            Verdict::End(error) => return Err(error),
            Verdict::Guilty(error) => {
                tracing::warn!(
                    request = hashed.request.request_id.as_str(), %worker,
                    "prompt is refused from now on: three workers ended abnormally with it"
                );
                self.poison.lock().add(&hashed.request, Instant::now());
                return Err(error);
            }
        }
        // Another request with the same prompt may have been found guilty meanwhile.
        self.poison.lock().check(&hashed.request, Instant::now())?;
        let (request, tokens) = (hashed.request.request_id.as_str(), hashed.journey.progress.tokens());
        tracing::info!(request, %worker, reason, tokens, ?broken, "trying another worker");
        if broken.is_overload() {
            self.wait_for_room(&mut hashed, &broken).await?;
        }
        let permit = self.gate.enter_again(permit).await?;
        Ok((hashed, permit))
    }

    /// The worker's next reports say how full it is; until then the same pick would meet the same refusal.
    async fn wait_for_room(&self, hashed: &mut Hashed, broken: &Broken) -> Result<(), RouterError> {
        let tokens = hashed.journey.progress.tokens();
        let since = *hashed.full_since.get_or_insert_with(Instant::now);
        if since.elapsed() > self.queue_timeout {
            return Err(broken.clone().into_error(tokens));
        }
        timeout_at(hashed.request.deadline, sleep(ROOM_PAUSE))
            .await
            .map_err(|_| Broken::Late.into_error(tokens))
    }

    /// One at a time, if two workers in a row ended with it before it brought a token.
    async fn wait_for_probation(&self, hashed: &Hashed) -> Result<Option<SemaphorePermit<'_>>, RouterError> {
        if !hashed.journey.on_probation() {
            return Ok(None);
        }
        match timeout_at(hashed.request.deadline, self.probation.acquire()).await {
            Ok(Ok(permit)) => {
                self.poison.lock().check(&hashed.request, Instant::now())?;
                Ok(Some(permit))
            }
            Ok(Err(_closed)) => Err(stopping()),
            Err(_) => Err(Broken::Late.into_error(hashed.journey.progress.tokens())),
        }
    }
}
