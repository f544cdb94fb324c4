//! New connections, of HTTP and of gRPC: what keeps them from coming is told rarely and counted always.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use crate::places::{Place, Places};
use crate::rarely::Rarely;

/// Between attempts while they fail. Connections wait in the kernel's backlog meanwhile.
const PAUSE: Duration = Duration::from_millis(50);
/// What Linux says when a process has as many files as it may.
const EMFILE: i32 = 24;

/// Of the whole process, as its files are.
static FAILED: AtomicU64 = AtomicU64::new(0);
static WARNING: Rarely = Rarely::new();

/// A listener that accepts nobody for whom there is no place.
pub(crate) struct Entrance {
    listener: TcpListener,
    places: Places,
}

impl Entrance {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, places: Places::new() }
    }

    /// The next connection, however long it takes to get one, and the place that it takes.
    pub(crate) async fn next(&self) -> (TcpStream, SocketAddr, Place) {
        let place = self.places.take().await;
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // A token is a small packet; waiting to fill a larger one would only delay it.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%error, "TCP_NODELAY refused");
                    }
                    return (stream, peer, place);
                }
                Err(error) if has_left(&error) => {
                    tracing::debug!(%error, "a client left before it was accepted");
                }
                Err(error) => {
                    tell(&error);
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// How often this process could not accept a connection, over all its listeners.
pub fn accept_errors() -> u64 {
    FAILED.load(Ordering::Relaxed)
}

fn has_left(error: &io::Error) -> bool {
    use ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

fn tell(error: &io::Error) {
    FAILED.fetch_add(1, Ordering::Relaxed);
    if let Some(untold) = WARNING.turn() {
        let advice = if error.raw_os_error() == Some(EMFILE) { "; raise `ulimit -n`" } else { "" };
        tracing::warn!(%error, untold, "connections wait because none can be accepted{advice}");
    }
}
