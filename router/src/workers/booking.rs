//! A request's claim on a worker, from the pick to its end.

use std::sync::Arc;

use thalweg_cache_index::{Expectation, Replica};

use super::Workers;
use super::in_flight::OnWorker;
use super::load::Weight;
use super::worker::Worker;

/// A booking. Dropping it takes it off the worker's load and lets the next request in.
pub struct Booking {
    worker: Arc<Worker>,
    number: u64,
    registry: Arc<Workers>,
    expected: Option<(Arc<Replica>, Expectation)>,
}

impl Booking {
    pub(super) fn new(registry: Arc<Workers>, worker: Arc<Worker>, number: u64, weight: Weight) -> Self {
        worker.book(number, weight);
        Self { worker, number, registry, expected: None }
    }

    /// On whom.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// Its number, unique within this router.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The blocks that this booking will bring are expected from now on.
    pub fn set_expected(&mut self, replica: Arc<Replica>, expectation: Expectation) {
        self.expected = Some((replica, expectation));
    }

    /// What the worker runs for it.
    pub(crate) fn runs(&self, prompt: OnWorker) {
        self.worker.add_in_flight(self.number, prompt);
    }

    /// It has brought tokens enough to show that it does no harm at once.
    pub(crate) fn proven(&self) {
        self.worker.proven(self.number);
    }

    /// The prefill was done: what was expected is true, and lapses by itself once the worker has said so.
    pub fn prefilled(&mut self) {
        self.expected = None;
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.worker.unbook(self.number);
        if let Some((replica, expectation)) = self.expected.take() {
            replica.withdraw(expectation);
        }
        self.registry.room_changed();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;
    use crate::workers::testing;

    #[tokio::test]
    async fn dropping_a_booking_undoes_it_and_what_it_made_expected() {
        let replica = Arc::new(Replica::default());
        let now = Instant::now();
        let (workers, worker, holder) = testing::worker(&replica, now);

        let before = (worker.load().waiting, worker.load().prefill_tokens_ahead);
        let weight = Weight { sequences: 1, prefill_tokens: 32, kv_blocks: 2 };
        let mut booking = workers.book(&worker, weight);
        let expectation =
            replica.expect(holder, Arc::from([1, 2]), now, now + Duration::from_secs(5)).unwrap();
        booking.set_expected(Arc::clone(&replica), expectation);
        assert_eq!((worker.load().waiting, worker.open_bookings()), (1, 1));
        assert_eq!(replica.lookup(&[1, 2, 3], now).blocks(holder), 2);
        drop(booking);
        let after = (worker.load().waiting, worker.load().prefill_tokens_ahead);
        assert_eq!((after, worker.open_bookings()), (before, 0));
        assert_eq!(replica.lookup(&[1, 2, 3], now).blocks(holder), 0);
        // The gate is told that there is room again.
        workers.room_change().await;
    }
}
