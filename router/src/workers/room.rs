//! How much more a worker would take: what it takes beyond waits here, where it can still go elsewhere.

use std::sync::Arc;

use super::Worker;
use super::health::HealthState;
use super::load::LoadView;
use crate::models::ModelEntry;
use crate::policy::Speed;

/// Prefill that may wait at a worker whose slots are all taken, in seconds: enough that it never idles.
const PREFILL_AHEAD_SECONDS_MAX: f64 = 1.0;
/// Slots per request that may wait at such a worker: some are there when slots come free in one step, and yet short
/// prompts, whose prefill is next to nothing, do not pile up where nobody can refuse or move them.
const SLOTS_PER_WAITING: u32 = 4;

/// What a model's workers would take together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Room {
    /// So many requests more, perhaps 0.
    Requests(u32),
    /// None at present: why, and what to do.
    NoWorker(String),
    /// None any more: workers of this name have other weights now.
    OtherWeights(String),
}

/// Requests that one worker would take now.
pub(crate) fn of_worker(load: &LoadView, max_num_seqs: u32, speed: &Speed) -> u32 {
    let taken = load.ahead();
    if taken < max_num_seqs {
        return max_num_seqs - taken;
    }
    let has_few_waiting = taken - max_num_seqs < (max_num_seqs / SLOTS_PER_WAITING).max(1);
    let prefill = speed.prefill_seconds(load.prefill_tokens_ahead as f64);
    u32::from(has_few_waiting && prefill < PREFILL_AHEAD_SECONDS_MAX)
}

impl Worker {
    /// Would take at least one request now.
    pub fn has_room(&self) -> bool {
        of_worker(&self.load(), self.about.max_num_seqs, &self.speed()) > 0
    }
}

pub(super) fn of_model(workers: &[Arc<Worker>], model: &ModelEntry) -> Room {
    let serving = workers.iter().filter(|w| w.serves(model));
    let (mut room, mut states) = (0u32, Vec::new());
    for worker in serving {
        let state = worker.state();
        states.push(state);
        if state == HealthState::Ready {
            room = room.saturating_add(of_worker(&worker.load(), worker.about.max_num_seqs, &worker.speed()));
        }
    }
    let may_serve = |s: &HealthState| matches!(s, HealthState::Ready | HealthState::Suspect);
    if states.iter().any(may_serve) {
        return Room::Requests(room);
    }
    let has_successor = |w: &Arc<Worker>| {
        w.offers().get(&model.name).is_some_and(|weights| *weights != model.weights())
            && may_serve(&w.state())
    };
    if states.is_empty() && workers.iter().any(has_successor) {
        return Room::OtherWeights(format!(
            "every worker with the weights of {} that this request began with is gone, and those that are left have \
             other weights; send the request again",
            model.described()
        ));
    }
    Room::NoWorker(reason(model, &states))
}

fn reason(model: &ModelEntry, states: &[HealthState]) -> String {
    let count = |state| states.iter().filter(|s| **s == state).count();
    let (gone, draining) = (count(HealthState::Gone), count(HealthState::Draining));
    let what = model.described();
    match (gone, draining) {
        (0, 0) if model.adapter.is_some() => format!(
            "no worker has {what} any more; start one with --lora-modules {}=FOLDER or try again later",
            model.name
        ),
        (0, 0) => format!("no worker serves {what} at present; start one or try again later"),
        _ => {
            format!(
                "no worker can take requests for {what}: {gone} lost, {draining} draining; try again later"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::models::AdapterOf;
    use crate::test_support;

    #[test]
    fn a_worker_takes_its_slots_and_a_few_with_a_second_of_prefill() {
        let check = |running, waiting_ahead, prefill_tokens_ahead, expected| {
            let load = LoadView { running, waiting_ahead, prefill_tokens_ahead, ..LoadView::default() };
            // 1,000 prompt tokens a second, as assumed of an unknown worker.
            assert_eq!(of_worker(&load, 8, &Speed::default()), expected, "{load:?}");
        };
        check(0, 0, 0, 8);
        check(5, 2, 100_000, 1);
        check(8, 0, 0, 1);
        check(8, 1, 999, 1);
        check(8, 1, 1_000, 0);
        check(8, 2, 0, 0);
        check(6, 9, 1_000, 0);
        check(u32::MAX, 1, 5_000, 0);
    }

    #[test]
    fn a_model_without_workers_says_why() {
        use HealthState::{Draining, Gone};
        let mut model = Arc::into_inner(test_support::entry("m", false)).expect("not shared");
        let check = |model: &ModelEntry, states: &[HealthState], part: &str| {
            let reason = reason(model, states);
            assert!(reason.contains(part), "{reason}");
        };
        check(&model, &[], "no worker serves m");
        check(&model, &[Gone, Gone, Draining], "2 lost, 1 draining");
        model.adapter = Some(AdapterOf { base: "base".to_owned(), fingerprint: Bytes::new() });
        check(
            &model,
            &[],
            "no worker has adapter m of base any more; start one with --lora-modules m=FOLDER",
        );
        check(&model, &[Draining], "adapter m of base: 0 lost, 1 draining");
    }
}
