//! When a lease must be renewed: counted from the moment at which the last renewal that was granted had been sent, since
//! etcd counts from a later one. Pure; time comes in.

use std::time::Duration;

use tokio::time::Instant;

/// Part of what is left until the deadline that passes before the next try: tries come closer and closer.
const SHARE: u32 = 3;
/// Least pause before a try.
const PAUSE_MIN: Duration = Duration::from_millis(200);
/// Pause where the lease may have lapsed already.
const PAUSE_OVERDUE: Duration = Duration::from_millis(500);
/// Least time of a try: slow disks take that long.
const TRY_MIN: Duration = Duration::from_millis(400);
/// Longest time of a try, so that a dead endpoint is left in time for the next one.
const TRY_MAX: Duration = Duration::from_secs(2);

/// A lease as we know it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) id: i64,
    /// Not before then does etcd let it lapse.
    deadline: Instant,
    next_try: Instant,
}

impl Lease {
    /// A lease whose grant was sent at `sent`.
    pub(super) fn granted(id: i64, ttl: Duration, sent: Instant) -> Self {
        let (deadline, next_try) = (sent + ttl, sent + ttl / SHARE);
        Self { id, deadline, next_try }
    }

    /// A renewal that was sent at `sent` was granted.
    pub(super) fn renewed(&mut self, ttl: Duration, sent: Instant) {
        *self = Self::granted(self.id, ttl, sent);
    }

    /// A renewal failed at `now`: sooner again, the nearer the deadline is. Behind it a steady pause.
    pub(super) fn failed(&mut self, now: Instant) {
        let pause = if self.overdue(now) { PAUSE_OVERDUE } else { (self.left(now) / SHARE).max(PAUSE_MIN) };
        self.next_try = now + pause;
    }

    /// When to renew.
    pub(super) fn next_try(&self) -> Instant {
        self.next_try
    }

    /// What a renewal that begins at `now` may take.
    pub(super) fn try_limit(&self, now: Instant) -> Duration {
        if self.overdue(now) { TRY_MAX } else { (self.left(now) / SHARE).clamp(TRY_MIN, TRY_MAX) }
    }

    /// It may have lapsed.
    pub(super) fn overdue(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    fn left(&self, now: Instant) -> Duration {
        self.deadline.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tries_come_closer_as_the_deadline_does() {
        let start = Instant::now();
        let ttl = Duration::from_secs(9);
        let mut lease = Lease::granted(1, ttl, start);
        let (mut tries, mut now) = (Vec::new(), start);
        while !lease.overdue(now) {
            now = lease.next_try();
            tries.push((now - start).as_millis());
            lease.failed(now);
        }
        assert_eq!(tries[..5], [3000, 5000, 6333, 7222, 7814]);
        assert!(tries.len() > 8 && tries.windows(2).all(|pair| pair[1] - pair[0] >= 200), "{tries:?}");
        assert!(tries.iter().filter(|at| **at < 9000).count() >= 7, "{tries:?}");
    }

    #[test]
    fn a_renewal_counts_from_when_it_was_sent() {
        let start = Instant::now();
        let seconds = Duration::from_secs;
        let mut lease = Lease::granted(1, seconds(6), start);
        // Sent at 2, answered at 5: etcd's clock began somewhere between.
        lease.renewed(seconds(6), start + seconds(2));
        assert_eq!(lease.next_try(), start + seconds(4));
        assert!(!lease.overdue(start + Duration::from_millis(7999)) && lease.overdue(start + seconds(8)));
        assert_eq!(lease.try_limit(start + seconds(5)), seconds(1));
        assert_eq!(lease.try_limit(start + Duration::from_millis(7500)), TRY_MIN);
        assert_eq!(lease.try_limit(start + seconds(8)), TRY_MAX);
        lease.failed(start + seconds(20));
        assert_eq!(lease.next_try(), start + seconds(20) + PAUSE_OVERDUE);
    }
}
