//! Large products through cublasLt: a plan per shape, searched by time at the start or else the library's first choice, and kept.

use std::path::Path;
use std::sync::Arc;

use cudarc::cublaslt::sys as lt;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::context::{Event, Gpu, Stream};
use super::driver::load_cublas_lt;
use super::error::{CudaError, check_blas};
use super::kernels::{Gemm, Store};
use super::memory::{Address, DeviceMemory};
pub use super::plan::WORKSPACE_BYTES;
use super::plan::{Algorithm, Plan, Shape};

/// Algorithms of one shape that are timed.
const CANDIDATES: usize = 16;
/// Timings of one algorithm, of which the shortest counts.
const TIMINGS: usize = 3;
/// Products of one timing, where they are short.
const PRODUCTS: usize = 8;
/// Rows from which on one product is long enough.
const LONG_ROWS: usize = 1024;
/// Gain that is worth leaving the library's own first choice: less is noise.
const GAIN_MIN: f64 = 0.01;

/// The library's handle, its workspace and the plans.
#[derive(Debug)]
pub struct Blas {
    gpu: Arc<Gpu>,
    handle: lt::cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: HashMap<Shape, Option<Plan>>,
}

// SAFETY: the handle may be used from any thread; the plans are used through `&mut self` alone.
unsafe impl Send for Blas {}

impl Blas {
    /// Opens the library. The calling thread must be bound.
    pub fn new(gpu: &Arc<Gpu>, libraries: Option<&Path>) -> Result<Self, CudaError> {
        load_cublas_lt(libraries)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded; writes one handle, which Drop destroys.
        check_blas(unsafe { lt::cublasLtCreate(&raw mut handle) }, || "cublasLtCreate".into())?;
        let workspace = DeviceMemory::new(gpu, WORKSPACE_BYTES, "cublasLt")?;
        Ok(Self { gpu: gpu.clone(), handle, workspace, plans: HashMap::new() })
    }

    /// As the library tells it.
    pub fn version() -> usize {
        // SAFETY: the library was opened by `new`; the call reads a constant.
        unsafe { lt::cublasLtGetVersion() }
    }

    /// Enqueues a product of exactly `gemm.m` rows; false where the library has nothing for this shape, and then nothing is.
    ///
    /// # Safety
    /// The addresses belong to memory of these sizes, which lives until the stream has passed the product.
    pub unsafe fn run(&mut self, stream: &Stream, gemm: &Gemm) -> Result<bool, CudaError> {
        let shape = Shape::of(gemm);
        if shape.m == 0 {
            return Ok(true);
        }
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(first_choice(self.handle, shape)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        // SAFETY: the caller vouches for the addresses.
        unsafe { enqueue(self.handle, &self.workspace, plan, stream, gemm) }?;
        Ok(true)
    }

    /// Takes over an algorithm that was found before, if the library still has it for this shape.
    pub(super) fn adopt(&mut self, shape: Shape, algorithm: Algorithm) -> Result<bool, CudaError> {
        let mut plan = Plan::describe(shape)?;
        let is_known = plan.accepts(self.handle, algorithm);
        if is_known {
            plan.algorithm.data = algorithm;
            self.plans.insert(shape, Some(plan));
        }
        Ok(is_known)
    }

    /// Times algorithms on these weights in turn, so that none is found in L2, and keeps the fastest; None where there is none.
    ///
    /// # Safety
    /// As `run`, for `gemm` with each of the weights; what the outputs contain is lost.
    pub(super) unsafe fn search(
        &mut self,
        stream: &Stream,
        gemm: &Gemm,
        weights: &[Address],
    ) -> Result<Option<Algorithm>, CudaError> {
        let shape = Shape::of(gemm);
        let mut plan = Plan::describe(shape)?;
        let mut best: Option<(Algorithm, f64)> = None;
        let mut turn = weights.iter().cycle();
        for algorithm in plan.candidates(self.handle, shape, CANDIDATES)? {
            plan.algorithm.data = algorithm;
            // SAFETY: the caller's promise.
            let Ok(seconds) = (unsafe { self.time(&plan, stream, gemm, &mut turn) }) else { continue };
            if best.is_none_or(|(_, least)| seconds < least * (1.0 - GAIN_MIN)) {
                best = Some((algorithm, seconds));
            }
        }
        let found = best.map(|(algorithm, _)| algorithm);
        if let Some(algorithm) = found {
            plan.algorithm.data = algorithm;
        }
        self.plans.insert(shape, found.map(|_| plan));
        Ok(found)
    }

    /// Seconds of one product.
    ///
    /// # Safety
    /// See `search`.
    unsafe fn time<'a>(
        &self,
        plan: &Plan,
        stream: &Stream,
        gemm: &Gemm,
        weights: &mut impl Iterator<Item = &'a Address>,
    ) -> Result<f64, CudaError> {
        let (begin, end) = (Event::new(&self.gpu)?, Event::new(&self.gpu)?);
        let products = if gemm.m < LONG_ROWS { PRODUCTS } else { 1 };
        let mut enqueue_one = || {
            let gemm = Gemm { weights: weights.next().copied().unwrap_or(gemm.weights), ..*gemm };
            // SAFETY: the caller's promise.
            unsafe { enqueue(self.handle, &self.workspace, plan, stream, &gemm) }
        };
        // The first launch loads the kernel.
        enqueue_one()?;
        let mut least = f64::INFINITY;
        for _ in 0..TIMINGS {
            begin.record(stream)?;
            (0..products).try_for_each(|_| enqueue_one())?;
            end.record(stream)?;
            stream.synchronize()?;
            least = least.min(end.seconds_since(&begin)? / products as f64);
        }
        Ok(least)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            self.plans.clear();
            // SAFETY: created in `new`, destroyed once, after all plans.
            unsafe { lt::cublasLtDestroy(self.handle) };
        }
    }
}

fn first_choice(handle: lt::cublasLtHandle_t, shape: Shape) -> Result<Option<Plan>, CudaError> {
    let mut plan = Plan::describe(shape)?;
    let Some(algorithm) = plan.candidates(handle, shape, 1)?.first().copied() else {
        tracing::debug!(?shape, "cublasLt has no algorithm, own kernel instead");
        return Ok(None);
    };
    plan.algorithm.data = algorithm;
    Ok(Some(plan))
}

/// # Safety
/// See [`Blas::run`].
unsafe fn enqueue(
    handle: lt::cublasLtHandle_t,
    workspace: &DeviceMemory,
    plan: &Plan,
    stream: &Stream,
    gemm: &Gemm,
) -> Result<(), CudaError> {
    let (one, before) = (1f32, if gemm.store == Store::AddF32 { 1f32 } else { 0f32 });
    // SAFETY: the descriptors live in the plan, the factors during the call; the caller vouches for the addresses.
    let status = unsafe {
        lt::cublasLtMatmul(
            handle,
            plan.operation,
            (&raw const one).cast(),
            gemm.weights as *const _,
            plan.weights,
            gemm.inputs as *const _,
            plan.inputs,
            (&raw const before).cast(),
            gemm.outputs as *const _,
            plan.outputs,
            gemm.outputs as *mut _,
            plan.outputs,
            &raw const plan.algorithm,
            workspace.address() as *mut _,
            WORKSPACE_BYTES as usize,
            stream.raw().cast(),
        )
    };
    check_blas(status, || format!("cublasLtMatmul of {:?}", Shape::of(gemm)))
}
