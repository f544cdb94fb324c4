//! How many connections this process takes, over all its listeners. Each takes a file; so many files are kept that a server
//! always has some for workers, etcd, Redis, the files that options name, and logs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::rarely::Rarely;

/// Connections at a time; those above it wait in the kernel's backlog. Each takes a file and some 10 KB.
const CONNECTIONS_MAX: usize = 16_384;
/// Files that connections leave alone: a quarter of all, and so many at least.
const KEPT_FILES_MIN: usize = 40;
/// With fewer files than this nobody can be served.
const FILES_MIN: usize = 64;
/// Connections of each listener that no crowd at another one can keep out, routers at a worker or a scraper, say. They come out
/// of the files that are kept.
const OWN_PLACES: usize = 4;

/// Of the whole process, as its files are.
static SHARED: LazyLock<Arc<Semaphore>> =
    LazyLock::new(|| Arc::new(Semaphore::new(connections_max(files()))));
static FULL: AtomicUsize = AtomicUsize::new(0);
static WARNING: Rarely = Rarely::new();

/// The system lets this process open too few files.
#[derive(Debug, thiserror::Error)]
#[error(
    "this process may open {files} files, and needs {FILES_MIN} at least to serve anybody; raise `ulimit -n` \
     (`LimitNOFILE` of systemd)"
)]
pub struct TooFewFiles {
    files: usize,
}

/// Lets this process open as many files as the system allows it, before it listens anywhere.
pub fn raise_file_limit() -> Result<(), TooFewFiles> {
    let hard = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: hard, maximum: hard }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
    let files = files();
    if files < FILES_MIN { Err(TooFewFiles { files }) } else { Ok(()) }
}

/// Listeners that accept nobody now, because this process has as many connections as it may.
pub fn full_listeners() -> usize {
    FULL.load(Ordering::Relaxed)
}

fn files() -> usize {
    let limit = getrlimit(Resource::Nofile).current;
    limit.map_or(usize::MAX, |files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// Of a process with so many files, beside the listeners' own places.
fn connections_max(files: usize) -> usize {
    files.saturating_sub((files / 4).max(KEPT_FILES_MIN)).min(CONNECTIONS_MAX)
}

/// What a listener may accept: some connections of its own, and what all listeners have together.
pub(crate) struct Places {
    own: Arc<Semaphore>,
    shared: Arc<Semaphore>,
}

/// One connection's; it is free again when it is dropped.
pub struct Place {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Places {
    /// Of a listener of this process.
    pub(crate) fn new() -> Self {
        Self::within(&SHARED)
    }

    fn within(shared: &Arc<Semaphore>) -> Self {
        Self { own: Arc::new(Semaphore::new(OWN_PLACES)), shared: Arc::clone(shared) }
    }

    /// A place, as soon as one is free.
    pub(crate) async fn take(&self) -> Place {
        let free = |places: &Arc<Semaphore>| Arc::clone(places).try_acquire_owned().ok();
        let permit = match free(&self.own).or_else(|| free(&self.shared)) {
            Some(permit) => Some(permit),
            None => {
                let _full = Full::begin();
                let (own, shared) = (Arc::clone(&self.own), Arc::clone(&self.shared));
                // Neither semaphore is ever closed.
                tokio::select! {
                    permit = own.acquire_owned() => permit.ok(),
                    permit = shared.acquire_owned() => permit.ok(),
                }
            }
        };
        Place { _permit: permit }
    }
}

/// While a listener waits for a place.
struct Full;

impl Full {
    fn begin() -> Self {
        FULL.fetch_add(1, Ordering::Relaxed);
        if let Some(untold) = WARNING.turn() {
            let connections_max = connections_max(files());
            let advice = if connections_max < CONNECTIONS_MAX { "; raise `ulimit -n`" } else { "" };
            tracing::warn!(
                connections_max,
                untold,
                "this process has as many connections as it may, others wait{advice}"
            );
        }
        Self
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        FULL.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_a_quarter_of_the_files_and_never_too_few() {
        for (files, expected) in [
            (0, 0),
            (40, 0),
            (FILES_MIN, 24),
            (160, 120),
            (1024, 768),
            (20_000, 15_000),
            (usize::MAX, CONNECTIONS_MAX),
        ] {
            assert_eq!(connections_max(files), expected, "{files}");
        }
    }

    #[tokio::test]
    async fn a_crowd_at_one_listener_leaves_the_others_their_own_places() {
        let shared = Arc::new(Semaphore::new(3));
        let (crowded, other) = (Places::within(&shared), Places::within(&shared));
        let mut crowd = Vec::new();
        for _ in 0..OWN_PLACES + 3 {
            crowd.push(crowded.take().await);
        }
        let late = crowded.take();
        tokio::pin!(late);
        tokio::select! {
            biased;
            _ = &mut late => panic!("there was no place"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(full_listeners(), 1);
        let mut others = Vec::new();
        for _ in 0..OWN_PLACES {
            others.push(other.take().await);
        }
        drop(crowd.pop());
        drop(late.await);
        assert_eq!(full_listeners(), 0);
    }
}
