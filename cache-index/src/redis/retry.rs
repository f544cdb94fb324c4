//! Waits between attempts.

use std::time::Duration;

use rand::RngExt;

const FIRST: Duration = Duration::from_millis(50);
/// With the longest attempt to connect, well below the 5 s within which all recovers.
const LAST: Duration = Duration::from_secs(1);

/// Doubles from 50 ms to 1 s, up to half of it random.
#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(FIRST)
    }
}

impl Backoff {
    /// After a success.
    pub(super) fn reset(&mut self) {
        self.0 = FIRST;
    }

    /// After a failure.
    pub(super) async fn wait(&mut self) {
        let wait = self.0.mul_f64(rand::rng().random_range(0.5..1.0));
        self.0 = (self.0 * 2).min(LAST);
        tokio::time::sleep(wait).await;
    }
}
