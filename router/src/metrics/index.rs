//! How the cache index fares, as far as this router is concerned; copied in when someone looks.

use std::sync::atomic::Ordering;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thalweg_cache_index::IndexStats;

type Figure = fn(&IndexStats) -> u64;

/// Figures of the index; all well and zero where it is in memory.
pub(crate) struct IndexMetrics {
    gauges: [(Gauge, Figure); 4],
    counters: [(Counter, Figure); 5],
}

impl IndexMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let mut gauge = |name: &str, help: &str, of: Figure| {
            let gauge = Gauge::default();
            registry.register(name, help, gauge.clone());
            (gauge, of)
        };
        let help = "1 while the cache index is out of reach: routing goes on with what was known of prefixes";
        let degraded = gauge("index_degraded", help, |stats| stats.degraded.into());
        let help = "1 once what the cache index held at the start was read";
        let bootstrapped = gauge("index_bootstrapped", help, |stats| stats.bootstrapped.into());
        let help = "Workers of which nothing was heard in their present life, or of which events were missed";
        let behind = gauge("index_workers_behind", help, |stats| stats.workers_behind as u64);
        let help =
            "Age of the newest batch of cache events when it was taken in, clocks' difference included";
        let lag = gauge("index_lag_milliseconds", help, |stats| stats.lag_ms);
        let mut counter = |name: &str, help: &str, of: Figure| {
            let counter = Counter::default();
            registry.register(name, help, counter.clone());
            (counter, of)
        };
        let counters = [
            counter("index_events_applied", "Block events taken in", |stats| stats.events_applied),
            counter("index_gaps", "Times that events of a worker were missed", |stats| stats.gaps),
            counter("index_snapshots_read", "Workers' snapshots taken in", |stats| stats.snapshots_read),
            counter("index_reconnects", "Connections opened again", |stats| stats.reconnects),
            counter("index_undecodable", "Entries that could not be read", |stats| stats.undecodable),
        ];
        Self { gauges: [degraded, bootstrapped, behind, lag], counters }
    }

    pub(crate) fn set(&self, stats: &IndexStats) {
        for (gauge, of) in &self.gauges {
            gauge.set(of(stats) as i64);
        }
        for (counter, of) in &self.counters {
            counter.inner().store(of(stats), Ordering::Relaxed);
        }
    }
}
