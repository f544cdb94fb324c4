//! The choreography of an end: the first signal drains, the second cuts that short, the third does not wait.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// How long an end that was cut short may take.
const CUT_SHORT_MAX: Duration = Duration::from_secs(5);

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

    /// Runs `drain` to its end. A further signal calls `cut_short`, with which it should end soon; one more ends the process at
    /// once.
    pub(crate) async fn during(mut self, drain: impl Future<Output = ()>, cut_short: impl FnOnce()) {
        tokio::pin!(drain);
        let name = tokio::select! {
            () = &mut drain => return,
            name = self.next() => name,
        };
        tracing::warn!(signal = name, "second signal, what still runs is cut off");
        cut_short();
        tokio::select! {
            ended = tokio::time::timeout(CUT_SHORT_MAX, drain) => if ended.is_ok() { return },
            _ = self.next() => {}
        }
        tracing::warn!("exiting at once");
        std::process::exit(1);
    }
}
