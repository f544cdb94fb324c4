//! Requests whose prompt is suspected of ending workers: they wait for their turn and for calm, and are judged.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use thalweg_proto::code::ErrorCode;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::blame::{Blame, CALM, Charge, PROVING_TOKENS, STRIKES_MAX};
use super::broken::Broken;
use super::stage::{Hashed, Placed};
use super::{Dispatcher, RETRY_AFTER, stopping};
use crate::admission::Permit;
use crate::error::RouterError;
use crate::workers::Worker;
use crate::workers::failures::around;
use crate::workers::health::HealthState;
use crate::workers::in_flight::{OnWorker, PromptId};

/// How long copies of a suspected prompt are waited for: their prefill may take long, and they may be innocent.
const COPIES_MAX: Duration = Duration::from_secs(1);
const COPIES_POLL: Duration = Duration::from_millis(20);

/// A suspected prompt on its way to the tokens that clear it. Dropping it lets the next one go.
pub(super) struct Trial {
    pub(super) alone: bool,
    prompt: PromptId,
    blame: Arc<Mutex<Blame>>,
    _turns: (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>),
}

impl Placed {
    /// Takes in what it brought: it has proven itself by a few tokens, or by the last one, and with it its copies.
    pub(super) fn proves_itself(&mut self) {
        let progress = &self.hashed.journey.progress;
        let (tokens, finished) = (progress.tokens(), progress.finished());
        if self.unproven_from.take_if(|from| finished || tokens >= *from + PROVING_TOKENS).is_some() {
            self.booking.proven();
            if let Some(trial) = self.hashed.trial.take() {
                trial.blame.lock().clear(&trial.prompt);
            }
        }
    }
}

impl Dispatcher {
    /// Waits as long as its prompt may not go to a worker. The room that it was let through for is given back if it waits; it
    /// stays within its tenant's limits.
    pub(super) async fn wait_for_trial(
        &self,
        hashed: &Hashed,
        permit: &mut Permit,
    ) -> Result<Option<Trial>, RouterError> {
        loop {
            self.poison.lock().check(&hashed.prompt, Instant::now())?;
            let Some(suspicion) = self.blame.lock().suspicion(&hashed.prompt) else { return Ok(None) };
            permit.booked();
            let turn = take_turn(hashed, &suspicion.turn).await?;
            self.wait_for_copies(hashed).await?;
            let Some(suspicion) = self.blame.lock().still(&hashed.prompt, &suspicion.turn) else { continue };
            let mut alone = None;
            if suspicion.alone {
                alone = Some(take_turn(hashed, &self.alone).await?);
                self.wait_for_calm(hashed).await?;
                self.judge(hashed)?;
            }
            return Ok(Some(Trial {
                alone: alone.is_some(),
                prompt: hashed.prompt,
                blame: Arc::clone(&self.blame),
                _turns: (turn, alone),
            }));
        }
    }

    /// Copies of it that began side by side prove themselves, or end their workers, before another one is risked.
    async fn wait_for_copies(&self, hashed: &Hashed) -> Result<(), RouterError> {
        let patience = Instant::now() + COPIES_MAX;
        let unproven = |on: &OnWorker| on.prompt == hashed.prompt && !on.proven;
        while Instant::now() < patience && self.workers.list().iter().any(|w| w.runs(unproven)) {
            timeout_at(hashed.request.deadline, sleep(COPIES_POLL)).await.map_err(|_| late(hashed))?;
        }
        Ok(())
    }

    /// Until no worker of the model has failed for a while, which is not the same for any two routers: they saw the same failure,
    /// and one that fails next must be put down to one trial.
    async fn wait_for_calm(&self, hashed: &Hashed) -> Result<(), RouterError> {
        let (deadline, patience) = (hashed.request.deadline, Instant::now() + self.queue_timeout);
        let calm = CALM + CALM.mul_f64(rand::random::<f64>() / 2.0);
        while let Some(failed) = self.workers.last_failure(&hashed.request.model.fingerprint) {
            if failed.elapsed() >= calm {
                break;
            }
            if failed + calm > patience {
                let message = "workers end abnormally again and again; try again later";
                return Err(RouterError::new(ErrorCode::Unavailable, message).retry_after(RETRY_AFTER));
            }
            timeout_at(deadline, sleep_until(failed + calm)).await.map_err(|_| late(hashed))?;
        }
        Ok(())
    }

    /// An error if its prompt is guilty, which is refused from then on.
    fn judge(&self, hashed: &Hashed) -> Result<(), RouterError> {
        let charge = self.blame.lock().charge(&hashed.prompt);
        let Some(charge) = charge.filter(|charge| self.is_guilty(hashed, charge)) else { return Ok(()) };
        let workers: Vec<_> = charge.lives.iter().map(|(worker, _)| worker.as_str()).collect();
        tracing::warn!(
            request = hashed.request.request_id.as_str(),
            ?workers,
            "prompt is refused from now on: three workers ended abnormally with it"
        );
        self.poison.lock().add(hashed.prompt, Instant::now());
        self.blame.lock().clear(&hashed.prompt);
        let tokens = hashed.journey.progress.tokens();
        let message = format!(
            "{STRIKES_MAX} workers ended abnormally while they ran this request, which had {tokens} tokens; its prompt \
             is refused for some minutes"
        );
        Err(RouterError::new(ErrorCode::WorkerCrashed, message))
    }

    fn is_guilty(&self, hashed: &Hashed, charge: &Charge) -> bool {
        let fingerprint = &hashed.request.model.fingerprint;
        let others = |span| self.workers.failed_beside(fingerprint, &charge.lives, span);
        if charge.alone {
            return !others(around(charge.last, CALM));
        }
        let list = self.workers.list();
        let lives_on =
            |w: &&Arc<Worker>| w.about.fingerprint == *fingerprint && w.state() == HealthState::Ready;
        let (from, _) = around(charge.first, CALM);
        !others((from, Instant::now()))
            && !list.iter().filter(lives_on).any(|w| w.runs(|on| on.prompt == hashed.prompt))
            && list.iter().filter(lives_on).any(|w| w.since <= charge.first)
    }
}

async fn take_turn(hashed: &Hashed, turn: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, RouterError> {
    match timeout_at(hashed.request.deadline, Arc::clone(turn).acquire_owned()).await {
        Ok(Ok(turn)) => Ok(turn),
        Ok(Err(_closed)) => Err(stopping()),
        Err(_) => Err(late(hashed)),
    }
}

fn late(hashed: &Hashed) -> RouterError {
    Broken::Late.into_error(hashed.journey.progress.tokens())
}
