//! One stream of a worker that brings the tokens of all requests of this router on it: a message and a wake-up for all that a
//! step has brought, in place of one for each request. A request that streams has its tokens put into its buffer from
//! here; its own task sleeps until something else happens to it.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::v1;
use thalweg_proto::v1::worker_client::WorkerClient;
use thalweg_serve::trust::TrustedChannel;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use super::buffer::Buffer;
use super::generation::GenerationEvent;
use super::progress::Progress;
use crate::error::RouterError;
use crate::workers::Worker;
use crate::workers::failures::Life;
use crate::workers::health::HealthState;

/// How workers say that they have channels.
const FEATURE: &str = "channel";
/// Between the end of a worker's channel and the next one: meanwhile each request has its own stream.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

/// The channels of all workers.
#[derive(Default)]
pub(super) struct Channels {
    by_life: Mutex<HashMap<Life, Arc<Channel>>>,
}

/// A worker's channel.
#[derive(Default)]
pub(super) struct Channel {
    /// What requests join it by, once the worker has said so.
    number: OnceLock<u64>,
    /// By attempt; None when the channel has ended.
    routes: Mutex<Option<HashMap<u64, Arc<Route>>>>,
}

/// Where the messages of one attempt go.
#[derive(Default)]
struct Route {
    state: Mutex<RouteState>,
    news: Notify,
}

#[derive(Default)]
struct RouteState {
    /// Not taken yet. Bounded by the request's max_tokens.
    waiting: VecDeque<v1::GenerateResponse>,
    relay: Option<Relay>,
    /// What the worker sent makes no sense.
    failed: Option<RouterError>,
    closed: bool,
}

/// What takes messages as they come.
struct Relay {
    progress: Progress,
    buffer: Arc<Buffer>,
}

/// One attempt's place in a channel, until it is dropped.
pub(super) struct Joined {
    channel: Arc<Channel>,
    attempt_id: u64,
    route: Arc<Route>,
}

/// Why a relay ended.
pub(super) enum Relayed {
    /// Every choice has finished.
    Finished,
    /// With nonsense.
    Failed(RouterError),
    /// The channel has ended, and with it whatever was still to come.
    Closed,
}

impl Channels {
    /// The worker's channel, if it is open; if it could be, it is being opened.
    pub(super) fn of(self: &Arc<Self>, worker: &Worker, router_id: &str) -> Option<Arc<Channel>> {
        if !worker.about.features.iter().any(|feature| feature == FEATURE) {
            return None;
        }
        let life = worker.life();
        let channel = Arc::clone(self.by_life.lock().entry(life.clone()).or_insert_with(|| {
            let channel = Arc::new(Channel::default());
            let request = v1::OpenChannelRequest { router_id: router_id.to_owned() };
            let read = Arc::clone(&channel).read(worker.client(), request);
            tokio::spawn(Arc::clone(self).keep(life, worker.watch_state(), read));
            channel
        }));
        channel.number.get().is_some().then_some(channel)
    }

    /// As long as the worker lives and answers.
    async fn keep(
        self: Arc<Self>,
        life: Life,
        mut state: watch::Receiver<HealthState>,
        read: impl Future<Output = Result<(), tonic::Status>>,
    ) {
        // An error means that the worker is forgotten.
        let ended = tokio::select! {
            ended = read => ended,
            _ = state.wait_for(|state| *state == HealthState::Gone) => Ok(()),
        };
        if let Err(status) = ended {
            tracing::debug!(worker = %life.0, %status, "a worker's channel broke");
        }
        if let Some(channel) = self.by_life.lock().get(&life) {
            channel.close();
        }
        sleep(REOPEN_PAUSE).await;
        self.by_life.lock().remove(&life);
    }
}

impl Channel {
    async fn read(
        self: Arc<Self>,
        mut client: WorkerClient<TrustedChannel>,
        request: v1::OpenChannelRequest,
    ) -> Result<(), tonic::Status> {
        let mut stream = client.open_channel(request).await?.into_inner();
        while let Some(v1::ChannelMessage { channel, responses }) = stream.message().await? {
            if channel != 0 {
                *self.routes.lock() = Some(HashMap::new());
                // It is told once.
                let _ = self.number.set(channel);
            }
            let routes = self.routes.lock();
            let Some(routes) = routes.as_ref() else { return Ok(()) };
            for response in responses {
                // Those of attempts that were given up are dropped.
                if let Some(route) = routes.get(&response.attempt_id) {
                    route.deliver(response);
                }
            }
        }
        Ok(())
    }

    fn close(&self) {
        let routes = self.routes.lock().take();
        for route in routes.into_iter().flatten().map(|(_, route)| route) {
            route.state.lock().closed = true;
            route.news.notify_one();
        }
    }

    /// A place for an attempt; None when the channel has ended.
    pub(super) fn join(self: Arc<Self>, attempt_id: u64) -> Option<Joined> {
        let route = Arc::new(Route::default());
        self.routes.lock().as_mut()?.insert(attempt_id, Arc::clone(&route));
        Some(Joined { channel: self, attempt_id, route })
    }
}

impl Route {
    fn deliver(&self, response: v1::GenerateResponse) {
        if self.state.lock().take(response) {
            self.news.notify_one();
        }
    }
}

impl RouteState {
    /// True when the attempt's task has something to do.
    fn take(&mut self, response: v1::GenerateResponse) -> bool {
        let Some(Relay { progress, buffer }) = &mut self.relay else {
            self.waiting.push_back(response);
            return true;
        };
        if self.failed.is_some() {
            return false;
        }
        match progress.take(response.deltas) {
            Ok(deltas) if deltas.is_empty() => false,
            Ok(deltas) => {
                let finished = progress.finished();
                if finished {
                    buffer.complete();
                }
                buffer.push(GenerationEvent::Deltas(deltas));
                finished
            }
            Err(error) => {
                self.failed = Some(error);
                true
            }
        }
    }
}

impl Joined {
    /// What the worker is to be told.
    pub(super) fn number(&self) -> u64 {
        self.channel.number.get().copied().unwrap_or(0)
    }

    /// The next message; None when the channel has ended.
    pub(super) async fn next(&self) -> Option<v1::GenerateResponse> {
        loop {
            {
                let mut state = self.route.state.lock();
                if let Some(response) = state.waiting.pop_front() {
                    return Some(response);
                }
                if state.closed {
                    return None;
                }
            }
            self.route.news.notified().await;
        }
    }

    /// From now on messages go into the buffer as they come, those that wait first.
    pub(super) fn relay(&self, progress: Progress, buffer: Arc<Buffer>) {
        let mut state = self.route.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        state.relay = Some(Relay { progress, buffer });
        for response in waiting {
            // Whoever begins a relay looks at it next.
            state.take(response);
        }
    }

    /// Takes back what `relay` was given. Messages wait again.
    pub(super) fn unrelay(&self) -> Option<Progress> {
        self.route.state.lock().relay.take().map(|relay| relay.progress)
    }

    /// Waits until a relay has nothing more to do.
    pub(super) async fn relayed(&self) -> Relayed {
        loop {
            {
                let mut state = self.route.state.lock();
                if let Some(error) = state.failed.take() {
                    return Relayed::Failed(error);
                }
                if state.relay.as_ref().is_none_or(|relay| relay.progress.finished()) {
                    return Relayed::Finished;
                }
                if state.closed {
                    return Relayed::Closed;
                }
            }
            self.route.news.notified().await;
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(routes) = self.channel.routes.lock().as_mut() {
            routes.remove(&self.attempt_id);
        }
    }
}
