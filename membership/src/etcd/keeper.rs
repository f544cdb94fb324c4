//! The task behind a registration: grant, write, renew, and all of it anew after a loss.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::{CALL_TIMEOUT, Client};
use super::lease::Lease;
use super::record::Record;
use super::rpc::kv_client::KvClient;
use super::rpc::lease_client::LeaseClient;
use super::rpc::{
    KeyValue, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, PutRequest, RangeRequest,
};
use super::{Etcd, EtcdError};

/// First and longest pause after a failure.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// What the registration's owner wants to stand in etcd.
#[derive(Clone)]
pub(super) struct Wanted {
    pub(super) record: Record,
    pub(super) gone: bool,
}

/// Keeps one key in etcd.
pub(super) struct Keeper {
    etcd: Etcd,
    key: Vec<u8>,
    wants: watch::Receiver<Wanted>,
    /// What etcd has been seen to hold.
    reports: watch::Sender<Option<Record>>,
    last_error: String,
    /// Somebody else writes our key, and that has been said.
    is_foreign: bool,
}

/// What became of a lease.
enum End {
    Lost,
    Gone,
}

impl Keeper {
    pub(super) fn new(
        etcd: Etcd,
        key: Vec<u8>,
        wants: watch::Receiver<Wanted>,
        reports: watch::Sender<Option<Record>>,
    ) -> Self {
        Self { etcd, key, wants, reports, last_error: String::new(), is_foreign: false }
    }

    /// Until nobody wants the key any more.
    pub(super) async fn keep(mut self) {
        let mut backoff = BACKOFF_FIRST;
        loop {
            let granted = tokio::select! {
                granted = self.grant() => granted,
                () = gone(self.wants.clone()) => return,
            };
            match granted {
                Ok(lease) => {
                    backoff = BACKOFF_FIRST;
                    match self.hold(lease).await {
                        End::Lost => self.lost(),
                        End::Gone => return,
                    }
                }
                Err(error) => {
                    self.trouble(&error);
                    pause(&mut backoff, &self.wants).await;
                }
            }
        }
    }

    /// Keeps the key under this lease.
    async fn hold(&mut self, mut lease: Lease) -> End {
        let mut backoff = BACKOFF_FIRST;
        let mut is_written = false;
        loop {
            let wanted = self.wants.borrow_and_update().clone();
            if wanted.gone {
                self.revoke(lease.id).await;
                return End::Gone;
            }
            if !is_written {
                match self.put(&lease, &wanted.record).await {
                    Ok(()) => {
                        (is_written, backoff) = (true, BACKOFF_FIRST);
                        self.written(wanted.record, &lease);
                    }
                    Err(PutError::LeaseLost) => return End::Lost,
                    Err(PutError::Etcd(error)) => self.trouble(&error),
                }
            }
            let retry = backoff;
            tokio::select! {
                // The sender lives in the registration, whose drop ends this task.
                _ = self.wants.changed() => is_written = false,
                () = sleep(retry), if !is_written => backoff = (2 * backoff).min(BACKOFF_MAX),
                () = sleep_until(lease.next_try()) => match self.renew(&mut lease).await {
                    Renewal::Granted => is_written &= self.is_there(&lease).await,
                    Renewal::Failed => {}
                    Renewal::Lost => return End::Lost,
                }
            }
        }
    }

    fn written(&mut self, record: Record, lease: &Lease) {
        if self.reports.borrow().as_ref() != Some(&record) {
            let key = String::from_utf8_lossy(&self.key);
            tracing::info!(%key, address = record.address, draining = record.draining, "registered in etcd");
        }
        self.reports.send_replace(Some(record));
        self.recovered(lease);
    }

    fn recovered(&mut self, lease: &Lease) {
        self.last_error.clear();
        if self.etcd.counters.lease_degraded(lease.overdue(Instant::now())) {
            tracing::info!("the lease in etcd is kept again");
        }
    }

    fn lost(&mut self) {
        self.etcd.counters.lease_lost();
        self.reports.send_replace(None);
        let key = String::from_utf8_lossy(&self.key);
        tracing::warn!(%key, "the lease in etcd was lost, registering anew");
    }

    /// Each reason once, until things are well again: etcd may be away for hours.
    fn trouble(&mut self, error: &EtcdError) {
        self.etcd.counters.lease_degraded(true);
        let reason = error.to_string();
        if reason != self.last_error {
            tracing::warn!(reason, "the registration in etcd cannot be kept up, trying on");
            self.last_error = reason;
        }
    }
}

/// What etcd said to a renewal.
enum Renewal {
    Granted,
    /// Nothing is known; the lease may live.
    Failed,
    Lost,
}

enum PutError {
    LeaseLost,
    Etcd(EtcdError),
}

/// The calls. None takes longer than a renewal may, so that a lease is never late because of another call.
impl Keeper {
    fn client(&self) -> &Client {
        &self.etcd.client
    }

    async fn grant(&self) -> Result<Lease, EtcdError> {
        let ttl = self.etcd.lease_ttl.as_secs() as i64;
        let sent = Instant::now();
        let grant = self.client().call("LeaseGrant", CALL_TIMEOUT, |via| async move {
            LeaseClient::new(via.channel.clone())
                .lease_grant(via.request(LeaseGrantRequest { ttl, id: 0 }))
                .await
        });
        let grant = grant.await?;
        Ok(Lease::granted(grant.id, seconds(grant.ttl), sent))
    }

    /// One stream for each renewal: nothing of an older one, broken or slow, is in its way.
    async fn renew(&mut self, lease: &mut Lease) -> Renewal {
        let (id, sent) = (lease.id, Instant::now());
        let renewal = self.client().call("LeaseKeepAlive", lease.try_limit(sent), |via| async move {
            let request = via.request(tokio_stream::once(LeaseKeepAliveRequest { id }));
            let mut answers =
                LeaseClient::new(via.channel.clone()).lease_keep_alive(request).await?.into_inner();
            let answer = answers.message().await?;
            answer.map(tonic::Response::new).ok_or_else(|| tonic::Status::unavailable("no answer"))
        });
        match renewal.await {
            Ok(answer) if answer.ttl <= 0 => Renewal::Lost,
            Ok(answer) => {
                lease.renewed(seconds(answer.ttl), sent);
                if !self.reports.borrow().is_none() {
                    self.recovered(lease);
                }
                Renewal::Granted
            }
            Err(error) => {
                let now = Instant::now();
                lease.failed(now);
                if lease.overdue(now) {
                    self.trouble(&error);
                } else {
                    tracing::debug!(%error, "lease not renewed, trying again before it lapses");
                }
                Renewal::Failed
            }
        }
    }

    async fn put(&self, lease: &Lease, record: &Record) -> Result<(), PutError> {
        let limit = lease.try_limit(Instant::now());
        let put = PutRequest { key: self.key.clone(), value: record.to_json(), lease: lease.id };
        let put = self.client().call("Put", limit, |via| {
            let request = via.request(put.clone());
            async move { KvClient::new(via.channel).put(request).await }
        });
        match put.await {
            Ok(_) => Ok(()),
            Err(EtcdError::Call { reason, .. }) if reason.contains("requested lease not found") => {
                Err(PutError::LeaseLost)
            }
            Err(error) => Err(PutError::Etcd(error)),
        }
    }

    /// Whether the key needs no writing. One that somebody else wrote is left alone: two that write in turn would help
    /// nobody.
    async fn is_there(&mut self, lease: &Lease) -> bool {
        let limit = lease.try_limit(Instant::now());
        let range = RangeRequest { key: self.key.clone(), range_end: Vec::new() };
        let found = self.client().call("Range", limit, |via| {
            let request = via.request(range.clone());
            async move { KvClient::new(via.channel).range(request).await }
        });
        let Ok(found) = found.await else { return true };
        let wanted = self.wants.borrow().record.to_json();
        match found.kvs.first() {
            None => false,
            Some(KeyValue { lease: owner, value, .. }) if *owner == lease.id => *value == wanted,
            Some(_) => {
                if !std::mem::replace(&mut self.is_foreign, true) {
                    let key = String::from_utf8_lossy(&self.key);
                    tracing::warn!(
                        %key,
                        "somebody else wrote this process's key in etcd; give each worker a --worker-id, and each router a \
                         --router-id, of its own"
                    );
                }
                true
            }
        }
    }

    /// The key goes with its lease; a lease that is not there any more has taken the key along already.
    async fn revoke(&self, id: i64) {
        let mut backoff = BACKOFF_FIRST;
        loop {
            let revoked = self.client().call("LeaseRevoke", CALL_TIMEOUT, |via| async move {
                LeaseClient::new(via.channel.clone())
                    .lease_revoke(via.request(LeaseRevokeRequest { id }))
                    .await
            });
            match revoked.await {
                Ok(_) => return,
                Err(EtcdError::Call { reason, .. }) if reason.contains("requested lease not found") => return,
                // Whoever waits for this sets the limit.
                Err(error) => tracing::debug!(%error, "lease not revoked, trying again"),
            }
            sleep(backoff).await;
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
    }
}

async fn gone(mut wants: watch::Receiver<Wanted>) {
    // A dropped sender ends the task itself.
    let _ = wants.wait_for(|wanted| wanted.gone).await;
}

async fn pause(backoff: &mut Duration, wants: &watch::Receiver<Wanted>) {
    tokio::select! {
        () = sleep(backoff.mul_f64(rand::random_range(0.5..1.0))) => {}
        () = gone(wants.clone()) => {}
    }
    *backoff = (2 * *backoff).min(BACKOFF_MAX);
}

fn seconds(ttl: i64) -> Duration {
    Duration::from_secs(ttl.max(1) as u64)
}
