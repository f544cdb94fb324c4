//! A step's way to the GPU, and its results' way back.

use super::abi::bytes_of;
use super::context::Stream;
use super::device::CudaBackend;
use super::error::CudaError;
use super::kernels::SlotsArgs;
use super::launch::Launcher;
use super::layout::{Capacities, Layout, SlotCapacities};
use super::memory::DeviceMemory;
use super::results::{embed, outputs};
use super::slots::SlotArrays;
use super::step::{Step, load_slots, slot_pieces};
use crate::plan::{BlockId, SlotInit, StepOutput, StepPlan};

/// Pairs of blocks of one copy.
const PAIRS_MAX: usize = 4096;

impl CudaBackend {
    /// Enqueues the step's metadata and its new slots. Slots whose tokens are too many for one copy go ahead in several.
    pub(super) fn send(&mut self, plan: &StepPlan, tokens_max: usize) -> Result<(), CudaError> {
        self.staging.begin(&self.stream)?;
        let pieces = slot_pieces(&plan.slots, tokens_max);
        let (last, ahead) = pieces.split_last().map_or((&[][..], &[][..]), |(last, ahead)| (*last, ahead));
        let nothing = Step::default();
        for piece in ahead {
            let slots = self.slot_arrays(piece);
            self.layout = Layout::new(&Capacities { starts: capacities(&slots), ..Capacities::default() });
            self.staging.send((&self.kernels, plain(&self.stream)), &self.layout, &nothing, &slots)?;
            self.start_slots(&slots)?;
            // The next piece takes the same memory.
            self.stream.synchronize()?;
        }
        let slots = self.slot_arrays(last);
        self.shape.capacities.starts = capacities(&slots);
        self.layout = Layout::new(&self.shape.capacities);
        self.staging.send((&self.kernels, plain(&self.stream)), &self.layout, &self.step, &slots)?;
        self.start_slots(&slots)
    }

    /// Enqueues the results' copy; the step is in flight from then on.
    pub(super) fn enqueue_results(&mut self) -> Result<(), CudaError> {
        let step = self.staging.end((&self.kernels, plain(&self.stream)), &mut self.step)?;
        self.in_flight.push_back(step);
        Ok(())
    }

    /// Waits for the oldest step.
    pub(super) fn collect(&mut self) -> Result<StepOutput, CudaError> {
        self.gpu.bind()?;
        let Some(step) = self.in_flight.pop_front() else { return Ok(StepOutput::default()) };
        let seconds = self.staging.wait(&step, self.config.step_timeout)?;
        let mut rows = outputs(step.rows, &step.wanted, self.staging.results_of(&step));
        embed(&mut rows, &step.embedded, self.staging.vectors_of(&step));
        Ok(StepOutput { rows, seconds })
    }

    /// Copies blocks within every layer of a group.
    pub(super) fn copy(&mut self, group: usize, pairs: &[(BlockId, BlockId)]) -> Result<(), CudaError> {
        self.gpu.bind()?;
        let numbers: Vec<[i32; 2]> = pairs.iter().map(|(from, to)| [from.0 as i32, to.0 as i32]).collect();
        for part in numbers.chunks(PAIRS_MAX) {
            let bytes = bytes_of(part);
            let on_gpu = DeviceMemory::new(&self.gpu, bytes.len() as u64, "block copies")?;
            on_gpu.write(&self.stream, 0, bytes)?;
            for layer in 0..self.model.config().num_layers() {
                if super::kv::group_of(self.model.config().layers[layer]) != group {
                    continue;
                }
                let (keys, values) = self.kv.layer(layer);
                let addresses = [keys, values, on_gpu.address()];
                let launcher = plain(&self.stream);
                // SAFETY: blocks lie within the cache as the caller's plan has them; the pairs live until the wait below.
                unsafe { self.kernels.copy_blocks(launcher, addresses, self.kv.block_bytes, part.len())? };
            }
            self.stream.synchronize()?;
        }
        Ok(())
    }

    fn slot_arrays(&self, inits: &[SlotInit]) -> SlotArrays {
        load_slots(inits, self.limits.vocab)
    }

    fn start_slots(&self, slots: &SlotArrays) -> Result<(), CudaError> {
        let args = SlotsArgs {
            counts: self.at(self.layout.counts),
            starts: self.at(self.layout.starts),
            tokens: self.at(self.layout.start_tokens),
            start_bias: self.at(self.layout.start_bias),
            start_ends: self.at(self.layout.start_ends),
            params: self.buffers.slot_params,
            bias: self.buffers.slot_bias,
            ends: self.buffers.slot_ends,
            last_token: self.buffers.last_token,
            seen: self.buffers.seen,
            vocab: self.limits.vocab,
        };
        let launcher = plain(&self.stream);
        // SAFETY: slots and ids were checked when the step was loaded; the arrays were just sent.
        unsafe { self.kernels.slots_init(launcher, slots.starts.len(), args) }
    }
}

/// Behind all that is enqueued: what a step brings to the GPU is there for whatever comes later, though that may begin sooner.
pub(super) fn plain(stream: &Stream) -> Launcher<'_> {
    Launcher { stream, overlapped: false }
}

/// Room that they take.
pub(super) fn capacities(slots: &SlotArrays) -> SlotCapacities {
    SlotCapacities {
        slots: slots.starts.len(),
        tokens: slots.tokens.len(),
        bias: slots.bias.len(),
        ends: slots.ends.len(),
    }
}
