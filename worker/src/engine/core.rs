//! The engine without its thread: requests in, plans out, step outputs in, events out. Time is an argument.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use thalweg_cache_index::event::BlockEvent;

use super::EngineConfig;
use super::bookings::Bookings;
use super::channel::EventSender;
use super::handle::Refusal;
use super::inbox::Ticket;
use super::ledger::Ledger;
use super::live::{self, LiveRequest, Opened};
use super::load::{Counters, KvUsage, LoadSnapshot, Observations};
use super::rates::RateMeter;
use super::request::{ChoiceDelta, EngineEvent, EngineRequest};
use crate::plan::{StepMasks, StepOutput, StepPlan};
use crate::scheduler::{Scheduler, StepMismatch, Update};

/// All state of an engine but the device's.
#[derive(Debug)]
pub(super) struct EngineCore {
    scheduler: Scheduler,
    published_group: usize,
    block_tokens: usize,
    max_model_len: usize,
    requests: BTreeMap<Ticket, LiveRequest>,
    /// What steps have brought, with the time, before it is made into deliveries: the next step is planned first.
    brought: Vec<(Vec<Update>, Duration)>,
    deliveries: Vec<Delivery>,
    steps: u64,
    rates: RateMeter,
    bookings: Bookings,
    ledger: Ledger,
}

/// An event on its way out.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) ticket: Ticket,
    pub(super) to: Arc<EventSender>,
    pub(super) event: Result<EngineEvent, Refusal>,
    pub(super) is_last: bool,
}

impl EngineCore {
    pub(super) fn new(config: &EngineConfig) -> Self {
        let scheduler = config.scheduler();
        Self {
            published_group: scheduler.kv.published_group(),
            scheduler: Scheduler::new(scheduler),
            block_tokens: config.block_tokens,
            max_model_len: config.max_model_len,
            requests: BTreeMap::new(),
            brought: Vec::new(),
            deliveries: Vec::new(),
            steps: 0,
            rates: RateMeter::default(),
            bookings: Bookings::default(),
            ledger: Ledger::default(),
        }
    }

    /// Takes in a request that is within `RequestLimits`.
    pub(super) fn accept(
        &mut self,
        ticket: Ticket,
        request: EngineRequest,
        events: EventSender,
        now: Duration,
    ) {
        if let Some((router, booking)) = &request.booking {
            self.bookings.note(router, *booking);
        }
        let output_max = (request.max_tokens as usize).min(self.max_model_len - request.prompt.len());
        let Opened { mut live, sequences } = live::open(ticket, request, output_max, events, now);
        if live.is_over() {
            let event = live.event(SmallVec::new(), now, &mut self.ledger);
            self.deliveries.push(Delivery { ticket, to: live.events, event: Ok(event), is_last: true });
            return;
        }
        self.requests.insert(ticket, live);
        sequences.into_iter().for_each(|sequence| self.scheduler.add(sequence));
    }

    /// Ends a request early, if it is not over.
    pub(super) fn abort(&mut self, ticket: Ticket) {
        self.digest();
        let Some(mut live) = self.requests.remove(&ticket) else { return };
        let (event, keys) = live.abort(&mut self.ledger);
        keys.into_iter().for_each(|key| self.scheduler.abort(key));
        self.deliveries.push(Delivery { ticket, to: live.events, event: Ok(event), is_last: true });
    }

    /// Ends some choices of a request early, those that are not over; the others go on.
    pub(super) fn abort_choices(&mut self, ticket: Ticket, choices: &[u32], now: Duration) {
        self.digest();
        let Some(live) = self.requests.get_mut(&ticket) else { return };
        if live.are_all_open_in(choices) {
            return self.abort(ticket);
        }
        let (deltas, keys) = live.abort_choices(choices, &mut self.ledger);
        keys.into_iter().for_each(|key| self.scheduler.abort(key));
        if !deltas.is_empty() {
            self.deliver(ticket, deltas, now);
        }
    }

    /// The next step to submit, if there is one.
    pub(super) fn plan(&mut self, now: Duration) -> Option<StepPlan> {
        let planned = self.scheduler.plan()?;
        for started in &planned.started {
            if let Some(live) = self.requests.get_mut(&Ticket(started.key.request)) {
                live.start(started, self.block_tokens, now, &mut self.ledger);
            }
        }
        Some(planned.plan)
    }

    /// The oldest submitted step's output, to be told with the next `digest`.
    pub(super) fn complete(&mut self, output: StepOutput, now: Duration) -> Result<(), StepMismatch> {
        let completed = self.scheduler.complete(output)?;
        self.steps += 1;
        self.rates.record(completed.prefill_tokens, completed.decode_rows, completed.seconds);
        self.brought.push((completed.updates, now));
        Ok(())
    }

    /// Makes deliveries of what steps have brought.
    pub(super) fn digest(&mut self) {
        for (updates, at) in std::mem::take(&mut self.brought) {
            self.digest_step(updates, at);
        }
    }

    fn digest_step(&mut self, mut updates: Vec<Update>, now: Duration) {
        // Nearly in order as they come; choices of one request must be neighbours.
        updates.sort_unstable_by_key(|update| (update.key.request, update.key.choice));
        let mut updates = updates.into_iter().peekable();
        while let Some(request) = updates.peek().map(|update| update.key.request) {
            let ticket = Ticket(request);
            let news = std::iter::from_fn(|| updates.next_if(|update| update.key.request == request));
            let Some(live) = self.requests.get_mut(&ticket) else {
                news.for_each(drop);
                continue;
            };
            let (mut deltas, mut failure) = (SmallVec::new(), None);
            for mut update in news {
                failure = failure.or(update.failure.take());
                deltas.extend(live.delta(update, now, &mut self.ledger));
            }
            if let Some(reason) = failure {
                self.fail_one(ticket, Refusal::Grammar { reason });
                continue;
            }
            let delivery = live.deliver(ticket, deltas, now, &mut self.ledger);
            if delivery.is_last {
                self.requests.remove(&ticket);
            }
            self.deliveries.push(delivery);
        }
    }

    /// What may be drawn in the constrained rows of the oldest step in flight, once, if it has any.
    pub(super) fn masks(&mut self) -> Option<StepMasks> {
        self.scheduler.masks()
    }

    /// Ends one request, all its choices, with an error.
    fn fail_one(&mut self, ticket: Ticket, refusal: Refusal) {
        let Some(mut live) = self.requests.remove(&ticket) else { return };
        let (_, keys) = live.abort(&mut self.ledger);
        keys.into_iter().for_each(|key| self.scheduler.abort(key));
        self.deliveries.push(Delivery { ticket, to: live.events, event: Err(refusal), is_last: true });
    }

    /// Ends every request with an error; whatever it had streamed stays valid.
    pub(super) fn fail(&mut self, refusal: &Refusal) {
        self.digest();
        for (ticket, live) in std::mem::take(&mut self.requests) {
            self.deliveries.push(Delivery {
                ticket,
                to: live.events,
                event: Err(refusal.clone()),
                is_last: true,
            });
        }
        self.scheduler.forget_prefixes();
    }

    /// Events since the last call.
    pub(super) fn take_deliveries(&mut self) -> std::vec::Drain<'_, Delivery> {
        self.deliveries.drain(..)
    }

    /// Changes of the published blocks since the last call.
    pub(super) fn take_kv_events(&mut self) -> Vec<BlockEvent> {
        self.scheduler.take_kv_events()
    }

    /// Samples since the last call.
    pub(super) fn hand_over_observations(&mut self, to: &parking_lot::Mutex<Observations>) {
        if !self.ledger.has_no_samples() {
            self.ledger.hand_over(&mut to.lock());
        }
    }

    /// Load and counters now. Whether it drains is not known here.
    pub(super) fn snapshot(&self) -> LoadSnapshot {
        let load = self.scheduler.load();
        let usage = self.scheduler.usage(self.published_group);
        LoadSnapshot {
            draining: false,
            running: load.running as u32,
            waiting: load.waiting as u32,
            waiting_ahead: load.waiting_ahead as u32,
            prefill_tokens_ahead: load.prefill_tokens_ahead as u64,
            running_context_tokens: load.running_context_tokens as u64,
            kv: KvUsage { total: usage.total as u64, free: usage.free as u64, cached: usage.cached as u64 },
            steps: self.steps,
            rates: self.rates.rates(),
            booked: self.bookings.highest(),
            counters: Counters {
                preemptions: self.scheduler.preemptions(),
                invariant_violations: self.scheduler.violations(),
                ..self.ledger.counters
            },
        }
    }

    fn deliver(&mut self, ticket: Ticket, deltas: SmallVec<[ChoiceDelta; 1]>, now: Duration) {
        let Some(live) = self.requests.get_mut(&ticket) else { return };
        let delivery = live.deliver(ticket, deltas, now, &mut self.ledger);
        if delivery.is_last {
            self.requests.remove(&ticket);
        }
        self.deliveries.push(delivery);
    }
}
