//! Whether a worker may be given work: a pure function of what was heard of it and when.

use std::time::Duration;

use tokio::time::Instant;

/// Silence after which a worker gets no new work: four missed heartbeats.
pub const SUSPECT_AFTER: Duration = Duration::from_secs(1);
/// Silence after which its streams are given up.
pub const GONE_AFTER: Duration = Duration::from_secs(3);
/// A step counter that stands still for so long with work queued belongs to a hung worker.
pub const FROZEN_AFTER: Duration = Duration::from_secs(10);

/// Where a worker stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthState {
    /// Takes work.
    Ready,
    /// Perhaps in trouble: keeps its streams, gets nothing new.
    Suspect,
    /// Going away in order: finishes its streams, gets nothing new.
    Draining,
    /// Given up: its streams continue elsewhere. A report brings it back.
    Gone,
}

impl HealthState {
    /// Every state, for metrics.
    pub const ALL: [Self; 4] = [Self::Ready, Self::Suspect, Self::Draining, Self::Gone];

    /// Name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Gone => "gone",
        }
    }
}

/// What is heard of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// A load report.
    Report {
        /// It says that it drains.
        draining: bool,
        /// Its step counter.
        steps: u64,
        /// It runs or holds work.
        busy: bool,
    },
    /// The report stream or the connection broke.
    Lost,
    /// Another life of the worker answers at its address.
    Replaced,
    /// Membership says that it takes no new work, or that it does again.
    Withdrawn(bool),
}

/// What was heard of one life of a worker.
#[derive(Clone, Debug)]
pub struct Health {
    heard: Instant,
    reported: bool,
    connected: bool,
    draining: bool,
    withdrawn: bool,
    busy: bool,
    steps: u64,
    /// Since when the step counter stands still with work queued.
    standing_since: Instant,
    replaced: bool,
}

impl Health {
    /// A worker that has just described itself; it becomes ready with its first report.
    pub fn new(now: Instant) -> Self {
        Self {
            heard: now,
            reported: false,
            connected: true,
            draining: false,
            withdrawn: false,
            busy: false,
            steps: 0,
            standing_since: now,
            replaced: false,
        }
    }

    /// For this long we ourselves did not listen: not the worker's silence.
    pub fn forgive(&mut self, stall: Duration) {
        self.heard += stall;
        self.standing_since += stall;
    }

    /// Takes in an event.
    pub fn on(&mut self, event: HealthEvent, now: Instant) {
        match event {
            HealthEvent::Lost => self.connected = false,
            HealthEvent::Replaced => self.replaced = true,
            HealthEvent::Withdrawn(withdrawn) => self.withdrawn = withdrawn,
            HealthEvent::Report { draining, steps, busy } => {
                if steps != self.steps || !busy || !self.busy {
                    self.standing_since = now;
                }
                (self.heard, self.reported, self.connected) = (now, true, true);
                (self.draining, self.steps, self.busy) = (draining, steps, busy);
            }
        }
    }

    /// Where it stands at `now`.
    pub fn state(&self, now: Instant) -> HealthState {
        let silent = now.saturating_duration_since(self.heard);
        let frozen = self.busy && now.saturating_duration_since(self.standing_since) >= FROZEN_AFTER;
        if self.replaced || silent >= GONE_AFTER || frozen {
            HealthState::Gone
        } else if !self.reported || !self.connected || silent >= SUSPECT_AFTER {
            HealthState::Suspect
        } else if self.draining || self.withdrawn {
            HealthState::Draining
        } else {
            HealthState::Ready
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HealthState::*;
    use super::*;

    fn report(steps: u64, busy: bool) -> HealthEvent {
        HealthEvent::Report { draining: false, steps, busy }
    }

    /// Events and checks by the millisecond at which they happen.
    fn check(name: &str, events: &[(u64, HealthEvent)], expected: &[(u64, HealthState)]) {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for &(when, state) in expected {
            let mut health = Health::new(start);
            events.iter().filter(|(ms, _)| *ms <= when).for_each(|(ms, event)| health.on(*event, at(*ms)));
            assert_eq!(health.state(at(when)), state, "{name}, at {when} ms");
        }
    }

    #[test]
    fn states_follow_from_events_and_time() {
        check("never reported", &[], &[(0, Suspect), (2_999, Suspect), (3_000, Gone)]);
        check(
            "falls silent",
            &[(100, report(0, false))],
            &[(99, Suspect), (100, Ready), (1_099, Ready), (1_100, Suspect), (3_099, Suspect), (3_100, Gone)],
        );
        check(
            "comes back",
            &[(0, report(0, false)), (5_000, report(0, false))],
            &[(4_999, Gone), (5_000, Ready)],
        );
        check(
            "connection breaks and is made anew",
            &[(0, report(0, false)), (10, HealthEvent::Lost), (500, report(0, false))],
            &[(9, Ready), (10, Suspect), (499, Suspect), (500, Ready)],
        );
        check(
            "connection breaks for good",
            &[(0, report(0, false)), (900, HealthEvent::Lost)],
            &[(2_999, Suspect), (3_000, Gone)],
        );
        check(
            "another life has begun",
            &[(0, report(0, false)), (10, HealthEvent::Replaced), (20, report(0, false))],
            &[(9, Ready), (10, Gone), (20, Gone)],
        );
        let drains = HealthEvent::Report { draining: true, steps: 1, busy: true };
        check("drains", &[(0, report(0, true)), (10, drains)], &[(10, Draining), (1_010, Suspect)]);
        let withdrawn =
            [(0, HealthEvent::Withdrawn(true)), (5, report(0, true)), (9, HealthEvent::Withdrawn(false))];
        check("withdrawn by membership", &withdrawn, &[(4, Suspect), (5, Draining), (9, Ready)]);
    }

    #[test]
    fn our_own_stall_is_not_the_workers_silence() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut health = Health::new(start);
        health.on(report(1, true), start);
        health.forgive(Duration::from_millis(4_500));
        assert_eq!((health.state(at(5_000)), health.state(at(5_500))), (Ready, Suspect));
    }

    #[test]
    fn a_frozen_step_counter_is_told_from_idleness() {
        let every = |until: u64, event: fn(u64) -> HealthEvent| -> Vec<(u64, HealthEvent)> {
            (0..=until).step_by(250).map(|ms| (ms, event(ms))).collect()
        };
        check("hung", &every(12_000, |_| report(7, true)), &[(9_999, Ready), (10_000, Gone)]);
        check("idle for long", &every(60_000, |_| report(7, false)), &[(60_000, Ready)]);
        check("slow steps", &every(60_000, |ms| report(ms / 9_000, true)), &[(60_000, Ready)]);
        check(
            "work after long idleness",
            &every(40_000, |ms| report(7, ms >= 30_000)),
            &[(39_999, Ready), (40_000, Gone)],
        );
        check(
            "hung, then moves",
            &every(20_000, |ms| report(ms / 15_000, true)),
            &[(14_999, Gone), (15_000, Ready)],
        );
    }
}
