//! Workers that failed of late: whether there is calm, and whether a failure came alone.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use thalweg_proto::ids::{WorkerEpoch, WorkerId};
use tokio::time::Instant;

/// Failures remembered; above it the oldest is forgotten.
const FAILURES_MAX: usize = 256;

/// One life of a worker.
pub(crate) type Life = (WorkerId, WorkerEpoch);

/// A worker that took work and then broke off, fell silent or was replaced by another life.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) at: Instant,
    pub(crate) life: Life,
    fingerprint: Bytes,
}

/// The last failures, oldest first.
#[derive(Debug, Default)]
pub(super) struct Failures {
    last: VecDeque<Failure>,
}

impl Failures {
    pub(super) fn add(&mut self, life: Life, fingerprint: Bytes, at: Instant) {
        if self.last.len() == FAILURES_MAX {
            self.last.pop_front();
        }
        self.last.push_back(Failure { at, life, fingerprint });
    }

    /// When the last worker of these weights failed.
    pub(super) fn last(&self, fingerprint: &[u8]) -> Option<Instant> {
        self.of(fingerprint).map(|failure| failure.at).max()
    }

    /// Whether a worker of these weights other than `lives` failed between the two.
    pub(super) fn any_beside(&self, fingerprint: &[u8], lives: &[Life], from: Instant, to: Instant) -> bool {
        self.of(fingerprint).any(|f| (from..=to).contains(&f.at) && !lives.contains(&f.life))
    }

    fn of<'a>(&'a self, fingerprint: &'a [u8]) -> impl Iterator<Item = &'a Failure> {
        self.last.iter().filter(move |failure| failure.fingerprint == fingerprint)
    }
}

/// `from` and `to` at this distance around a moment.
pub(crate) fn around(at: Instant, distance: Duration) -> (Instant, Instant) {
    (at.checked_sub(distance).unwrap_or(at), at + distance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_apart_by_weights_lives_and_time() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let life = |name: &str| (WorkerId::new(name), WorkerEpoch(1));
        let mut failures = Failures::default();
        failures.add(life("a"), Bytes::from_static(b"x"), at(10));
        failures.add(life("b"), Bytes::from_static(b"x"), at(12));
        failures.add(life("c"), Bytes::from_static(b"y"), at(20));
        assert_eq!(failures.last(b"x"), Some(at(12)));
        assert_eq!(failures.last(b"z"), None);
        let check = |lives: &[&str], from, to, expected: bool| {
            let lives: Vec<_> = lives.iter().map(|name| life(name)).collect();
            let got = failures.any_beside(b"x", &lives, at(from), at(to));
            assert_eq!(got, expected, "{lives:?} from {from} to {to}");
        };
        check(&["a"], 9, 11, false);
        check(&["a"], 9, 12, true);
        check(&["a", "b"], 0, 30, false);
        check(&[], 13, 30, false);
        assert_eq!(around(at(10), Duration::from_secs(3)), (at(7), at(13)));
    }
}
