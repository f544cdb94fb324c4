//! One way out for the events of many requests: what a step has brought wakes one reader, not one for each request.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures::task::AtomicWaker;
use parking_lot::Mutex;
use smallvec::SmallVec;
use thalweg_proto::ids::AttemptId;
use tokio::sync::mpsc::UnboundedSender;

use super::handle::Refusal;
use super::request::{ChoiceDelta, EngineEvent};

/// Events that one read takes at most, so that messages made of them stay small.
const READ_MAX: usize = 4096;

/// An event of a request that has joined a channel.
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelEvent {
    /// Whose.
    pub attempt: AttemptId,
    /// What is new.
    pub event: EngineEvent,
}

/// Where requests put their events. Holds what its reader has not taken yet, which the max_tokens of its requests bound.
/// Requests whose channel has no reader any more are aborted.
#[derive(Debug, Default)]
pub struct EventChannel {
    /// None once the reader is gone.
    events: Mutex<Option<Vec<ChannelEvent>>>,
    reader: AtomicWaker,
}

/// The only reader of a channel.
#[derive(Debug)]
pub struct ChannelReader(Arc<EventChannel>);

impl EventChannel {
    /// A channel and its reader.
    pub fn open() -> (Arc<Self>, ChannelReader) {
        let channel = Arc::new(Self { events: Mutex::new(Some(Vec::new())), reader: AtomicWaker::new() });
        (channel.clone(), ChannelReader(channel))
    }

    /// False when nobody will read it.
    fn push(&self, event: ChannelEvent) -> bool {
        let mut events = self.events.lock();
        events.as_mut().map(|events| events.push(event)).is_some()
    }
}

impl ChannelReader {
    /// Waits until there are events, and takes those that are there.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Vec<ChannelEvent>> {
        if let Some(events) = self.take() {
            return Poll::Ready(events);
        }
        self.0.reader.register(cx.waker());
        self.take().map_or(Poll::Pending, Poll::Ready)
    }

    fn take(&self) -> Option<Vec<ChannelEvent>> {
        let mut held = self.0.events.lock();
        let events = held.as_mut().filter(|events| !events.is_empty())?;
        // The next step brings about as many.
        let mut rest = Vec::with_capacity(events.len().min(READ_MAX));
        rest.extend(events.drain(events.len().min(READ_MAX)..));
        Some(std::mem::replace(events, rest))
    }
}

impl Drop for ChannelReader {
    fn drop(&mut self) {
        *self.0.events.lock() = None;
    }
}

/// Where a request's events go: to its own stream; or to a channel, and then its stream hears of ends alone. Unbounded in
/// type, bounded in fact: each event holds a token, or is the last.
#[derive(Debug)]
pub(crate) struct EventSender {
    pub(crate) stream: UnboundedSender<Result<EngineEvent, Refusal>>,
    pub(crate) channel: Option<(Arc<EventChannel>, AttemptId)>,
}

/// Channels whose readers are to be woken, once everything is in them.
#[derive(Debug, Default)]
pub(super) struct Wakes(Vec<Arc<EventChannel>>);

impl EventSender {
    /// False when the request is to be aborted, since nobody hears what it says. A stream that is gone has asked for that
    /// itself.
    pub(super) fn send(&self, event: Result<EngineEvent, Refusal>, wakes: &mut Wakes) -> bool {
        let Some((channel, attempt)) = &self.channel else {
            let _ = self.stream.send(event);
            return true;
        };
        let event = match event {
            Ok(event) => event,
            Err(refusal) => {
                let _ = self.stream.send(Err(refusal));
                return true;
            }
        };
        let ends = ends_of(&event);
        let heard = channel.push(ChannelEvent { attempt: *attempt, event });
        wakes.add(channel);
        if let Some(ends) = ends {
            let _ = self.stream.send(Ok(ends));
        }
        heard
    }
}

impl Wakes {
    fn add(&mut self, channel: &Arc<EventChannel>) {
        if !self.0.iter().any(|known| Arc::ptr_eq(known, channel)) {
            self.0.push(channel.clone());
        }
    }

    /// Now.
    pub(super) fn wake(self) {
        self.0.iter().for_each(|channel| channel.reader.wake());
    }
}

/// The event without its tokens, if a choice ends with it.
fn ends_of(event: &EngineEvent) -> Option<EngineEvent> {
    let ended = event.deltas.iter().filter(|delta| delta.finish.is_some());
    let deltas: SmallVec<[ChoiceDelta; 1]> = ended
        .map(|delta| ChoiceDelta { index: delta.index, finish: delta.finish, ..ChoiceDelta::default() })
        .collect();
    (!deltas.is_empty()).then_some(EngineEvent { prompt: None, deltas })
}
