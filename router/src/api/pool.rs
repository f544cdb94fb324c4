//! Work that takes time in proportion to a request's size, off the reactor.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use thalweg_proto::code::ErrorCode;
use tokio::sync::Semaphore;

use crate::error::RouterError;

/// Requests that wait for a thread; above it 429.
const WAITING_MAX: usize = 4096;

/// As many threads as there are cores: more would only take time from each other.
pub(super) struct BlockingPool {
    threads: Semaphore,
    waiting: AtomicUsize,
}

impl Default for BlockingPool {
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Two at least, so that one huge prompt does not hold up all others.
        Self { threads: Semaphore::new(cores.max(2)), waiting: AtomicUsize::new(0) }
    }
}

impl BlockingPool {
    /// Runs `work` to its end, also if the caller goes away.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, RouterError> + Send + 'static,
    ) -> Result<T, RouterError> {
        let waiting = Waiting::enter(&self.waiting)?;
        let permit = self.threads.acquire().await.map_err(|_| broken("the pool is closed"))?;
        drop(waiting);
        let result = tokio::task::spawn_blocking(work).await;
        drop(permit);
        result.unwrap_or_else(|error| {
            tracing::error!(%error, "a request could not be prepared");
            Err(broken("the request could not be prepared; the router's log says why"))
        })
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn enter(count: &'a AtomicUsize) -> Result<Self, RouterError> {
        let waiting = Self(count);
        if count.fetch_add(1, Ordering::Relaxed) < WAITING_MAX {
            return Ok(waiting);
        }
        let error = RouterError::new(ErrorCode::Overloaded, "too many requests wait to be read; try again");
        Err(error.retry_after(Duration::from_secs(1)))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn broken(message: &str) -> RouterError {
    RouterError::new(ErrorCode::Internal, message)
}
