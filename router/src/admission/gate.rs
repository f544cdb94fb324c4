//! The bounded queue in front of the workers. Whoever may go is woken alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::code::ErrorCode;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};

use super::accounts::{Accounts, AdmissionLimits, Full, Usage};
use super::lines::{LineKey, Lines, ModelLine, Waiter, key};
use super::queue::{Class, Waiting};
use crate::error::RouterError;
use crate::models::ModelEntry;
use crate::workers::Room;

/// Bounds of the Retry-After of a refusal.
pub(super) const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
pub(super) const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);

/// What asks to go.
#[derive(Clone)]
pub struct Ask {
    /// The model whose workers must have room.
    pub model: Arc<ModelEntry>,
    /// Who pays.
    pub tenant: Arc<str>,
    /// What that one may have at a time, where it is not what all may.
    pub tenant_limit: Option<Usage>,
    /// Lower goes earlier.
    pub priority: i32,
    /// Prompt and expected output.
    pub tokens: u64,
    /// When it no longer wants to wait.
    pub deadline: Instant,
}

type RoomOf = dyn Fn(&ModelEntry) -> Room + Send + Sync;
pub(super) type Answer = Result<Permit, RouterError>;

/// Lets requests through as workers have room for them. Its queue is bounded: above the limits a request is refused.
pub struct Gate {
    room_of: Box<RoomOf>,
    queue_timeout: Duration,
    last_number: AtomicU64,
    inner: Mutex<Inner>,
}

struct Inner {
    accounts: Accounts,
    lines: Lines,
}

impl Gate {
    /// A gate to workers whose room `room_of` tells.
    pub fn new(
        limits: AdmissionLimits,
        queue_timeout: Duration,
        room_of: impl Fn(&ModelEntry) -> Room + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            room_of: Box::new(room_of),
            queue_timeout,
            last_number: AtomicU64::new(0),
            inner: Mutex::new(Inner { accounts: Accounts::new(limits), lines: Lines::default() }),
        })
    }

    /// Waits for room. Refused at once when full, and when no worker is left; dropping the future leaves the queue.
    pub async fn enter(self: &Arc<Self>, ask: Ask) -> Result<Permit, RouterError> {
        let place = self.queue_up(ask, Instant::now())?;
        self.wait(place).await
    }

    /// One that was let through has lost its worker: it waits for room ahead of new ones. No limit keeps it out, so that
    /// its kind is bounded by what was let through; and it waits for as long as a worker may come back.
    pub async fn enter_again(self: &Arc<Self>, permit: Permit) -> Result<Permit, RouterError> {
        let place = self.queue_up_again(permit, Instant::now());
        self.wait(place).await
    }

    /// The refusal that any request would get now: found out before anything is spent on it.
    pub fn refuse_when_full(&self) -> Result<(), RouterError> {
        let inner = self.inner.lock();
        if !inner.accounts.full() {
            return Ok(());
        }
        let longest = inner.lines.longest();
        longest.map_or(Ok(()), |line| Err(line.refusal(Full::Queue)))
    }

    /// Holds new requests against other limits from now on.
    pub fn set_limits(&self, limits: AdmissionLimits) {
        self.inner.lock().accounts.set_limits(limits);
    }

    async fn wait(self: &Arc<Self>, mut place: Place) -> Answer {
        self.pump(Instant::now());
        let patience = Instant::now() + self.queue_timeout;
        match timeout_at(place.ask.deadline.min(patience), &mut place.answer).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(RouterError::new(ErrorCode::Internal, "the admission queue dropped a request")),
            Err(_) => Err(self.too_late(&place.ask.model)),
        }
    }

    fn too_late(&self, model: &ModelEntry) -> RouterError {
        let (code, message) = match (self.room_of)(model) {
            Room::NoWorker(reason) | Room::OtherWeights(reason) => {
                (ErrorCode::Unavailable, format!("none came back for as long as may be waited: {reason}"))
            }
            Room::Requests(_) => {
                let what = model.described();
                let message = format!("the request waited for a worker of {what} for longer than allowed");
                (ErrorCode::DeadlineExceeded, message)
            }
        };
        RouterError::new(code, message).retry_after(RETRY_AFTER_MIN)
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.inner.lock().accounts.queued().requests
    }

    /// Lets through whoever fits, and sends away those for whom no worker is left. To be called whenever room changes.
    pub fn pump(self: &Arc<Self>, now: Instant) {
        // Answers that nobody takes give their permits back, for which the lock must be free.
        let mut refused = Vec::new();
        let mut inner = self.inner.lock();
        let rooms = self.send_away(&mut inner, &mut refused);
        while let Some((model, waiting)) = inner.lines.next(&rooms, now) {
            inner.accounts.leave_queue(waiting.tokens);
            let (answer, permit) = self.permit(&model, waiting);
            refused.extend(answer.send(Ok(permit)).err());
        }
        inner.lines.tidy();
        drop(inner);
        drop(refused);
    }

    /// Sends away those for whom no worker is left; the room of the other lines.
    fn send_away(&self, inner: &mut Inner, refused: &mut Vec<Answer>) -> HashMap<LineKey, u32> {
        let Inner { accounts, lines } = inner;
        let mut rooms = HashMap::new();
        for (key, line) in lines.waiting() {
            let (sent_away, reason) = match (self.room_of)(&line.model) {
                Room::NoWorker(reason) => (line.queue.drain_new(), reason),
                Room::OtherWeights(reason) => {
                    (line.queue.drain_new().into_iter().chain(line.queue.drain_again()).collect(), reason)
                }
                Room::Requests(room) => {
                    rooms.insert(key.clone(), room);
                    continue;
                }
            };
            for waiting in sent_away {
                accounts.leave_queue(waiting.tokens);
                accounts.leave(&waiting.tenant, waiting.tokens);
                let error = RouterError::new(ErrorCode::Unavailable, reason.clone());
                refused.extend(waiting.payload.answer.send(Err(error.retry_after(RETRY_AFTER_MIN))).err());
            }
        }
        rooms
    }

    fn queue_up(self: &Arc<Self>, ask: Ask, now: Instant) -> Result<Place, RouterError> {
        let mut inner = self.inner.lock();
        let Inner { accounts, lines } = &mut *inner;
        let line = lines.of(&ask.model);
        if let Err(full) = accounts.enter(&ask.tenant, ask.tokens, ask.tenant_limit) {
            return Err(line.refusal(full));
        }
        Ok(self.push(line, ask, Class::New, now))
    }

    fn queue_up_again(self: &Arc<Self>, mut permit: Permit, now: Instant) -> Place {
        let mut inner = self.inner.lock();
        permit.accounted = false;
        if !std::mem::replace(&mut permit.booked, true) {
            inner.lines.no_longer_unbooked(&key(&permit.ask.model));
        }
        let ask = permit.ask.clone();
        let Inner { accounts, lines } = &mut *inner;
        accounts.enter_again(ask.tokens);
        let line = lines.of(&ask.model);
        self.push(line, ask, Class::Again, now)
    }

    fn push(self: &Arc<Self>, line: &mut ModelLine, ask: Ask, class: Class, now: Instant) -> Place {
        let number = self.last_number.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, answer) = oneshot::channel();
        line.queue.push(Waiting {
            number,
            tenant: Arc::clone(&ask.tenant),
            priority: ask.priority,
            tokens: ask.tokens,
            since: now,
            class,
            payload: Waiter { answer: sender, deadline: ask.deadline },
        });
        Place { gate: Arc::clone(self), ask, number, answer }
    }

    fn permit(
        self: &Arc<Self>,
        model: &Arc<ModelEntry>,
        waiting: Waiting<Waiter>,
    ) -> (oneshot::Sender<Answer>, Permit) {
        let Waiter { answer, deadline } = waiting.payload;
        let ask = Ask {
            model: Arc::clone(model),
            tenant: waiting.tenant,
            // Held against it when it came.
            tenant_limit: None,
            priority: waiting.priority,
            tokens: waiting.tokens,
            deadline,
        };
        (answer, Permit { gate: Arc::clone(self), ask, booked: false, accounted: true })
    }
}

/// A place in the queue. Dropping it leaves the queue.
struct Place {
    gate: Arc<Gate>,
    ask: Ask,
    number: u64,
    answer: oneshot::Receiver<Answer>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.gate.inner.lock();
        let Inner { accounts, lines } = &mut *inner;
        let ask = &self.ask;
        let line = lines.get_mut(&key(&ask.model));
        let removed = line.and_then(|line| line.queue.remove(ask.priority, &ask.tenant, self.number));
        if removed.is_some() {
            accounts.leave_queue(ask.tokens);
            accounts.leave(&ask.tenant, ask.tokens);
        }
    }
}

/// Leave to go to a worker, and the tenant's account of it. Dropping it gives both back.
pub struct Permit {
    gate: Arc<Gate>,
    ask: Ask,
    booked: bool,
    /// Counted in the tenant's account; not any more when it waits once again.
    accounted: bool,
}

impl Permit {
    /// It holds no room: it was booked on a worker, or has given its room back.
    pub fn is_booked(&self) -> bool {
        self.booked
    }

    /// The request is booked on a worker, whose own load shows it from now on.
    pub fn booked(&mut self) {
        if !std::mem::replace(&mut self.booked, true) {
            self.gate.inner.lock().lines.no_longer_unbooked(&key(&self.ask.model));
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.booked && !self.accounted {
            return;
        }
        let mut inner = self.gate.inner.lock();
        if self.accounted {
            inner.accounts.leave(&self.ask.tenant, self.ask.tokens);
        }
        if !self.booked {
            inner.lines.no_longer_unbooked(&key(&self.ask.model));
            drop(inner);
            // The room that it was let through for is somebody else's now.
            self.gate.pump(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests;
