//! Which bookings of which router the load includes.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Routers that are remembered; beyond them the one heard of least recently is forgotten.
const ROUTERS_MAX: usize = 256;

/// Highest booking number per router.
#[derive(Debug, Default)]
pub(super) struct Bookings {
    highest: Arc<BTreeMap<String, u64>>,
    /// Least recent first.
    recency: Vec<String>,
}

impl Bookings {
    /// A request with this booking number is in the queue.
    pub(super) fn note(&mut self, router: &str, booking: u64) {
        let highest = Arc::make_mut(&mut self.highest);
        match highest.get_mut(router) {
            Some(known) => *known = booking.max(*known),
            None => drop(highest.insert(router.to_owned(), booking)),
        }
        self.recency.retain(|name| name != router);
        self.recency.push(router.to_owned());
        if self.recency.len() > ROUTERS_MAX {
            highest.remove(&self.recency.remove(0));
        }
    }

    pub(super) fn highest(&self) -> Arc<BTreeMap<String, u64>> {
        self.highest.clone()
    }
}
