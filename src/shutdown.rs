//! The choreography of an end: the first signal drains, the second does not wait.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Termination signals of this process, from now on.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Listens; signals that come before the first [`Signals::next`] are kept.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for SIGTERM or SIGINT.
    pub(crate) async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }

    /// Runs `drain` to its end, unless a further signal ends the process at once.
    pub(crate) async fn during(mut self, drain: impl Future<Output = ()>) {
        tokio::select! {
            () = drain => {}
            name = self.next() => {
                tracing::warn!(signal = name, "second signal, exiting at once");
                std::process::exit(1);
            }
        }
    }
}
