//! Large products through cublasLt: a plan is searched once per shape and kept.

use std::path::Path;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys as lt};
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use super::context::{Gpu, Stream};
use super::driver::load_cublas_lt;
use super::error::{CudaError, check_blas};
use super::kernels::{Gemm, Store};
use super::memory::DeviceMemory;

/// What NVIDIA recommends for Hopper is half of it.
pub const WORKSPACE_BYTES: u64 = 64 << 20;

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

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
    store: Store,
}

/// Descriptors and the chosen algorithm.
#[derive(Debug)]
struct Plan {
    operation: lt::cublasLtMatmulDesc_t,
    weights: lt::cublasLtMatrixLayout_t,
    inputs: lt::cublasLtMatrixLayout_t,
    outputs: lt::cublasLtMatrixLayout_t,
    algorithm: lt::cublasLtMatmulAlgo_t,
}

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

    /// Enqueues a product of exactly `gemm.m` rows; false where the library has nothing for this shape, and then nothing is.
    ///
    /// # Safety
    /// The addresses belong to memory of these sizes, which lives until the stream has passed the product.
    pub unsafe fn run(&mut self, stream: &Stream, gemm: &Gemm) -> Result<bool, CudaError> {
        let shape = Shape { m: gemm.m, n: gemm.n, k: gemm.k, store: gemm.store };
        if shape.m == 0 {
            return Ok(true);
        }
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Plan::search(self.handle, shape)?),
        };
        let Some(plan) = plan else { return Ok(false) };
        let (one, before) = (1f32, if shape.store == Store::AddF32 { 1f32 } else { 0f32 });
        // SAFETY: the descriptors live in the plan, the factors during the call; the caller vouches for the addresses.
        let status = unsafe {
            lt::cublasLtMatmul(
                self.handle,
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
                self.workspace.address() as *mut _,
                WORKSPACE_BYTES as usize,
                stream.raw().cast(),
            )
        };
        check_blas(status, || format!("cublasLtMatmul of {shape:?}"))?;
        Ok(true)
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

impl Plan {
    /// None where the library knows no way.
    fn search(handle: lt::cublasLtHandle_t, shape: Shape) -> Result<Option<Self>, CudaError> {
        let wrong = |error: result::CublasError| CudaError::Blas {
            call: format!("cublasLt's description of {shape:?}"),
            status: format!("{:?}", error.0),
        };
        let (half, float) = (lt::cudaDataType_t::CUDA_R_16BF, lt::cudaDataType_t::CUDA_R_32F);
        let output = if shape.store == Store::Bf16 { half } else { float };
        let (m, n, k) = (shape.m as u64, shape.n as u64, shape.k as u64);
        let operation =
            result::create_matmul_desc(lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, float).map_err(wrong)?;
        // The library's matrices are column-major, ours their transposes: CUBLAS_OP_T is 1.
        let transposed: i32 = 1;
        let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the descriptor was just made; the attribute is a 32-bit enum.
        unsafe {
            result::set_matmul_desc_attribute(
                operation,
                attribute,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        }
        .map_err(wrong)?;
        let weights = result::create_matrix_layout(half, k, n, k as i64).map_err(wrong)?;
        let inputs = result::create_matrix_layout(half, k, m, k as i64).map_err(wrong)?;
        let outputs = result::create_matrix_layout(output, n, m, n as i64).map_err(wrong)?;
        let preference = result::create_matmul_pref().map_err(wrong)?;
        let bytes = WORKSPACE_BYTES as usize;
        let most = lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        // SAFETY: all descriptors were just made and live; the preference is destroyed once.
        let found = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                most,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )
            .map_err(wrong)?;
            let scheme = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            let schemes =
                lt::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
            // Parts of a sum meet in f32, never rounded to the output's type before.
            result::set_matmul_pref_attribute(
                preference,
                schemes,
                (&raw const scheme).cast(),
                size_of_val(&scheme),
            )
            .map_err(wrong)?;
            let found = result::get_matmul_algo_heuristic(
                handle, operation, weights, inputs, outputs, outputs, preference,
            );
            result::destroy_matmul_pref(preference).map_err(wrong)?;
            found
        };
        match found {
            Ok(found) => Ok(Some(Self { operation, weights, inputs, outputs, algorithm: found.algo })),
            Err(error) => {
                tracing::debug!(?shape, status = ?error.0, "cublasLt has no algorithm, own kernel instead");
                Ok(None)
            }
        }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `search`, destroyed once; host memory alone.
        unsafe {
            lt::cublasLtMatrixLayoutDestroy(self.weights);
            lt::cublasLtMatrixLayoutDestroy(self.inputs);
            lt::cublasLtMatrixLayoutDestroy(self.outputs);
            lt::cublasLtMatmulDescDestroy(self.operation);
        }
    }
}
