//! What a simulated worker does wrong, on purpose, and how tests switch it while the worker runs.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use tokio::sync::watch;

use super::profile::{Profile, ProfileError, Text};

/// Part `faults` of a profile; all off by default.
///
/// | key | what the worker does |
/// |---|---|
/// | `delay_seconds` | holds back the first message of each stream for so long |
/// | `stall` | accepts requests and never answers: its step counter stands still |
/// | `slow_seconds` | lets so much time pass between two messages of a stream |
/// | `garbage` | streams what no worker should: see [`Garbage`] |
/// | `abort_on` | aborts the process at a prompt that contains this text or these ids |
/// | `panic_on` | panics in the runner at such a prompt, which ends the engine |
/// | `refuse` | refuses every request as overloaded |
/// | `cache_events` | loses, doubles or swaps batches for the cache index: see [`CacheEventFault`] |
/// | `silent` | sends no load reports, though their stream stays open |
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Before the first message of each stream.
    pub delay_seconds: f64,
    /// No step completes.
    pub stall: bool,
    /// Between two messages of a stream.
    pub slow_seconds: f64,
    /// Streams that make no sense.
    pub garbage: Option<Garbage>,
    /// Prompts that abort the process.
    pub abort_on: Option<Trigger>,
    /// Prompts that panic the runner.
    pub panic_on: Option<Trigger>,
    /// Refuse what comes.
    pub refuse: bool,
    /// What becomes of cache events.
    pub cache_events: Option<CacheEventFault>,
    /// No load reports.
    pub silent: bool,
}

/// What makes a prompt a poisonous one. A text matches as the tokenizer cuts it where a text begins, or behind a space.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "Text")]
pub struct Trigger {
    text: Option<String>,
    /// Any of these, as a run of the prompt's tokens.
    ids: Vec<Vec<u32>>,
}

impl From<Text> for Trigger {
    fn from(text: Text) -> Self {
        match text {
            Text::Text(text) => Self { text: Some(text), ids: Vec::new() },
            Text::Ids(ids) => Self { text: None, ids: vec![ids] },
        }
    }
}

impl Trigger {
    /// Whether the prompt contains it.
    pub fn is_in(&self, prompt: &[u32]) -> bool {
        let runs = self.ids.iter().filter(|ids| !ids.is_empty());
        runs.into_iter().any(|ids| prompt.windows(ids.len()).any(|window| window == ids))
    }
}

/// From a text to the ways in which a prompt may hold it, in tokens.
pub type Encode = Box<dyn Fn(&str) -> Vec<Vec<u32>> + Send>;

impl Faults {
    /// Streams are late, slow or nonsense.
    pub fn spoil_streams(&self) -> bool {
        self.delay_seconds > 0.0 || self.slow_seconds > 0.0 || self.garbage.is_some()
    }

    /// Finds the tokens of texts.
    pub fn resolve(&mut self, encode: &Encode) {
        for trigger in [&mut self.abort_on, &mut self.panic_on].into_iter().flatten() {
            if let Some(text) = &trigger.text {
                trigger.ids = encode(text);
            }
        }
    }
}

/// Ways in which a stream makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Garbage {
    /// Token ids outside of the vocabulary.
    InvalidIds,
    /// Every two messages are swapped.
    OutOfOrder,
    /// Choices that nobody asked for.
    UnknownChoice,
    /// The stream ends well behind its second message, without a finish reason.
    Truncated,
}

/// What becomes of every third batch of cache events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheEventFault {
    /// It is never sent.
    Lost,
    /// It is sent twice.
    Duplicated,
    /// It is sent behind the next one.
    Reordered,
}

/// The faults as they are now. Cheap to clone. The file is looked after for as long as one of its clones lives.
#[derive(Clone, Debug)]
pub struct FaultSwitch {
    now: watch::Receiver<Arc<Faults>>,
    _end: Arc<Sender<()>>,
}

impl FaultSwitch {
    /// As they are now.
    pub fn now(&self) -> Arc<Faults> {
        self.now.borrow().clone()
    }

    /// Waits until they change; for ever when they no longer can.
    pub async fn changed(&mut self) {
        if self.now.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Looks after a profile's file.
#[derive(Debug)]
pub struct FaultWatch {
    switch: FaultSwitch,
}

/// Time between two looks at the file.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

impl FaultWatch {
    /// Starts with `faults`, which `path` held when it was last read.
    pub fn start(path: &Path, mut faults: Faults, encode: Encode) -> Result<Self, ProfileError> {
        faults.resolve(&encode);
        let (told, now) = watch::channel(Arc::new(faults));
        let (end, ended) = channel();
        let file = ProfileFile { stamp: stamp(path), path: path.to_owned(), encode };
        std::thread::Builder::new().name("profile".into()).spawn(move || file.watch(&told, &ended)).map_err(
            |error| ProfileError { path: path.to_owned(), reason: format!("no thread to watch it: {error}") },
        )?;
        Ok(Self { switch: FaultSwitch { now, _end: Arc::new(end) } })
    }

    /// The faults.
    pub fn switch(&self) -> &FaultSwitch {
        &self.switch
    }
}

/// Changed when the file has: a write or a replacement.
type Stamp = Option<(SystemTime, u64, u64)>;

struct ProfileFile {
    path: PathBuf,
    stamp: Stamp,
    encode: Encode,
}

impl ProfileFile {
    /// Polls, which needs no signal and works on every file system. A file that cannot be read changes nothing.
    fn watch(mut self, told: &watch::Sender<Arc<Faults>>, ended: &Receiver<()>) {
        while ended.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let stamp = stamp(&self.path);
            if stamp == self.stamp {
                continue;
            }
            self.stamp = stamp;
            match Profile::read(&self.path) {
                Ok(Profile { mut faults, .. }) => {
                    faults.resolve(&self.encode);
                    if faults != **told.borrow() {
                        tracing::info!(?faults, "faults switched");
                        told.send_replace(Arc::new(faults));
                    }
                }
                Err(error) => tracing::warn!(%error, "profile not read again, the faults stay as they were"),
            }
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let about = std::fs::metadata(path).ok()?;
    Some((about.modified().ok()?, about.len(), about.ino()))
}
