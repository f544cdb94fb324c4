//! Who is in flight on one life of a worker, and how suspicious each is should it end abnormally.

use std::time::Duration;

use hashbrown::HashMap;
use tokio::time::Instant;

/// Streams that break within this time of each other broke with the same exit.
const SAME_EXIT: Duration = Duration::from_secs(2);

/// Strikes by booking. See `dispatch::journey` for what a strike is.
#[derive(Debug, Default)]
pub(super) struct Suspects {
    strikes: HashMap<u64, u32>,
    /// When the last exit was noticed first, and the most strikes then: whoever leaves first takes its own with it.
    exit: Option<(Instant, u32)>,
}

impl Suspects {
    /// Strikes that the request of this booking has if the worker ends now.
    pub(super) fn set(&mut self, booking: u64, strikes: u32) {
        self.strikes.insert(booking, strikes);
    }

    pub(super) fn remove(&mut self, booking: u64) {
        self.strikes.remove(&booking);
    }

    /// The worker has ended: the most strikes of all that were in flight.
    pub(super) fn exit(&mut self, now: Instant) -> u32 {
        match self.exit {
            Some((since, most)) if now.saturating_duration_since(since) < SAME_EXIT => most,
            _ => {
                let most = self.strikes.values().copied().max().unwrap_or(0);
                self.exit = Some((now, most));
                most
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_notice_an_exit_see_the_same_suspect() {
        let (mut suspects, start) = (Suspects::default(), Instant::now());
        suspects.set(1, 3);
        suspects.set(2, 1);
        suspects.set(3, 2);
        suspects.set(3, 1);
        assert_eq!(suspects.exit(start), 3);
        suspects.remove(1);
        assert_eq!(suspects.exit(start + SAME_EXIT / 2), 3);
        assert_eq!(suspects.exit(start + SAME_EXIT), 1, "the worker came back and ended once more");
        suspects.remove(2);
        suspects.remove(3);
        assert_eq!(suspects.exit(start + 3 * SAME_EXIT), 0);
    }
}
