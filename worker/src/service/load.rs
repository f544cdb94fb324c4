//! A WatchLoad stream: reports as the load changes, not too often, and a heartbeat while it does not.

use std::time::Duration;

use futures::Stream;
use thalweg_proto::v1;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::wire::{Identity, load_report};
use crate::engine::LoadSnapshot;

/// Least time between two reports.
pub(crate) const SPACING: Duration = Duration::from_millis(20);

/// Most time between two reports.
pub(crate) const HEARTBEAT: Duration = Duration::from_millis(250);

/// Reports until the caller goes, the engine ends or `closing`. The newest load only: nothing queues up behind a slow
/// reader.
pub(crate) fn reports(
    load: watch::Receiver<LoadSnapshot>,
    who: Identity,
    closing: CancellationToken,
) -> impl Stream<Item = Result<v1::LoadReport, Status>> + Send {
    let watcher = Watcher { load, who, closing, last: None, told_draining: false };
    futures::stream::unfold(watcher, |mut watcher| async move {
        let report = watcher.next().await?;
        Some((Ok(report), watcher))
    })
}

struct Watcher {
    load: watch::Receiver<LoadSnapshot>,
    who: Identity,
    closing: CancellationToken,
    last: Option<Instant>,
    told_draining: bool,
}

impl Watcher {
    async fn next(&mut self) -> Option<v1::LoadReport> {
        if let Some(last) = self.last {
            let closing = self.closing.clone();
            let alive = tokio::select! {
                () = closing.cancelled() => false,
                alive = self.due(last) => alive,
            };
            if !alive {
                return None;
            }
        }
        self.last = Some(Instant::now());
        let load = self.load.borrow_and_update();
        self.told_draining = load.draining;
        Some(load_report(&self.who, &load))
    }

    /// Waits for the next report's time; false when the engine has ended. That draining began is told at once.
    async fn due(&mut self, last: Instant) -> bool {
        if !self.told_draining {
            let mut load = self.load.clone();
            tokio::select! {
                biased;
                Ok(_) = load.wait_for(|load| load.draining) => return true,
                () = sleep_until(last + SPACING) => {}
            }
        } else {
            sleep_until(last + SPACING).await;
        }
        !matches!(timeout_at(last + HEARTBEAT, self.load.changed()).await, Ok(Err(_)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;

    fn who() -> Identity {
        Identity { worker_id: "w".to_owned(), epoch: 3 }
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_told_within_bounds() {
        let (sender, load) = watch::channel(LoadSnapshot::default());
        let closing = CancellationToken::new();
        let mut reports = Box::pin(reports(load, who(), closing.clone()));
        let begin = Instant::now();
        let mut at = async |running: u32| {
            let report = reports.next().await.unwrap().unwrap();
            assert_eq!((report.worker_id.as_str(), report.epoch, report.running), ("w", 3, running));
            begin.elapsed().as_millis()
        };
        assert_eq!(at(0).await, 0, "the first comes at once");
        assert_eq!(at(0).await, 250, "a heartbeat when nothing changes");
        sender.send_modify(|load| load.running = 1);
        sender.send_modify(|load| load.running = 2);
        assert_eq!(at(2).await, 270, "a change, spaced, the newest only");
        assert_eq!(at(2).await, 520);
        sender.send_modify(|load| load.draining = true);
        assert_eq!(at(2).await, 520, "draining is told at once");
        sender.send_modify(|load| load.running = 1);
        assert_eq!(at(1).await, 540, "and once: what follows is spaced");
    }

    #[tokio::test(start_paused = true)]
    async fn the_stream_ends_with_the_engine_and_at_closing() {
        let (sender, load) = watch::channel(LoadSnapshot::default());
        let closing = CancellationToken::new();
        let mut first = Box::pin(reports(load.clone(), who(), closing.clone()));
        let mut second = Box::pin(reports(load, who(), CancellationToken::new()));
        assert!(first.next().await.is_some() && second.next().await.is_some());
        closing.cancel();
        assert!(first.next().await.is_none());
        drop(sender);
        assert!(second.next().await.is_none());
    }
}
