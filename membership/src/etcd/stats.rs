//! Counters of one process's dealings with etcd, for its metrics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// How things stand; all zero for a membership that cannot fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MembershipStats {
    /// etcd does not answer, or our lease is not known to live: the last known members are used.
    pub degraded: bool,
    /// Full lists read because a watch broke, fell behind a compaction, or could not be opened.
    pub relists: u64,
    /// Leases that etcd said to have expired or been revoked while we lived.
    pub lease_losses: u64,
    /// Values that could not be read; each change of a value counts once.
    pub malformed: u64,
}

impl MembershipStats {
    /// The text of /metrics with our lines at its end, before the end mark where there is one.
    pub fn add_to(&self, mut metrics: String) -> String {
        const END: &str = "# EOF\n";
        let is_marked = metrics.ends_with(END);
        if is_marked {
            metrics.truncate(metrics.len() - END.len());
        }
        metrics.push_str(&self.exposition());
        if is_marked {
            metrics.push_str(END);
        }
        metrics
    }

    /// Our lines, in Prometheus' text format.
    pub fn exposition(&self) -> String {
        let lines = [
            (
                "degraded",
                "gauge",
                "1 while etcd does not answer or our lease there may have lapsed",
                u64::from(self.degraded),
            ),
            ("relists_total", "counter", "Full lists read from etcd after a break", self.relists),
            (
                "lease_losses_total",
                "counter",
                "Leases that etcd said to be gone while this process lived",
                self.lease_losses,
            ),
            (
                "malformed_values_total",
                "counter",
                "Members' values in etcd that could not be read",
                self.malformed,
            ),
        ];
        let line = |(name, kind, help, value): (&str, &str, &str, u64)| {
            let family = format!("thalweg_membership_{}", name.trim_end_matches("_total"));
            format!("# HELP {family} {help}\n# TYPE {family} {kind}\nthalweg_membership_{name} {value}\n")
        };
        lines.map(line).concat()
    }
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    watch_degraded: AtomicBool,
    lease_degraded: AtomicBool,
    relists: AtomicU64,
    lease_losses: AtomicU64,
    malformed: AtomicU64,
}

impl Counters {
    pub(super) fn stats(&self) -> MembershipStats {
        MembershipStats {
            degraded: self.watch_degraded.load(Ordering::Relaxed)
                || self.lease_degraded.load(Ordering::Relaxed),
            relists: self.relists.load(Ordering::Relaxed),
            lease_losses: self.lease_losses.load(Ordering::Relaxed),
            malformed: self.malformed.load(Ordering::Relaxed),
        }
    }

    /// Returns whether that is news.
    pub(super) fn watch_degraded(&self, degraded: bool) -> bool {
        self.watch_degraded.swap(degraded, Ordering::Relaxed) != degraded
    }

    /// Returns whether that is news.
    pub(super) fn lease_degraded(&self, degraded: bool) -> bool {
        self.lease_degraded.swap(degraded, Ordering::Relaxed) != degraded
    }

    pub(super) fn relisted(&self) {
        self.relists.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn lease_lost(&self) {
        self.lease_losses.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn malformed(&self) {
        self.malformed.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_for_prometheus_names_each_figure() {
        let counters = Counters::default();
        assert!(counters.lease_degraded(true) && !counters.lease_degraded(true));
        counters.relisted();
        counters.relisted();
        counters.malformed();
        let text = counters.stats().exposition();
        let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        let expected = [
            "thalweg_membership_degraded 1",
            "thalweg_membership_relists_total 2",
            "thalweg_membership_lease_losses_total 0",
            "thalweg_membership_malformed_values_total 1",
        ];
        assert_eq!(samples, expected);
        assert!(text.contains("# TYPE thalweg_membership_relists counter\n"));
        assert_eq!(counters.stats().add_to("a 1\n".to_owned()), format!("a 1\n{text}"));
        assert_eq!(counters.stats().add_to("a 1\n# EOF\n".to_owned()), format!("a 1\n{text}# EOF\n"));
        counters.watch_degraded(true);
        counters.lease_degraded(false);
        assert!(counters.stats().degraded);
    }
}
