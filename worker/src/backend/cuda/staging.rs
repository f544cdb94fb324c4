//! What travels between host and GPU each step: metadata in, results out, two of each so that a step is prepared while another
//! runs.

use std::sync::Arc;

use thalweg_model::config::ModelConfig;

use super::abi::{
    COUNTS, N_DECODE, N_LOGIT_ROWS, N_MERGE, N_POOLED, N_SHARED, N_SLOT_INITS, N_SPLIT, N_TOKENS, N_WHOLE,
    Plain, bytes_of,
};
use super::buffers::result_bytes;
use super::config::{CudaBackendConfig, vector_bytes};
use super::context::{Event, Gpu, Stream};
use super::error::CudaError;
use super::kernels::Kernels;
use super::launch::Launcher;
use super::layout::{Layout, largest};
use super::memory::{Address, DeviceMemory, Pinned};
use super::slots::SlotArrays;
use super::step::{Step, Wanted};
use crate::runner::STEPS_IN_FLIGHT_MAX;

/// Buffers of the steps in flight.
#[derive(Debug)]
pub(super) struct Staging {
    step: DeviceMemory,
    results: DeviceMemory,
    vectors: DeviceMemory,
    /// Bytes of one of them.
    vector_bytes: usize,
    sides: [Side; STEPS_IN_FLIGHT_MAX],
    /// Side of the step in work.
    current: usize,
}

/// The host's part of one step.
#[derive(Debug)]
struct Side {
    step: Pinned,
    results: Pinned,
    vectors: Pinned,
    begun: Event,
    ended: Event,
}

/// A step that was enqueued and not yet collected.
#[derive(Debug)]
pub(super) struct InFlight {
    side: usize,
    pub(super) wanted: Vec<Wanted>,
    pub(super) embedded: Vec<usize>,
    pub(super) rows: usize,
}

impl Staging {
    pub(super) fn new(
        gpu: &Arc<Gpu>,
        model: &ModelConfig,
        config: &CudaBackendConfig,
        partials: usize,
    ) -> Result<Self, CudaError> {
        let bytes = Layout::new(&largest(config, partials)).bytes;
        let results = result_bytes(config.max_tokens_per_step);
        let vectors = vector_bytes(model, config);
        let side = || {
            Ok::<_, CudaError>(Side {
                step: Pinned::new(gpu, bytes as usize)?,
                results: Pinned::new(gpu, results)?,
                vectors: Pinned::new(gpu, vectors as usize)?,
                begun: Event::new(gpu)?,
                ended: Event::new(gpu)?,
            })
        };
        Ok(Self {
            step: DeviceMemory::new(gpu, bytes, "steps")?,
            results: DeviceMemory::new(gpu, results as u64, "results")?,
            vectors: DeviceMemory::new(gpu, vectors, "embeddings")?,
            vector_bytes: 4 * model.hidden_size,
            sides: [side()?, side()?],
            current: 0,
        })
    }

    /// Where the step buffer begins on the GPU.
    pub(super) fn address(&self) -> Address {
        self.step.address()
    }

    /// Where results stand on the GPU.
    pub(super) fn results(&self) -> Address {
        self.results.address()
    }

    /// Where vectors of pooled states stand on the GPU.
    pub(super) fn vectors(&self) -> Address {
        self.vectors.address()
    }

    /// Marks where the step in work begins.
    pub(super) fn begin(&self, stream: &Stream) -> Result<(), CudaError> {
        self.sides[self.current].begun.record(stream)
    }

    /// Enqueues the copy of a step, with these new slots. The side is free: the step that used it last has been collected.
    pub(super) fn send(
        &mut self,
        (kernels, to): (&Kernels, Launcher<'_>),
        layout: &Layout,
        step: &Step,
        slots: &SlotArrays,
    ) -> Result<(), CudaError> {
        let pinned = &mut self.sides[self.current].step;
        fill(pinned, layout, step, slots);
        // SAFETY: both have room for the largest step; the side stays as it is until the step has been collected.
        unsafe { kernels.copy_words(to, [pinned.address(), self.step.address()], layout.bytes as usize) }
    }

    /// A step of nothing, for recording.
    pub(super) fn clear_counts(&self, stream: &Stream) -> Result<(), CudaError> {
        self.step.fill(stream, 0)?;
        stream.synchronize()
    }

    /// Enqueues the copy of the step's results; it is in flight then.
    pub(super) fn end(
        &mut self,
        (kernels, to): (&Kernels, Launcher<'_>),
        step: &mut Step,
    ) -> Result<InFlight, CudaError> {
        let (wanted, embedded) = (std::mem::take(&mut step.wanted), std::mem::take(&mut step.embedded));
        let side = &mut self.sides[self.current];
        let places = [self.results.address(), side.results.address()];
        // SAFETY: both have room for the largest step; nobody reads the side until the step has been waited for.
        unsafe { kernels.copy_words(to, places, result_bytes(wanted.len())) }?;
        self.vectors.copy_to(to.stream, 0, &mut side.vectors[..self.vector_bytes * embedded.len()])?;
        side.ended.record(to.stream)?;
        let in_flight = InFlight { side: self.current, wanted, embedded, rows: step.rows.len() };
        self.current = (self.current + 1) % STEPS_IN_FLIGHT_MAX;
        Ok(in_flight)
    }

    /// Waits for a step; its seconds on the GPU.
    pub(super) fn wait(&self, step: &InFlight, timeout: std::time::Duration) -> Result<f64, CudaError> {
        let side = &self.sides[step.side];
        side.ended.wait(timeout)?;
        side.ended.seconds_since(&side.begun)
    }

    /// Results of a step that was waited for.
    pub(super) fn results_of(&self, step: &InFlight) -> &[u8] {
        &self.sides[step.side].results
    }

    /// Its vectors of pooled states.
    pub(super) fn vectors_of(&self, step: &InFlight) -> &[u8] {
        &self.sides[step.side].vectors[..self.vector_bytes * step.embedded.len()]
    }
}

/// Writes a step, with these new slots, as the kernels read it.
pub(super) fn fill(to: &mut [u8], layout: &Layout, step: &Step, slots: &SlotArrays) {
    put(to, layout.counts, &counts(step, slots));
    put(to, layout.token_src, &step.token_src);
    put(to, layout.positions, &step.positions);
    put(to, layout.rows, &step.rows);
    put(to, layout.logit_rows, &step.logit_rows);
    put(to, layout.pooled, &step.pooled);
    put(to, layout.tables, &step.tables);
    for (group, items) in step.items.iter().enumerate() {
        put(to, layout.places[group], &step.places[group]);
        put(to, layout.split[group], &items.split);
        put(to, layout.decode[group], &items.decode);
        put(to, layout.shared[group], &items.shared);
        put(to, layout.merge[group], &items.merge);
        put(to, layout.whole[group], &items.whole);
    }
    put(to, layout.starts, &slots.starts);
    put(to, layout.start_tokens, &slots.tokens);
    put(to, layout.start_bias, &slots.bias);
    put(to, layout.start_ends, &slots.ends);
}

fn put<T: Plain>(to: &mut [u8], offset: u64, values: &[T]) {
    let bytes = bytes_of(values);
    to[offset as usize..][..bytes.len()].copy_from_slice(bytes);
}

fn counts(step: &Step, slots: &SlotArrays) -> [i32; COUNTS] {
    let mut counts = [0; COUNTS];
    counts[N_TOKENS] = step.token_src.len() as i32;
    counts[N_LOGIT_ROWS] = step.logit_rows.len() as i32;
    counts[N_POOLED] = step.pooled.len() as i32;
    counts[N_SLOT_INITS] = slots.starts.len() as i32;
    for (group, items) in step.items.iter().enumerate() {
        counts[N_SPLIT + group] = items.split.len() as i32;
        counts[N_DECODE + group] = items.decode.len() as i32;
        counts[N_SHARED + group] = items.shared.len() as i32;
        counts[N_MERGE + group] = items.merge.len() as i32;
        counts[N_WHOLE + group] = items.whole.len() as i32;
    }
    counts
}
