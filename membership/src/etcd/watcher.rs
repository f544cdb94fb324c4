//! Follows all keys: a list at a revision, then the events from the next one on, and a new list after every doubt.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::{CALL_TIMEOUT, MESSAGE_BYTES_MAX};
use super::keys;
use super::roster::{Malformed, Roster};
use super::rpc::event::EventType;
use super::rpc::kv_client::KvClient;
use super::rpc::watch_client::WatchClient;
use super::rpc::watch_request::RequestUnion;
use super::rpc::{
    RangeRequest, ResponseHeader, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use super::{Etcd, EtcdError};
use crate::MemberList;

/// First and longest pause after a failure.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// How often etcd is asked how far the watch has come.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);
/// A watch that does not even answer that is dead.
const SILENCE_MAX: Duration = Duration::from_secs(5);
/// A list now and then, whatever the watch says: bounds how long a fault of either side can go unnoticed.
const RELIST_EVERY: Duration = Duration::from_secs(60);
/// Requests on their way to a watch: its creation and a progress request; more are not sent.
const REQUESTS_MAX: usize = 2;

/// Where the members are told of.
pub(super) struct Watcher {
    pub(super) etcd: Etcd,
    pub(super) roster: Roster,
    pub(super) members: watch::Sender<MemberList>,
    pub(super) routers: watch::Sender<usize>,
}

/// An open watch.
struct Open {
    requests: mpsc::Sender<WatchRequest>,
    answers: Streaming<WatchResponse>,
    endpoint: String,
}

/// What the store was when we last heard of it.
#[derive(Clone, Copy)]
struct Seen {
    cluster: u64,
    revision: i64,
}

impl Watcher {
    /// For ever; failures change nothing of what is known.
    pub(super) async fn follow(mut self) {
        let (mut backoff, mut last_error, mut cluster) = (BACKOFF_FIRST, String::new(), None);
        let mut broke = false;
        loop {
            let began = Instant::now();
            let listed = self.list(&mut cluster, broke).await;
            let ended = match listed {
                Ok(seen) => self.follow_from(seen, &mut last_error).await,
                Err(error) => Err(error),
            };
            broke = ended.is_err();
            if let Err(error) = ended {
                self.trouble(&error, &mut last_error);
            }
            // A round that held for a while is no failure in a row.
            if began.elapsed() > SILENCE_MAX {
                backoff = BACKOFF_FIRST;
            }
            sleep(backoff.mul_f64(rand::random_range(0.5..1.0))).await;
            backoff = (2 * backoff).min(BACKOFF_MAX);
        }
    }

    /// Reads all keys at one revision; `again` when something had broken before.
    async fn list(&mut self, cluster: &mut Option<u64>, again: bool) -> Result<Seen, EtcdError> {
        let (key, range_end) = keys::range(&self.etcd.prefix);
        let range = RangeRequest { key, range_end };
        let listed = self.etcd.client.call("Range", CALL_TIMEOUT, |via| {
            let request = via.request(range.clone());
            let mut client = KvClient::new(via.channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            async move { client.range(request).await }
        });
        let listed = listed.await?;
        if again {
            self.etcd.counters.relisted();
        }
        let header = listed.header.unwrap_or_default();
        if cluster.replace(header.cluster_id).is_some_and(|before| before != header.cluster_id) {
            tracing::warn!(cluster_id = header.cluster_id, "etcd is another cluster than before");
        }
        let malformed = self.roster.replace(&listed.kvs);
        self.tell(malformed);
        Ok(Seen { cluster: header.cluster_id, revision: header.revision })
    }

    /// Applies events until the next list is due, which is Ok, or until the watch is of no use any more.
    async fn follow_from(&mut self, listed: Seen, last_error: &mut String) -> Result<(), EtcdError> {
        let mut open = self.open(listed.revision + 1).await?;
        let relist_at = Instant::now() + RELIST_EVERY.mul_f64(rand::random_range(0.75..1.25));
        let mut progress = interval(PROGRESS_EVERY);
        progress.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut seen, mut heard) = (listed, Instant::now());
        while Instant::now() < relist_at {
            tokio::select! {
                answer = timeout_at(heard + SILENCE_MAX, open.answers.message()) => {
                    heard = Instant::now();
                    let answer = open.answer(answer)?;
                    open.check(&mut seen, &answer)?;
                    self.recovered(last_error);
                    self.apply(&answer);
                }
                _ = progress.tick() => {
                    let ask = RequestUnion::ProgressRequest(WatchProgressRequest {});
                    // One that is still on its way asks the same.
                    let _ = open.requests.try_send(WatchRequest { request_union: Some(ask) });
                }
            }
        }
        Ok(())
    }

    /// Opens a watch on all keys. etcd answers its creation at once.
    async fn open(&self, start_revision: i64) -> Result<Open, EtcdError> {
        let (key, range_end) = keys::range(&self.etcd.prefix);
        let create = WatchCreateRequest { key, range_end, start_revision, progress_notify: true };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (requests, outbound) = mpsc::channel(REQUESTS_MAX);
        // The queue is empty.
        let _ = requests.try_send(create);
        let outbound = parking_lot::Mutex::new(Some(outbound));
        let endpoint = self.etcd.client.endpoint().to_owned();
        let opening = self.etcd.client.call("Watch", CALL_TIMEOUT, |via| {
            let outbound = outbound.lock().take();
            async move {
                // A second try with a new token has no queue any more; the next round makes one.
                let outbound = outbound.ok_or_else(|| tonic::Status::unavailable("the token has expired"))?;
                let request = via.request(ReceiverStream::new(outbound));
                let mut client = WatchClient::new(via.channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
                client.watch(request).await
            }
        });
        let answers = opening.await?;
        Ok(Open { requests, answers, endpoint })
    }

    fn apply(&mut self, answer: &WatchResponse) {
        let mut malformed = Vec::new();
        for event in &answer.events {
            let Some(kv) = &event.kv else { continue };
            match event.r#type() {
                EventType::Put => malformed.extend(self.roster.put(kv)),
                EventType::Delete => self.roster.delete(&kv.key),
            }
        }
        if !answer.events.is_empty() {
            self.tell(malformed);
        }
    }

    /// Tells watchers what has changed, and the log what could not be read.
    fn tell(&self, malformed: Vec<Malformed>) {
        for Malformed { worker, reason } in malformed {
            self.etcd.counters.malformed();
            tracing::warn!(worker, reason, "a worker's value in etcd cannot be read and is ignored");
        }
        let (members, routers) = (self.roster.members(), self.roster.routers());
        self.members.send_if_modified(|now| {
            let changed = *now != members;
            *now = members;
            changed
        });
        self.routers.send_if_modified(|now| std::mem::replace(now, routers) != routers);
    }

    fn recovered(&self, last_error: &mut String) {
        last_error.clear();
        if self.etcd.counters.watch_degraded(false) {
            let (workers, routers) = (self.members.borrow().len(), *self.routers.borrow());
            tracing::info!(workers, routers, "following the members in etcd");
        }
    }

    /// Each reason once, until things are well again.
    fn trouble(&self, error: &EtcdError, last_error: &mut String) {
        if let EtcdError::WatchEnded { endpoint, .. } = error {
            self.etcd.client.turn_from_endpoint(endpoint);
        }
        self.etcd.counters.watch_degraded(true);
        let reason = error.to_string();
        if reason != *last_error {
            let workers = self.members.borrow().len();
            tracing::warn!(
                reason,
                workers,
                "cannot follow the members in etcd, going on with the last known ones"
            );
            *last_error = reason;
        }
    }
}

impl Open {
    fn ended(&self, reason: impl Into<String>) -> EtcdError {
        EtcdError::WatchEnded { endpoint: self.endpoint.clone(), reason: reason.into() }
    }

    /// What was heard, if it is of use.
    fn answer(
        &self,
        answer: Result<Result<Option<WatchResponse>, tonic::Status>, tokio::time::error::Elapsed>,
    ) -> Result<WatchResponse, EtcdError> {
        match answer {
            Err(_) => Err(self.ended(format!("silent for {SILENCE_MAX:?}"))),
            Ok(Err(status)) => Err(self.ended(status.message())),
            Ok(Ok(None)) => Err(self.ended("closed by etcd")),
            Ok(Ok(Some(answer))) if answer.compact_revision != 0 => {
                Err(self.ended(format!("events before revision {} are gone", answer.compact_revision)))
            }
            Ok(Ok(Some(answer))) if answer.canceled => Err(self.ended(answer.cancel_reason)),
            Ok(Ok(Some(answer))) => Ok(answer),
        }
    }

    /// A store that is another one, or younger than we have seen it, was wiped or restored: its events are no
    /// continuation of what we know.
    fn check(&self, seen: &mut Seen, answer: &WatchResponse) -> Result<(), EtcdError> {
        let Some(ResponseHeader { cluster_id, revision, .. }) = answer.header else { return Ok(()) };
        if cluster_id != seen.cluster {
            return Err(self.ended("it is another cluster now"));
        }
        // What answers a watch's creation has been seen to tell a revision older than the list before it. The next answer tells.
        if answer.created {
            return Ok(());
        }
        if revision < seen.revision {
            return Err(self.ended(format!("it is at revision {revision} and was at {}", seen.revision)));
        }
        seen.revision = revision;
        Ok(())
    }
}
