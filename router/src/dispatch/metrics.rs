//! What is counted of answers that one worker began and another one continued.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::metrics::FAILURES;

/// Resumes and the pauses that clients see.
pub(crate) struct ResumeMetrics {
    resumes: Family<ReasonLabel, Counter>,
    pause: Histogram,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

impl ResumeMetrics {
    pub(crate) fn register(registry: &mut Registry) -> Self {
        // A millisecond to two minutes.
        let pause = Histogram::new(exponential_buckets(0.001, 2.0, 18));
        let this = Self { resumes: Family::default(), pause };
        for reason in FAILURES {
            this.resumes.get_or_create_owned(&ReasonLabel { reason });
        }
        let help = "Begun answers that another worker took, by how the one before failed";
        registry.register("resumes", help, this.resumes.clone());
        let help = "Seconds from the loss of a worker to the next token of another one";
        registry.register("resume_pause_seconds", help, this.pause.clone());
        this
    }

    /// Another worker has taken a begun answer.
    pub(super) fn began(&self, reason: &'static str) {
        self.resumes.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// It goes on.
    pub(super) fn resumed(&self, pause: Duration) {
        self.pause.observe(pause.as_secs_f64());
    }
}
