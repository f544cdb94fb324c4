//! What constrained rows may draw: bits that sampling reads beside the logits.

use std::sync::Arc;

use super::abi::bytes_of;
use super::context::{Gpu, Stream};
use super::error::CudaError;
use super::memory::{Address, DeviceMemory, Pinned};
use crate::plan::StepMasks;

/// Room for a mask per slot. One step's at a time: those of the next are sent once this one has been collected.
#[derive(Debug)]
pub(super) struct Masks {
    memory: DeviceMemory,
    pinned: Pinned,
    /// 32-bit words of a mask.
    words: usize,
}

/// Bytes of the masks of so many slots.
pub(super) fn mask_bytes(vocab: usize, slots: usize) -> u64 {
    (vocab.div_ceil(32) * 4 * slots) as u64
}

impl Masks {
    pub(super) fn new(gpu: &Arc<Gpu>, vocab: usize, slots: usize) -> Result<Self, CudaError> {
        let bytes = mask_bytes(vocab, slots);
        Ok(Self {
            memory: DeviceMemory::new(gpu, bytes, "masks")?,
            pinned: Pinned::new(gpu, bytes as usize)?,
            words: vocab.div_ceil(32),
        })
    }

    /// Where the first mask stands on the GPU; the others follow.
    pub(super) fn address(&self) -> Address {
        self.memory.address()
    }

    /// Masks are as many as `rows` and of the vocabulary's width.
    pub(super) fn fit(&self, masks: &StepMasks, rows: usize) -> bool {
        masks.0.len() == rows && masks.0.iter().flatten().all(|mask| mask.words().len() == self.words)
    }

    /// Enqueues the copy of masks that fit.
    pub(super) fn send(&mut self, stream: &Stream, masks: &StepMasks) -> Result<(), CudaError> {
        let each = self.words * 4;
        for (place, mask) in self.pinned.chunks_exact_mut(each).zip(&masks.0) {
            match mask {
                Some(mask) => place.copy_from_slice(bytes_of(mask.words())),
                None => place.fill(0xff),
            }
        }
        self.memory.copy_from(stream, 0, &self.pinned[..each * masks.0.len()])
    }
}
