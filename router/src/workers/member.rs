//! One task per member: gets to know the worker behind the address, follows its load, and begins anew after every break.

use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use rand::RngExt;
use thalweg_membership::{GrpcAddress, MemberList};
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_serve::trust::TrustedChannel;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::connection::{self, ConnectError};
use super::tokenizers::TextSide;
use super::{Worker, Workers};

/// First and longest pause between two tries; the longest bounds how late a returning worker is seen.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);

impl Workers {
    /// Follows membership until `stop`: a task for each member, none for those that left.
    pub async fn follow(self: Arc<Self>, mut members: watch::Receiver<MemberList>, stop: CancellationToken) {
        let mut tasks = JoinSet::new();
        let mut listed: HashMap<GrpcAddress, CancellationToken> = HashMap::new();
        loop {
            let list = members.borrow_and_update().clone();
            self.listed(&list, Instant::now());
            listed.retain(|address, left| {
                let stays = list.iter().any(|m| m.address == *address);
                if !stays {
                    left.cancel();
                }
                stays
            });
            for member in list.iter() {
                listed.entry(member.address.clone()).or_insert_with(|| {
                    let left = stop.child_token();
                    tasks.spawn(follow_member(Arc::clone(&self), member.address.clone(), left.clone()));
                    left
                });
            }
            tokio::select! {
                () = stop.cancelled() => break,
                changed = members.changed() => if changed.is_err() { stop.cancelled().await },
                Some(_) = tasks.join_next(), if !tasks.is_empty() => {}
            }
            if stop.is_cancelled() {
                break;
            }
        }
        tasks.shutdown().await;
    }
}

/// Until the member left the list and its report stream has ended.
async fn follow_member(workers: Arc<Workers>, address: GrpcAddress, left: CancellationToken) {
    let mut backoff = BACKOFF_FIRST;
    let mut last_error = String::new();
    let channel = match connection::channel(&address, workers.connect_timeout, &workers.trust) {
        Ok(channel) => channel,
        Err(error) => return tracing::error!(%address, %error, "member cannot be used"),
    };
    while !left.is_cancelled() {
        match get_to_know(&workers, &address, &channel).await {
            Ok(worker) => {
                (backoff, last_error) = (BACKOFF_FIRST, String::new());
                follow_load(&workers, &worker).await;
                workers.lost(&worker, Instant::now());
            }
            Err(error) => {
                // A worker that is still starting would fill the log: each reason once.
                let reason = error.to_string();
                if reason != last_error {
                    tracing::info!(%address, reason, "worker is not usable yet");
                    last_error = reason;
                }
            }
        }
        tokio::select! {
            () = left.cancelled() => {}
            () = tokio::time::sleep(jitter(backoff)) => backoff = (2 * backoff).min(BACKOFF_MAX),
        }
    }
    workers.remove(&address);
}

async fn get_to_know(
    workers: &Workers,
    address: &GrpcAddress,
    channel: &TrustedChannel,
) -> Result<Arc<Worker>, ConnectError> {
    let mut client = connection::client(channel.clone());
    let about = connection::describe(&mut client, workers.connect_timeout).await?;
    let text = workers.tokenizers.ensure(&about, &mut client).await?;
    let worker = workers.admit(about, text, address, client)?;
    Ok(worker)
}

impl Workers {
    fn admit(
        &self,
        about: v1::DescribeResponse,
        text: Arc<TextSide>,
        address: &GrpcAddress,
        client: WorkerClient<TrustedChannel>,
    ) -> Result<Arc<Worker>, ConnectError> {
        let (id, epoch) = (WorkerId::new(about.worker_id.as_str()), WorkerEpoch(about.epoch));
        // Before the worker can be picked: what another life held must not match.
        let holder = self.replica.enroll(&id, epoch);
        let worker = Worker::new(about, text, address.clone(), client, holder, Instant::now());
        let worker = self.register(worker).ok_or(ConnectError::Description(
            "another address already leads to this very worker; list it once",
        ))?;
        self.warn_of_conflicts(&worker);
        Ok(worker)
    }
}

async fn follow_load(workers: &Workers, worker: &Worker) {
    let watch =
        worker.client().watch_load(v1::WatchLoadRequest { router_id: workers.router_id.clone() }).await;
    let mut reports = match watch {
        Ok(reports) => reports.into_inner(),
        Err(status) => return tracing::debug!(worker = %worker.id, %status, "load cannot be followed"),
    };
    loop {
        match reports.message().await {
            // A restarted worker answers under a new epoch: get to know it anew.
            Ok(Some(report)) if report.epoch != worker.epoch.0 => return,
            Ok(Some(report)) => workers.report(worker, report, Instant::now()),
            Ok(None) => return,
            Err(status) => return tracing::debug!(worker = %worker.id, %status, "load stream broke"),
        }
    }
}

/// Between half of it and all of it, so that routers do not return together.
fn jitter(backoff: Duration) -> Duration {
    backoff.mul_f64(rand::rng().random_range(0.5..1.0))
}
