//! Connections whose client reads nothing for too long are closed.
//!
//! Without it a reply that was written as a whole would keep its connection for as long as the client likes: hyper has
//! no limit on the time that a write may take.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::accept::Entrance;
use crate::places::Place;

/// A listener whose connections are guarded.
pub struct GuardedListener {
    entrance: Entrance,
    stall_timeout: Duration,
}

impl GuardedListener {
    /// Guards the connections of `inner`.
    pub fn new(inner: TcpListener, stall_timeout: Duration) -> Self {
        Self { entrance: Entrance::new(inner), stall_timeout }
    }

    /// The next connection, and its place.
    pub(crate) async fn accept(&self) -> (StallGuard<TcpStream>, Place) {
        let (stream, _, place) = self.entrance.next().await;
        (StallGuard::new(stream, self.stall_timeout), place)
    }
}

/// A stream whose writes fail with `TimedOut` once one has made no progress for `timeout`.
pub struct StallGuard<S> {
    inner: S,
    timeout: Duration,
    /// Running while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> StallGuard<S> {
    fn new(inner: S, timeout: Duration) -> Self {
        Self { inner, timeout, stalled: None }
    }

    fn guard<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let deadline = || Box::pin(sleep_until(Instant::now() + self.timeout));
        let sleep = self.stalled.get_or_insert_with(deadline);
        match sleep.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.guard(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.guard(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        self.guard(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_write_that_makes_no_progress_fails_after_the_timeout() {
        let (near, _far) = duplex(8);
        let mut guarded = StallGuard::new(near, Duration::from_secs(30));
        let start = Instant::now();
        let error = guarded.write_all(&[0; 9]).await.expect_err("nobody reads");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_is_not_cut_off() {
        let (near, mut far) = duplex(8);
        let mut guarded = StallGuard::new(near, Duration::from_secs(30));
        let reader = async {
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(29)).await;
                far.read_exact(&mut [0; 8]).await.expect("bytes come");
            }
        };
        let (written, ()) = tokio::join!(guarded.write_all(&[0; 32]), reader);
        written.expect("the reader reads, if slowly");
    }
}
