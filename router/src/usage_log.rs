//! Usage records as JSON lines, to a file or to standard output.
//!
//! Records go through a bounded queue to a thread that writes them. A request never waits for it: when the queue is full,
//! as behind a disk that hangs, records are dropped, counted and told of once.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::sync::oneshot;

/// Names that mean standard output. Opened under one of the system's it would be a second file, of which nobody knew that it is kept for
/// records.
const STDOUT: [&str; 4] = ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];
/// Records that wait to be written, some 500 bytes each.
const WAITING_MAX: usize = 16_384;
/// How long a router that ends waits for its last records.
const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

enum Message {
    Record(Vec<u8>),
    Flush(oneshot::Sender<()>),
}

/// Whether records to this file go to standard output.
pub(crate) fn is_stdout(target: &Path) -> bool {
    STDOUT.iter().any(|name| target == Path::new(name))
}

/// Where records go; cheap to clone.
#[derive(Clone)]
pub(crate) struct UsageLog {
    queue: SyncSender<Message>,
    dropped: Counter,
    has_dropped: Arc<AtomicBool>,
}

impl UsageLog {
    /// Appends to `target`, or writes to standard output if that is meant.
    pub(crate) fn open(target: &Path, registry: &mut Registry) -> io::Result<Self> {
        let out: Box<dyn Write + Send> =
            if is_stdout(target) { Box::new(io::stdout()) } else { Box::new(open(target)?) };
        let (queue, waiting) = sync_channel(WAITING_MAX);
        let dropped = Counter::default();
        let lost = dropped.clone();
        std::thread::Builder::new()
            .name("usage-log".to_owned())
            .spawn(move || write_all(&waiting, out, &lost))?;
        let help = "Usage records that were not written because the file did not keep up or had no room";
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
        let asked = self.queue.try_send(Message::Flush(done)).is_ok();
        if !asked || tokio::time::timeout(FLUSH_PATIENCE, written).await.is_err() {
            tracing::warn!("usage records that wait are lost because they cannot be written");
        }
    }
}

fn open(target: &Path) -> io::Result<File> {
    // Opening a named pipe to write alone would wait for somebody who reads it; so records wait there.
    let is_pipe = std::fs::metadata(target).is_ok_and(|file| file.file_type().is_fifo());
    OpenOptions::new().create(!is_pipe).append(true).read(is_pipe).open(target)
}

/// Writes until every sender is gone, as much at a time as waits.
fn write_all(waiting: &Receiver<Message>, mut out: impl Write, lost: &Counter) {
    let (mut fails, mut is_torn) = (false, false);
    while let Ok(first) = waiting.recv() {
        // What there is of a record that was cut off stays a line of its own.
        let mut lines = if is_torn { vec![b'\n'] } else { Vec::new() };
        let (mut ends, mut flushed) = (Vec::new(), Vec::new());
        for message in std::iter::once(first).chain(waiting.try_iter()) {
            match message {
                Message::Record(line) => {
                    lines.extend_from_slice(&line);
                    ends.push(lines.len());
                }
                Message::Flush(done) => flushed.push(done),
            }
        }
        let (written, result) = append(&mut out, &lines);
        lost.inc_by(ends.iter().filter(|end| **end > written).count() as u64);
        if written > 0 {
            is_torn = lines[written - 1] != b'\n';
        }
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

/// How many bytes were written, and what kept the others.
fn append(out: &mut impl Write, bytes: &[u8]) -> (usize, io::Result<()>) {
    let mut written = 0;
    while written < bytes.len() {
        match out.write(&bytes[written..]) {
            Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
            Ok(some) => written += some,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Err(error)),
        }
    }
    (written, out.flush())
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;

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

    #[tokio::test]
    async fn a_pipe_is_opened_before_anybody_reads_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = folder.path().join("usage");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
        assert!(made.success());
        let log = UsageLog::open(&pipe, &mut Registry::default()).expect("opens");
        log.record(&serde_json::json!({"a": 1}));
        log.flush().await;
        let mut line = String::new();
        let reader = File::open(&pipe).expect("opens");
        io::BufReader::new(reader).read_line(&mut line).expect("readable");
        assert_eq!(line, "{\"a\":1}\n");
    }

    /// A disk with room for so many bytes, and for all once there is more.
    struct Disk {
        room: usize,
        written: Arc<parking_lot::Mutex<Vec<u8>>>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let some = bytes.len().min(self.room);
            if some == 0 {
                self.room = usize::MAX;
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= some;
            self.written.lock().extend_from_slice(&bytes[..some]);
            Ok(some)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn records_for_which_there_is_no_room_are_counted_and_tear_no_other() {
        let (queue, waiting) = sync_channel(9);
        let (written, lost) = (Arc::<parking_lot::Mutex<Vec<u8>>>::default(), Counter::default());
        let disk = Disk { room: 12, written: Arc::clone(&written) };
        let record =
            |text: &str| queue.send(Message::Record(format!("{text}\n").into_bytes())).expect("room");
        ["{\"a\":1}", "{\"b\":2}", "{\"c\":3}"].into_iter().for_each(record);
        let counter = lost.clone();
        let writer = std::thread::spawn(move || write_all(&waiting, disk, &counter));
        while lost.get() < 2 {
            std::thread::yield_now();
        }
        record("{\"d\":4}");
        drop(queue);
        writer.join().expect("no panic");
        assert_eq!(String::from_utf8_lossy(&written.lock()), "{\"a\":1}\n{\"b\"\n{\"d\":4}\n");
        assert_eq!(lost.get(), 2);
    }

    #[test]
    fn a_full_queue_drops_and_counts() {
        let (queue, _waiting) = sync_channel(1);
        let log = UsageLog { queue, dropped: Counter::default(), has_dropped: Arc::default() };
        (0..3).for_each(|at| log.record(&at));
        assert_eq!(log.dropped.get(), 2);
    }
}
