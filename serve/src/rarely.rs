//! Keeps what happens again and again from filling the log.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Between two lines.
const EVERY: Duration = Duration::from_secs(10);

/// One line of the log, and when it was last written.
#[derive(Default)]
pub(crate) struct Rarely {
    told: Mutex<Told>,
}

#[derive(Default)]
struct Told {
    last: Option<Instant>,
    /// Times since then.
    untold: u64,
}

impl Rarely {
    pub(crate) const fn new() -> Self {
        Self { told: Mutex::new(Told { last: None, untold: 0 }) }
    }

    /// It has happened: whether to tell, and then how often it was not told since the last line.
    pub(crate) fn turn(&self) -> Option<u64> {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.last.is_some_and(|last| last.elapsed() < EVERY) {
            told.untold += 1;
            return None;
        }
        told.last = Some(Instant::now());
        Some(std::mem::take(&mut told.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_goes_on_is_told_every_ten_seconds_with_its_number() {
        let (rarely, mut told) = (Rarely::new(), Vec::new());
        for second in 0..25 {
            told.extend(rarely.turn().map(|untold| (second, untold)));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(told, [(0, 0), (10, 9), (20, 9)]);
    }
}
