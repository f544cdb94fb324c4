//! Recording of the common steps at start.

use super::device::CudaBackend;
use super::error::CudaError;
use super::graphs::Graph;
use super::layout::Layout;
use super::shape::{Bucket, BucketLimits};
use crate::backend::Backend;
use crate::runner::forward::{layers, operations};

/// A step of some shape: all of it; and in two, where something has to come in between or nothing is drawn.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) whole: Graph,
    pub(super) forward: Graph,
    pub(super) sampling: Graph,
}

impl CudaBackend {
    /// Runs and records every bucket, on steps of nothing.
    pub(super) fn record(&mut self) -> Result<(), CudaError> {
        let limits = self.bucket_limits();
        for bucket in Bucket::all(&limits) {
            self.shape = bucket.shape(&limits);
            self.layout = Layout::new(&self.shape.capacities);
            self.staging.clear_counts(&self.stream)?;
            // Once for real: kernels are loaded, cublasLt's plans are found.
            operations(self);
            self.fault.take().map_or(Ok(()), Err)?;
            self.stream.synchronize()?;
            let whole = self.capture(Self::whole_of)?;
            let forward = self.capture(Self::forward_of)?;
            let sampling = self.capture(Self::sampling_of)?;
            self.graphs.push((bucket, self.shape, Recorded { whole, forward, sampling }));
        }
        self.stream.synchronize()?;
        tracing::debug!(graphs = 3 * self.graphs.len(), "recorded");
        Ok(())
    }

    fn capture(&mut self, part: fn(&mut Self)) -> Result<Graph, CudaError> {
        let stream = self.stream.clone();
        Graph::record(&stream, || {
            part(self);
            self.fault.take().map_or(Ok(()), Err)
        })
    }

    fn whole_of(&mut self) {
        operations(self);
    }

    /// Embedding to logits.
    fn forward_of(&mut self) {
        layers(self);
        self.logits(0);
    }

    fn sampling_of(&mut self) {
        self.sample(0);
    }

    pub(super) fn bucket_limits(&self) -> BucketLimits {
        BucketLimits {
            max_slots: self.config.max_slots,
            max_tokens: self.config.max_tokens_per_step,
            max_model_len: self.config.max_model_len,
            partials: self.limits.partials,
            rows_per_pass: self.rows_per_pass,
            used: self.limits.used,
            runs: self.limits.ways.runs,
            shared: std::array::from_fn(|group| self.limits.shared(group)),
        }
    }
}
