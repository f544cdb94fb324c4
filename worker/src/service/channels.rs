//! Channels that routers hold open: each carries the messages of all requests that joined it.

use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use futures::Stream;
use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::v1;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::Status;

use super::wire;
use crate::engine::{ChannelReader, EventChannel};

/// The open channels by number, as many as there are routers that opened one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Channels(Arc<Mutex<Open>>);

#[derive(Debug, Default)]
struct Open {
    by_number: HashMap<u64, Weak<EventChannel>>,
    last: u64,
}

impl Channels {
    /// A new channel as the stream that its router reads. It ends at `closing`, behind what was told until then.
    pub(super) fn open(&self, closing: CancellationToken) -> ChannelStream {
        let (channel, reader) = EventChannel::open();
        let mut open = self.0.lock();
        open.last += 1;
        let number = open.last;
        open.by_number.insert(number, Arc::downgrade(&channel));
        let closing = Box::pin(closing.cancelled_owned());
        ChannelStream { greeting: Some(number), number, reader, channels: self.clone(), closing }
    }

    /// None when it is closed.
    pub(super) fn get(&self, number: u64) -> Option<Arc<EventChannel>> {
        self.0.lock().by_number.get(&number)?.upgrade()
    }
}

/// Pulled by the transport as the router reads.
pub(crate) struct ChannelStream {
    /// The number, until it is told.
    greeting: Option<u64>,
    number: u64,
    reader: ChannelReader,
    channels: Channels,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Stream for ChannelStream {
    type Item = Result<v1::ChannelMessage, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if let Some(channel) = this.greeting.take() {
            return Poll::Ready(Some(Ok(v1::ChannelMessage { channel, responses: Vec::new() })));
        }
        match this.reader.poll_read(cx) {
            Poll::Ready(events) => {
                let responses = events.into_iter().map(wire::channel_response).collect();
                Poll::Ready(Some(Ok(v1::ChannelMessage { channel: 0, responses })))
            }
            Poll::Pending => this.closing.as_mut().poll(cx).map(|()| None),
        }
    }
}

impl Drop for ChannelStream {
    fn drop(&mut self) {
        self.channels.0.lock().by_number.remove(&self.number);
    }
}
