//! What a kernel is given, and which kernel runs it.

use std::ops::Range;

use super::super::isa::Isa;
use super::activations::Activations;
use super::format::{Format, Geometry, LANES};
use super::scalar;

/// One panel by some tokens.
pub(super) struct PanelJob<'a> {
    pub(super) geometry: &'a Geometry,
    pub(super) panel: &'a [u8],
    pub(super) input: &'a Activations,
    /// The first is the first of a tile.
    pub(super) tokens: Range<usize>,
    /// Where token 0's output of the panel's first row belongs.
    pub(super) out: *mut f32,
    /// Floats from one token's outputs to the next's.
    pub(super) stride: usize,
    /// Rows of the panel that there are.
    pub(super) lanes: usize,
}

impl PanelJob<'_> {
    /// Writes outputs of one token from lane `lane` on.
    pub(super) fn store(&self, token: usize, lane: usize, values: &[f32]) {
        debug_assert!(self.tokens.contains(&token) && lane + values.len() <= self.lanes);
        // SAFETY: whoever made the job owns the outputs of these tokens and lanes.
        unsafe {
            let to = self.out.add(token * self.stride + lane);
            std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len());
        }
    }
}

/// Runs quantised weights against int8 activations, unquantised ones against f32.
pub(super) fn run(isa: Isa, job: &PanelJob<'_>) {
    let quantised = matches!(job.geometry.format, Format::Quants { .. });
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a pool has only an instruction set that this processor has.
        Isa::Avx512 if quantised => unsafe { super::avx512::quants(job) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 if quantised => unsafe { super::avx2::quants(job) },
        _ if quantised => scalar::quants(job),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx512 => unsafe { super::avx512::plain(job) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { super::avx2::plain(job) },
        _ => run_widened(isa, job),
    }
}

/// Runs quantised weights, made f32 first, against f32 activations. The plain types of the scalar kernels come this way too.
pub(super) fn run_widened(isa: Isa, job: &PanelJob<'_>) {
    let mut weights = vec![0.0; job.geometry.cols * LANES];
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a pool has only an instruction set that this processor has.
        Isa::Avx512 => unsafe {
            super::avx512::widen(job.panel, job.geometry, &mut weights);
            super::avx512::widened(job, &weights);
        },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe {
            super::avx2::widen(job.panel, job.geometry, &mut weights);
            super::avx2::widened(job, &weights);
        },
        _ => {
            scalar::widen(job.panel, job.geometry, &mut weights);
            scalar::plain(job, &weights);
        }
    }
}
