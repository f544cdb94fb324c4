//! What a router does besides answering.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thalweg_proto::ids::WorkerId;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};

use super::{ACQUAINTANCE, RouterState};
use crate::admission::AdmissionLimits;

/// A tick that comes so late says that this process was held up.
const STALL_MIN: Duration = Duration::from_millis(300);
/// How often time is let pass over the workers' health and the index.
const TICK: Duration = Duration::from_millis(100);
/// Blocks of the index swept at a tick: a million in ten seconds.
const SWEEP_BLOCKS: usize = 10_000;

/// Begins all of it; it ends with the set.
pub(super) fn spawn(tasks: &mut JoinSet<()>, state: &Arc<RouterState>, routers: watch::Receiver<usize>) {
    tasks.spawn(share_limits(Arc::clone(state), routers));
    tasks.spawn(admit(Arc::clone(state)));
    tasks.spawn(keep_time(Arc::clone(state)));
    tasks.spawn(end_acquaintance(Arc::clone(state)));
}

/// Divides the limits by the routers that live. No limiter is shared: each enforces its part.
async fn share_limits(state: Arc<RouterState>, mut routers: watch::Receiver<usize>) {
    let all = AdmissionLimits::from(&state.config.limits);
    loop {
        let live = *routers.borrow_and_update();
        state.routers.store(live, Ordering::Relaxed);
        state.gate.set_limits(all.shared_by(live));
        tracing::debug!(live, "limits are divided by live routers");
        if routers.changed().await.is_err() {
            return;
        }
    }
}

/// Lets waiting requests through whenever the workers' room changes.
async fn admit(state: Arc<RouterState>) {
    loop {
        state.workers.room_change().await;
        state.gate.pump(Instant::now());
    }
}

/// What waited for workers that did not come is told so.
async fn end_acquaintance(state: Arc<RouterState>) {
    sleep(ACQUAINTANCE).await;
    state.workers.room_changed();
}

/// Lets time pass: silence turns into suspicion, and what nobody waits for is tidied up.
async fn keep_time(state: Arc<RouterState>) {
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut named = Vec::new();
    let mut last = Instant::now();
    loop {
        ticks.tick().await;
        let now = Instant::now();
        // When this process itself was held up, reports wait unread: nobody fell silent.
        let late = now.saturating_duration_since(last).saturating_sub(TICK);
        state.workers.tick(now, if late > STALL_MIN { late } else { Duration::ZERO });
        last = now;
        state.replica.tidy(now, SWEEP_BLOCKS);
        name_silent_publishers(&state, now, &mut named);
    }
}

/// A worker that serves prompts and never tells of a block is configured wrongly: cache routing does nothing for it.
fn name_silent_publishers(state: &RouterState, now: Instant, named: &mut Vec<WorkerId>) {
    state.workers.set_index_deaf(!state.index.hears());
    for worker in state.workers.list().iter().filter(|worker| state.workers.is_index_silent(worker, now)) {
        if !named.contains(&worker.id) {
            tracing::info!(worker = %worker.id, "worker serves prompts but tells the cache index of no block");
            named.push(worker.id.clone());
        }
    }
}
