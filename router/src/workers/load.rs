//! A worker's load as this router sees it: its last report, and the bookings that the report does not include.

use std::collections::BTreeMap;

use thalweg_proto::v1;
use tokio::time::Instant;

/// What a worker was given lately fades to a third in this time.
const RECENT_SECONDS: f64 = 10.0;

/// What a booking adds to a worker's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// Choices.
    pub sequences: u32,
    /// Prompt tokens to compute, as predicted.
    pub prefill_tokens: u64,
    /// KV blocks that the prompt will take anew.
    pub kv_blocks: u64,
}

/// Report and bookings of one life of a worker.
#[derive(Debug, Default)]
pub struct LoadBook {
    report: v1::LoadReport,
    /// Highest booking of this router that the report includes.
    included: u64,
    bookings: BTreeMap<u64, Weight>,
    recent: RecentSequences,
}

/// Most sequences lately, fading by time.
#[derive(Debug, Default)]
struct RecentSequences {
    present: f64,
    peak: Option<(Instant, f64)>,
}

/// The sums.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadView {
    /// Sequences that decode.
    pub running: u32,
    /// Sequences that wait there, or were booked since.
    pub waiting: u32,
    /// Of these, those that a request which comes now would wait for.
    pub waiting_ahead: u32,
    /// Most sequences that it had lately, fading; never less than it has now.
    pub recent_sequences: f64,
    /// Prompt tokens to compute.
    pub prefill_tokens_ahead: u64,
    /// Context tokens of the running sequences.
    pub running_context_tokens: u64,
    /// KV blocks that are free or could be.
    pub kv_blocks_available: u64,
}

impl LoadView {
    fn sequences(&self) -> f64 {
        f64::from(self.running) + f64::from(self.waiting)
    }

    /// Sequences that have a slot, or will have one before a request that comes now.
    pub(crate) fn ahead(&self) -> u32 {
        self.running.saturating_add(self.waiting_ahead)
    }
}

impl LoadBook {
    /// Of a worker with so many KV blocks that has not reported yet: all of them are taken to be free.
    pub fn new(kv_blocks: u64) -> Self {
        let report =
            v1::LoadReport { kv_blocks_total: kv_blocks, kv_blocks_free: kv_blocks, ..Default::default() };
        Self { report, ..Self::default() }
    }

    /// Takes in a report; `router_id` tells which echo is ours.
    pub fn report(&mut self, report: v1::LoadReport, router_id: &str, now: Instant) {
        self.included = report.booked.get(router_id).copied().unwrap_or(0);
        self.report = report;
        self.changed(now);
    }

    /// The last report.
    pub fn last_report(&self) -> &v1::LoadReport {
        &self.report
    }

    /// Adds a booking; numbers rise.
    pub fn book(&mut self, number: u64, weight: Weight, now: Instant) {
        self.bookings.insert(number, weight);
        self.changed(now);
    }

    /// Takes a booking back, whether it was included or not.
    pub fn unbook(&mut self, number: u64, now: Instant) {
        self.bookings.remove(&number);
        self.changed(now);
    }

    /// Bookings that are not undone yet.
    pub fn open_bookings(&self) -> usize {
        self.bookings.len()
    }

    /// The report and every later booking.
    pub fn view(&self, now: Instant) -> LoadView {
        LoadView { recent_sequences: self.recent.at(now), ..self.sums() }
    }

    fn changed(&mut self, now: Instant) {
        self.recent.set(self.sums().sequences(), now);
    }

    fn sums(&self) -> LoadView {
        let report = &self.report;
        let base = LoadView {
            running: report.running,
            waiting: report.waiting,
            waiting_ahead: report.waiting_ahead.unwrap_or(report.waiting),
            recent_sequences: 0.0,
            prefill_tokens_ahead: report.prefill_tokens_ahead,
            running_context_tokens: report.running_context_tokens,
            kv_blocks_available: report.kv_blocks_free.saturating_add(report.kv_blocks_cached),
        };
        let later = self.bookings.range(self.included.saturating_add(1)..);
        later.fold(base, |view, (_, weight)| LoadView {
            waiting: view.waiting.saturating_add(weight.sequences),
            waiting_ahead: view.waiting_ahead.saturating_add(weight.sequences),
            prefill_tokens_ahead: view.prefill_tokens_ahead.saturating_add(weight.prefill_tokens),
            kv_blocks_available: view.kv_blocks_available.saturating_sub(weight.kv_blocks),
            ..view
        })
    }
}

impl RecentSequences {
    fn at(&self, now: Instant) -> f64 {
        let Some((since, sequences)) = self.peak else { return self.present };
        let seconds = now.saturating_duration_since(since).as_secs_f64();
        self.present.max(sequences * (-seconds / RECENT_SECONDS).exp())
    }

    fn set(&mut self, sequences: f64, now: Instant) {
        self.peak = Some((now, self.at(now).max(sequences)));
        self.present = sequences;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const WEIGHT: Weight = Weight { sequences: 2, prefill_tokens: 100, kv_blocks: 7 };

    fn report(echo: Option<u64>) -> v1::LoadReport {
        v1::LoadReport {
            running: 3,
            waiting: 1,
            prefill_tokens_ahead: 50,
            kv_blocks_free: 10,
            kv_blocks_cached: 5,
            booked: echo
                .into_iter()
                .map(|n| ("me".to_owned(), n))
                .chain([("other".to_owned(), 99)])
                .collect(),
            ..Default::default()
        }
    }

    #[test]
    fn only_bookings_that_the_report_lacks_are_added() {
        let check = |echo, expected: (u32, u64, u64)| {
            let (mut book, now) = (LoadBook::default(), Instant::now());
            (4..=6).for_each(|number| book.book(number, WEIGHT, now));
            book.report(report(echo), "me", now);
            let view = book.view(now);
            let got = (view.waiting, view.prefill_tokens_ahead, view.kv_blocks_available);
            assert_eq!(got, expected, "echo {echo:?}");
            assert_eq!(view.running, 3);
        };
        check(None, (7, 350, 0));
        check(Some(4), (5, 250, 1));
        check(Some(5), (3, 150, 8));
        check(Some(6), (1, 50, 15));
        check(Some(7), (1, 50, 15));
    }

    #[test]
    fn who_waits_ahead_is_told_by_workers_that_know() {
        let check = |waiting_ahead, expected: u32| {
            let (mut book, now) = (LoadBook::default(), Instant::now());
            book.report(v1::LoadReport { waiting: 60, waiting_ahead, ..report(None) }, "me", now);
            let view = book.view(now);
            assert_eq!((view.waiting, view.ahead()), (60, 3 + expected));
        };
        check(None, 60);
        check(Some(2), 2);
    }

    #[test]
    fn before_its_first_report_a_worker_has_all_its_blocks() {
        let (mut book, now) = (LoadBook::new(20), Instant::now());
        assert_eq!(book.view(now).kv_blocks_available, 20);
        book.book(1, WEIGHT, now);
        assert_eq!(book.view(now).kv_blocks_available, 13);
        book.report(report(None), "me", now);
        assert_eq!(book.view(now).kv_blocks_available, 8);
    }

    #[test]
    fn an_undone_booking_leaves_nothing() {
        let (mut book, now) = (LoadBook::default(), Instant::now());
        book.report(report(Some(4)), "me", now);
        let before = book.view(now);
        book.book(5, WEIGHT, now);
        assert_ne!(book.view(now), before);
        book.unbook(5, now);
        book.unbook(5, now);
        let after = LoadView { recent_sequences: before.recent_sequences, ..book.view(now) };
        assert_eq!((after, book.open_bookings()), (before, 0));
    }

    #[test]
    fn what_a_worker_had_lately_fades() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut book = LoadBook::default();
        let check = |book: &LoadBook, seconds, expected: f64| {
            let got = book.view(at(seconds)).recent_sequences;
            assert!((got - expected).abs() < 1e-6, "after {seconds} s: {got}");
        };
        check(&book, 0.0, 0.0);
        book.report(report(None), "me", at(0.0));
        book.book(1, WEIGHT, at(1.0));
        check(&book, 1.0, 6.0);
        book.unbook(1, at(2.0));
        check(&book, 2.0, 6.0);
        check(&book, 3.0, 6.0 * (-0.1f64).exp());
        check(&book, 1_000.0, 4.0);
        book.report(v1::LoadReport::default(), "me", at(1_000.0));
        check(&book, 1_000.0 + RECENT_SECONDS, 4.0 * (-1f64).exp());
    }
}
