//! Large products through cublasLt: a plan per shape, searched by time at the start or else the library's first choice, and kept.

use std::path::Path;
use std::sync::Arc;

use cudarc::cublaslt::sys as lt;
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::context::{Gpu, Stream};
use super::driver::load_cublas_lt;
use super::error::{CudaError, check_blas};
use super::graphs::sets_memory;
use super::kernels::{Gemm, Store};
use super::memory::{Address, DeviceMemory};
pub use super::plan::WORKSPACE_BYTES;
use super::plan::{Algorithm, Plan, Shape};
use super::timing::{time, time_in_turn};

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
/// Rows, as parts of a shape's own, of others whose algorithms are candidates too: the library's order is a guess.
const NEIGHBOURS: [(usize, usize); 3] = [(1, 2), (7, 4), (2, 1)];
/// Algorithms that come to the final, and how much slower than the fastest they may have been.
const FINALISTS: usize = 8;
const FINAL_MARGIN: f64 = 0.1;
/// What an algorithm that fills counters first must gain to be worth what the host takes longer to launch its step.
const FILL_COST: f64 = 0.02;

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

    /// Times algorithms on these weights in turn, so that none is found in L2, and keeps the fastest; None where there is none. Those
    /// that are nearly as fast by themselves are timed again at length: what takes less power is faster in a step that takes all of it.
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
        let mut turn = weights.iter().cycle();
        let mut timed: Vec<(Algorithm, f64)> = Vec::new();
        for algorithm in self.candidates(&plan, shape)? {
            plan.algorithm.data = algorithm;
            // SAFETY: the caller's promise.
            let Ok(seconds) = (unsafe { self.time_alone(&plan, stream, gemm, &mut turn) }) else { continue };
            timed.push((algorithm, seconds));
        }
        let finalists = finalists(timed);
        let mut seconds = time_in_turn(&finalists, |algorithm, products| {
            plan.algorithm.data = algorithm;
            // SAFETY: the caller's promise.
            unsafe { self.time(&plan, stream, gemm, (&mut turn, products)) }
        })?;
        let one = Gemm { weights: turn.next().copied().unwrap_or(gemm.weights), ..*gemm };
        for ((algorithm, _), seconds) in finalists.iter().zip(&mut seconds) {
            plan.algorithm.data = *algorithm;
            // SAFETY: the caller's promise.
            let fills = sets_memory(stream, || unsafe {
                enqueue(self.handle, &self.workspace, &plan, stream, &one)
            })?;
            *seconds *= if fills { 1.0 + FILL_COST } else { 1.0 };
        }
        let found = winner(&finalists, &seconds);
        if let Some(algorithm) = found {
            plan.algorithm.data = algorithm;
        }
        self.plans.insert(shape, found.map(|_| plan));
        Ok(found)
    }

    /// The library's own for this shape, and for others that are like it.
    fn candidates(&self, plan: &Plan, shape: Shape) -> Result<Vec<Algorithm>, CudaError> {
        let mut found = plan.candidates(self.handle, shape, CANDIDATES)?;
        for (times, parts) in NEIGHBOURS {
            let neighbour = Shape { m: (shape.m * times / parts).max(1), ..shape };
            let theirs = Plan::describe(neighbour)?.candidates(self.handle, neighbour, CANDIDATES)?;
            for algorithm in theirs {
                if !found.contains(&algorithm) && plan.accepts(self.handle, algorithm) {
                    found.push(algorithm);
                }
            }
        }
        Ok(found)
    }

    /// Seconds of one product at its fastest.
    ///
    /// # Safety
    /// See `search`.
    unsafe fn time_alone<'a>(
        &self,
        plan: &Plan,
        stream: &Stream,
        gemm: &Gemm,
        weights: &mut impl Iterator<Item = &'a Address>,
    ) -> Result<f64, CudaError> {
        let products = if gemm.m < LONG_ROWS { PRODUCTS } else { 1 };
        // The first launch loads the kernel.
        // SAFETY: the caller's promise.
        unsafe { self.time(plan, stream, gemm, (&mut *weights, 1)) }?;
        let mut least = f64::INFINITY;
        for _ in 0..TIMINGS {
            // SAFETY: the caller's promise.
            least = least.min(unsafe { self.time(plan, stream, gemm, (&mut *weights, products)) }?);
        }
        Ok(least)
    }

    /// Seconds of one of so many products, one behind the other.
    ///
    /// # Safety
    /// See `search`.
    unsafe fn time<'a>(
        &self,
        plan: &Plan,
        stream: &Stream,
        gemm: &Gemm,
        (weights, products): (&mut impl Iterator<Item = &'a Address>, usize),
    ) -> Result<f64, CudaError> {
        time(stream, products, || {
            let gemm = Gemm { weights: weights.next().copied().unwrap_or(gemm.weights), ..*gemm };
            // SAFETY: the caller's promise.
            unsafe { enqueue(self.handle, &self.workspace, plan, stream, &gemm) }
        })
    }
}

/// The fastest first, without those that are too slow to win.
fn finalists(mut timed: Vec<(Algorithm, f64)>) -> Vec<(Algorithm, f64)> {
    // Stable: among equals the library's order.
    timed.sort_by(|a, b| a.1.total_cmp(&b.1));
    let most = timed.first().map_or(0.0, |(_, least)| least * (1.0 + FINAL_MARGIN));
    timed.retain(|(_, seconds)| *seconds <= most);
    timed.truncate(FINALISTS);
    timed
}

/// The one that took the least, the first of those that are as good.
fn winner(finalists: &[(Algorithm, f64)], seconds: &[f64]) -> Option<Algorithm> {
    let mut best: Option<(Algorithm, f64)> = None;
    for ((algorithm, _), seconds) in finalists.iter().zip(seconds) {
        if best.is_none_or(|(_, least)| *seconds < least * (1.0 - GAIN_MIN)) {
            best = Some((*algorithm, *seconds));
        }
    }
    best.map(|(algorithm, _)| algorithm)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fast_at_length_wins() {
        let timed =
            |times: &[f64]| times.iter().enumerate().map(|(i, t)| ([i as u64; 8], *t)).collect::<Vec<_>>();
        let names = |found: &[(Algorithm, f64)]| found.iter().map(|(a, _)| a[0]).collect::<Vec<_>>();
        assert_eq!(names(&finalists(timed(&[5.0, 4.0, 4.1, 4.6, 4.0]))), [1, 4, 2]);
        let many: Vec<f64> = (0..FINALISTS + 2).map(|i| 1.05 - 0.005 * i as f64).collect();
        assert_eq!(
            names(&finalists(timed(&many))),
            std::array::from_fn::<_, FINALISTS, _>(|i| (FINALISTS + 1 - i) as u64)
        );
        assert_eq!(names(&finalists(Vec::new())), [0; 0]);
        let check = |seconds: &[f64], expected: Option<u64>| {
            let found = winner(&timed(&vec![1.0; seconds.len()]), seconds);
            assert_eq!(found.map(|algorithm| algorithm[0]), expected, "{seconds:?}");
        };
        check(&[1.2, 1.1], Some(1));
        // Less than a hundredth is noise.
        check(&[1.0, 0.995, 0.993], Some(0));
        check(&[], None);
    }
}
