//! One way of cublasLt to compute a product: descriptors and an algorithm.

use cudarc::cublaslt::{result, sys as lt};

use super::error::{CudaError, check_blas};
use super::kernels::{Gemm, Store};

/// What NVIDIA recommends for Hopper is half of it.
pub const WORKSPACE_BYTES: u64 = 64 << 20;

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) store: Store,
}

/// The library's own description of an algorithm, opaque.
pub(super) type Algorithm = [u64; 8];

/// Descriptors of a shape, and the algorithm that is run.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) operation: lt::cublasLtMatmulDesc_t,
    pub(super) weights: lt::cublasLtMatrixLayout_t,
    pub(super) inputs: lt::cublasLtMatrixLayout_t,
    pub(super) outputs: lt::cublasLtMatrixLayout_t,
    pub(super) algorithm: lt::cublasLtMatmulAlgo_t,
}

impl Shape {
    pub(super) fn of(gemm: &Gemm) -> Self {
        Self { m: gemm.m, n: gemm.n, k: gemm.k, store: gemm.store }
    }

    fn wrong(self) -> impl Fn(result::CublasError) -> CudaError {
        move |error| CudaError::Blas {
            call: format!("cublasLt's description of {self:?}"),
            status: format!("{:?}", error.0),
        }
    }
}

impl Plan {
    /// Descriptors, with no algorithm yet.
    pub(super) fn describe(shape: Shape) -> Result<Self, CudaError> {
        let wrong = shape.wrong();
        let (half, float) = (lt::cudaDataType_t::CUDA_R_16BF, lt::cudaDataType_t::CUDA_R_32F);
        let output = if shape.store == Store::Bf16 { half } else { float };
        let (m, n, k) = (shape.m as u64, shape.n as u64, shape.k as u64);
        let operation =
            result::create_matmul_desc(lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, float).map_err(&wrong)?;
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
        .map_err(&wrong)?;
        Ok(Self {
            operation,
            weights: result::create_matrix_layout(half, k, n, k as i64).map_err(&wrong)?,
            inputs: result::create_matrix_layout(half, k, m, k as i64).map_err(&wrong)?,
            outputs: result::create_matrix_layout(output, n, m, n as i64).map_err(&wrong)?,
            algorithm: lt::cublasLtMatmulAlgo_t { data: [0; 8] },
        })
    }

    /// Algorithms that the library thinks best, the best first; none where it knows no way.
    pub(super) fn candidates(
        &self,
        handle: lt::cublasLtHandle_t,
        shape: Shape,
        most: usize,
    ) -> Result<Vec<Algorithm>, CudaError> {
        let wrong = shape.wrong();
        let preference = result::create_matmul_pref().map_err(&wrong)?;
        use lt::cublasLtMatmulPreferenceAttributes_t as A;
        let bytes = WORKSPACE_BYTES as usize;
        // Parts of a sum meet in f32, never rounded to the output's type before.
        let scheme = lt::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        // SAFETY: a C struct of numbers, for which zero is a value.
        let none: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let (mut found, mut count) = (vec![none; most], 0);
        // SAFETY: all descriptors live; attributes are of the types that the library documents; the preference is destroyed once;
        // the library writes at most as many results as there is room for.
        let status = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                A::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of_val(&bytes),
            )
            .map_err(&wrong)?;
            result::set_matmul_pref_attribute(
                preference,
                A::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const scheme).cast(),
                size_of_val(&scheme),
            )
            .map_err(&wrong)?;
            let status = lt::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation,
                self.weights,
                self.inputs,
                self.outputs,
                self.outputs,
                preference,
                most as i32,
                found.as_mut_ptr(),
                &raw mut count,
            );
            result::destroy_matmul_pref(preference).map_err(&wrong)?;
            status
        };
        if status == lt::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            return Ok(Vec::new());
        }
        check_blas(status, || format!("cublasLtMatmulAlgoGetHeuristic of {shape:?}"))?;
        found.truncate(count.max(0) as usize);
        found.retain(|one| one.state == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(found.into_iter().map(|one| one.algo.data).collect())
    }

    /// Whether the library can run this algorithm on this shape, in the workspace that there is.
    pub(super) fn accepts(&self, handle: lt::cublasLtHandle_t, algorithm: Algorithm) -> bool {
        let algorithm = lt::cublasLtMatmulAlgo_t { data: algorithm };
        // SAFETY: a C struct of numbers, for which zero is a value.
        let mut found: lt::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all descriptors live; the library reads one algorithm and writes one result.
        let status = unsafe {
            lt::cublasLtMatmulAlgoCheck(
                handle,
                self.operation,
                self.weights,
                self.inputs,
                self.outputs,
                self.outputs,
                &raw const algorithm,
                &raw mut found,
            )
        };
        status == lt::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize as u64 <= WORKSPACE_BYTES
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `describe`, destroyed once; host memory alone.
        unsafe {
            lt::cublasLtMatrixLayoutDestroy(self.weights);
            lt::cublasLtMatrixLayoutDestroy(self.inputs);
            lt::cublasLtMatrixLayoutDestroy(self.outputs);
            lt::cublasLtMatmulDescDestroy(self.operation);
        }
    }
}
