//! What a handler leaves of a request's body, such as one that refuses by the head alone. Were it left on an HTTP/1 connection, the
//! connection would close under the next request, and reset under a client that still writes, which would never see its reply.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Version, header};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Bytes that are read and dropped, and how long; the connection closes behind more.
const BYTES_MAX: u64 = 32 << 20;
const PATIENCE: Duration = Duration::from_secs(1);

/// A request's body, the rest of which is read when it is dropped.
pub(crate) struct Whole {
    body: Option<Incoming>,
    /// Whether the rest is worth reading: it is not too long, and the client does not wait to be asked for it.
    is_read: bool,
    closes: Closes,
}

/// Whether the connection will close behind the reply, because something of the request is left on it.
#[derive(Clone, Default)]
pub(crate) struct Closes(Arc<AtomicBool>);

impl Closes {
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Whole {
    pub(crate) fn of(request: Request<Incoming>) -> (Request<Self>, Closes) {
        let closes = Closes::default();
        // On HTTP/2 a stream is reset, and its connection goes on.
        let is_http2 = request.version() == Version::HTTP_2;
        let awaits = request.headers().contains_key(header::EXPECT);
        let is_read = !is_http2 && !awaits && request.body().size_hint().lower() <= BYTES_MAX;
        let unclosed = if is_http2 { Closes::default() } else { closes.clone() };
        let of = |body| Self { body: Some(body), is_read, closes: unclosed };
        (request.map(of), closes)
    }
}

impl Body for Whole {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.body {
            Some(body) => Pin::new(body).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) else { return };
        match Handle::try_current() {
            Ok(runtime) if self.is_read => drop(runtime.spawn(timeout(PATIENCE, discard(body)))),
            _ => self.closes.0.store(true, Ordering::Relaxed),
        }
    }
}

async fn discard(mut body: Incoming) {
    let mut bytes = 0;
    while let Some(Ok(frame)) = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
    {
        bytes += frame.data_ref().map_or(0, Bytes::len) as u64;
        if bytes > BYTES_MAX {
            break;
        }
    }
}
