//! What the store counts.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Responses that were to be kept.
pub(crate) struct StoreMetrics {
    kept: Counter,
    not_kept: Family<NotKeptLabel, Counter>,
}

/// Why one was not.
#[derive(Clone, Copy, Debug)]
pub(super) enum NotKept {
    TooLarge,
    StoreFailed,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct NotKeptLabel {
    reason: &'static str,
}

impl NotKept {
    fn as_str(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::StoreFailed => "store_failed",
        }
    }
}

impl StoreMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let this = Self { kept: Counter::default(), not_kept: Family::default() };
        for reason in [NotKept::TooLarge, NotKept::StoreFailed] {
            drop(this.not_kept.get_or_create(&NotKeptLabel { reason: reason.as_str() }));
        }
        registry.register(
            "responses_kept",
            "Responses kept to be continued or read again",
            this.kept.clone(),
        );
        let help = "Responses that were answered and should have been kept but were not";
        registry.register("responses_not_kept", help, this.not_kept.clone());
        this
    }

    pub(super) fn kept(&self) {
        self.kept.inc();
    }

    pub(super) fn not_kept(&self, reason: NotKept) {
        self.not_kept.get_or_create(&NotKeptLabel { reason: reason.as_str() }).inc();
    }
}
