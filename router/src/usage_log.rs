//! Usage records as JSON lines, to a file or to standard output.
//!
//! Records go through a bounded queue to a thread that writes them. A request never waits for it: when the queue is full,
//! as behind a disk that hangs, records are dropped, counted and told of once.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::sync::oneshot;

/// Records that wait to be written, some 500 bytes each.
const WAITING_MAX: usize = 16_384;
/// How long a router that ends waits for its last records.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

enum Message {
    Record(Vec<u8>),
    Flush(oneshot::Sender<()>),
}

/// Where records go; cheap to clone.
#[derive(Clone)]
pub(crate) struct UsageLog {
    queue: SyncSender<Message>,
    dropped: Counter,
    has_dropped: Arc<AtomicBool>,
}

impl UsageLog {
    /// Appends to `target`, or writes to standard output if that is `-`.
    pub(crate) fn open(target: &Path, registry: &mut Registry) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = if target == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(OpenOptions::new().create(true).append(true).open(target)?)
        };
        let (queue, waiting) = sync_channel(WAITING_MAX);
        std::thread::Builder::new().name("usage-log".to_owned()).spawn(move || write_all(&waiting, out))?;
        let dropped = Counter::default();
        let help = "Usage records that were not written because the file did not keep up";
        registry.register("usage_records_dropped", help, dropped.clone());
        Ok(Self { queue, dropped, has_dropped: Arc::default() })
    }

    /// Takes a record, or drops it.
    pub(crate) fn record(&self, record: &impl Serialize) {
        let Ok(mut line) = serde_json::to_vec(record) else { return };
        line.push(b'\n');
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.queue.try_send(Message::Record(line))
        {
            self.dropped.inc();
            if !self.has_dropped.swap(true, Ordering::Relaxed) {
                tracing::warn!("usage records are dropped because they cannot be written fast enough");
            }
        }
    }

    /// Returns once everything that was recorded before has been written, or when that takes too long.
    pub(crate) async fn flush(&self) {
        let (done, written) = oneshot::channel();
        if self.queue.try_send(Message::Flush(done)).is_ok() {
            let _ = tokio::time::timeout(FLUSH_PATIENCE, written).await;
        }
    }
}

/// Writes until every sender is gone; what was written is flushed whenever nothing waits.
fn write_all(waiting: &Receiver<Message>, out: impl Write) {
    let mut out = BufWriter::new(out);
    let mut fails = false;
    while let Ok(first) = waiting.recv() {
        let mut result = Ok(());
        let mut flushed = Vec::new();
        for message in std::iter::once(first).chain(waiting.try_iter()) {
            match message {
                Message::Record(line) => result = result.and_then(|()| out.write_all(&line)),
                Message::Flush(done) => flushed.push(done),
            }
        }
        let result = result.and_then(|()| out.flush());
        if let Err(error) = &result
            && !fails
        {
            tracing::error!(%error, "usage records cannot be written");
        }
        fails = result.is_err();
        for done in flushed {
            // Nobody waits any more where sending fails.
            let _ = done.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn records_are_lines_of_a_file_that_is_appended_to() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), "before\n").expect("written");
        let log = UsageLog::open(file.path(), &mut Registry::default()).expect("opens");
        log.record(&serde_json::json!({"a": 1}));
        log.record(&serde_json::json!({"b": "x\ny"}));
        log.flush().await;
        let text = std::fs::read_to_string(file.path()).expect("readable");
        assert_eq!(text, "before\n{\"a\":1}\n{\"b\":\"x\\ny\"}\n");
        assert!(UsageLog::open(Path::new("/nowhere/usage"), &mut Registry::default()).is_err());
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, _waiting) = sync_channel(1);
        let log = UsageLog { queue, dropped: Counter::default(), has_dropped: Arc::default() };
        (0..3).for_each(|at| log.record(&at));
        assert_eq!(log.dropped.get(), 2);
    }
}
