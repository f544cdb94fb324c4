//! From worker to worker: places a request, and again elsewhere for as long as its journey may go on.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};

use super::Dispatcher;
use super::attempt::Failed;
use super::broken::Broken;
use super::journey::Verdict;
use super::stage::{Hashed, Streaming};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::workers::Worker;

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
            hashed.trial = self.wait_for_trial(&hashed, &mut permit).await?;
            if permit.is_booked() {
                permit = self.gate.enter_again(permit).await?;
            }
            let failed = match self.place(hashed, permit)? {
                Ok(placed) => match placed.open(self.workers.router_id(), &self.metrics).await {
                    Ok(streaming) => return Ok(streaming),
                    Err(failed) => *failed,
                },
                Err(unplaced) => {
                    // The worker that it was let through for is gone by now.
                    (hashed, permit) = (unplaced.hashed, unplaced.permit);
                    permit.booked();
                    continue;
                }
            };
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

    /// After a failure: whether it may go on.
    async fn again(&self, failed: Failed) -> Result<(Hashed, Permit), RouterError> {
        let Failed { mut hashed, permit, booking, broken } = failed;
        let worker = booking.worker();
        let mut blamed = false;
        if broken.is_exit() {
            blamed = self.blame_for(worker, &hashed);
        }
        if broken.is_exit() || broken.never_arrived() {
            // No new work until it reports again, so that this request does not come back to it at once.
            self.workers.lost(worker, Instant::now());
        }
        hashed.trial = None;
        // Who leaves may not have reported it yet; all others refused too, or it would not have been asked twice.
        let no_room = broken.is_overload()
            || (broken.is_hand_over() && hashed.journey.has_tried(&worker.id, worker.epoch));
        if !no_room || hashed.journey.is_fruitful() {
            // One that refused it, or was never reached, has not had it: who had it before remains the one that failed.
            hashed.left_by.get_or_insert(broken.reason());
        }
        let verdict = hashed.journey.failed(&broken, worker.life(), blamed, self.limits);
        let worker = worker.id.clone();
        // It is not on that worker any more while it waits for another one.
        drop(booking);
        let reason = broken.reason();
        if let Verdict::End(error) = verdict {
            return Err(error);
        }
        let (request, tokens) = (hashed.request.request_id.as_str(), hashed.journey.progress.tokens());
        if broken.is_overload() {
            // One of many while workers are full.
            tracing::debug!(request, %worker, reason, tokens, ?broken, "trying another worker");
        } else {
            tracing::info!(request, %worker, reason, tokens, ?broken, "trying another worker");
        }
        if no_room {
            self.wait_for_room(&mut hashed, &broken).await?;
        }
        Ok((hashed, permit))
    }

    /// A worker ended abnormally: whether this request's prompt is among those that it is put down to.
    fn blame_for(&self, worker: &Worker, hashed: &Hashed) -> bool {
        // Held meanwhile, so that nobody goes on before the exit that it was in is known.
        let mut blame = self.blame.lock();
        let now = Instant::now();
        if let Some(in_flight) = worker.exit(now) {
            blame.exit(&worker.life(), &in_flight, now);
        }
        blame.is_blamed(&hashed.prompt, &worker.life())
    }

    /// The worker's next reports say how full it is; until then the same pick would meet the same refusal.
    async fn wait_for_room(&self, hashed: &mut Hashed, broken: &Broken) -> Result<(), RouterError> {
        let tokens = hashed.journey.progress.tokens();
        let since = *hashed.full_since.get_or_insert_with(|| {
            self.metrics.dispatch.waits_for_room();
            Instant::now()
        });
        // A begun answer is not given up for want of room.
        if since.elapsed() > self.queue_timeout && !hashed.journey.begun() {
            return Err(broken.clone().into_error(tokens));
        }
        timeout_at(hashed.request.deadline, sleep(ROOM_PAUSE))
            .await
            .map_err(|_| Broken::Late.into_error(tokens))
    }
}
