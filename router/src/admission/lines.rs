//! Who waits for which workers: a line for each model and each adapter. Those of one fingerprint share their workers' room.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use thalweg_proto::code::ErrorCode;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::accounts::Full;
use super::gate::{Answer, RETRY_AFTER_MAX, RETRY_AFTER_MIN};
use super::queue::{FairQueue, Waiting};
use crate::error::RouterError;
use crate::models::{ModelEntry, Weights};

/// Weight of the newest interval between two admissions.
const INTERVAL_ALPHA: f64 = 0.1;

/// Name and what it stands for: whoever waits for one pool is not let through for the room of another.
pub(super) type LineKey = (Arc<str>, Weights);

/// Who waits at the other end of a place in the queue.
pub(super) struct Waiter {
    pub(super) answer: oneshot::Sender<Answer>,
    pub(super) deadline: Instant,
}

/// Requests of one model, or of one adapter.
pub(super) struct ModelLine {
    pub(super) model: Arc<ModelEntry>,
    pub(super) queue: FairQueue<Waiter>,
    /// Let through, but not booked on a worker yet: they count against the room of every line of the fingerprint.
    pub(super) unbooked: u32,
    /// Number of its last turn.
    last_turn: u64,
    last_admission: Option<Instant>,
    /// Seconds between two admissions while others waited.
    interval: f64,
}

/// All lines that are not empty, or whose requests are on their way to a worker.
#[derive(Default)]
pub(super) struct Lines {
    by_key: HashMap<LineKey, ModelLine>,
    /// Requests let through so far.
    turns: u64,
}

pub(super) fn key(model: &ModelEntry) -> LineKey {
    (model.name.as_str().into(), model.weights())
}

impl Lines {
    /// The line of a model, as it is now: its context may have changed with its workers.
    pub(super) fn of(&mut self, model: &Arc<ModelEntry>) -> &mut ModelLine {
        // A new line comes behind those that wait already.
        let last_turn = self.turns;
        let line = self.by_key.entry(key(model)).or_insert_with(|| ModelLine::new(model, last_turn));
        line.model = Arc::clone(model);
        line
    }

    pub(super) fn get_mut(&mut self, key: &LineKey) -> Option<&mut ModelLine> {
        self.by_key.get_mut(key)
    }

    /// Lines in which somebody waits.
    pub(super) fn waiting(&mut self) -> impl Iterator<Item = (&LineKey, &mut ModelLine)> {
        self.by_key.iter_mut().filter(|(_, line)| line.queue.len() > 0)
    }

    pub(super) fn longest(&self) -> Option<&ModelLine> {
        self.by_key.values().max_by_key(|line| line.queue.len())
    }

    /// Lets the next request through, if its line has room: the most urgent one; of even ones that whose line had its turn
    /// longest ago.
    pub(super) fn next(
        &mut self,
        rooms: &HashMap<LineKey, u32>,
        now: Instant,
    ) -> Option<(Arc<ModelEntry>, Waiting<Waiter>)> {
        let key = self.turn(rooms, now)?;
        let line = self.by_key.get_mut(&key)?;
        let waiting = line.queue.pop(now)?;
        self.turns += 1;
        line.last_turn = self.turns;
        line.admitted(now);
        Some((Arc::clone(&line.model), waiting))
    }

    fn turn(&self, rooms: &HashMap<LineKey, u32>, now: Instant) -> Option<LineKey> {
        let mut unbooked: HashMap<&Bytes, u32> = HashMap::new();
        for ((_, weights), line) in &self.by_key {
            *unbooked.entry(&weights.model).or_default() += line.unbooked;
        }
        let has_room =
            |key: &LineKey, room| unbooked.get(&key.1.model).is_some_and(|unbooked| unbooked < room);
        let due = |key: &LineKey| {
            let line = self.by_key.get(key)?;
            Some((line.queue.urgency(now)?, line.last_turn))
        };
        let with_room = rooms.iter().filter(|(key, room)| has_room(key, *room)).map(|(key, _)| key);
        with_room.filter_map(|key| Some((due(key)?, key))).min().map(|(_, key)| key.clone())
    }

    pub(super) fn no_longer_unbooked(&mut self, key: &LineKey) {
        if let Some(line) = self.by_key.get_mut(key) {
            line.unbooked = line.unbooked.saturating_sub(1);
        }
    }

    /// Forgets lines of which nothing is left.
    pub(super) fn tidy(&mut self) {
        self.by_key.retain(|_, line| line.queue.len() > 0 || line.unbooked > 0);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.by_key.values().all(|line| line.queue.len() == 0 && line.unbooked == 0)
    }
}

impl ModelLine {
    fn new(model: &Arc<ModelEntry>, last_turn: u64) -> Self {
        Self {
            model: Arc::clone(model),
            queue: FairQueue::default(),
            unbooked: 0,
            last_turn,
            last_admission: None,
            interval: 0.0,
        }
    }

    fn admitted(&mut self, now: Instant) {
        self.unbooked += 1;
        let before = self.last_admission.replace(now);
        if let Some(before) = before.filter(|_| self.queue.len() > 0) {
            let seconds = now.saturating_duration_since(before).as_secs_f64();
            self.interval += INTERVAL_ALPHA * (seconds - self.interval);
        }
    }

    pub(super) fn refusal(&self, full: Full) -> RouterError {
        let message = match full {
            Full::Queue => "too many requests wait in this router; try again later",
            Full::Tenant => "too many requests or tokens of this tenant are in this router; try again later",
        };
        let all_admitted = Duration::try_from_secs_f64(self.interval * self.queue.len() as f64);
        let after = all_admitted.unwrap_or(RETRY_AFTER_MAX).clamp(RETRY_AFTER_MIN, RETRY_AFTER_MAX);
        RouterError::new(ErrorCode::Overloaded, message).retry_after(after)
    }
}
