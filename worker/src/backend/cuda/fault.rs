//! The end of a process whose GPU is lost.

use super::error::CudaError;

/// What the process exits with when its GPU failed or hangs: whoever started it may start another.
pub const FAULT_EXIT_CODE: i32 = 70;

/// Says why and ends the process at once. Its streams break; routers resume them elsewhere.
pub(super) fn end_process(device: &str, error: &CudaError) -> ! {
    tracing::error!(device, %error, exit_code = FAULT_EXIT_CODE, "the GPU is lost, this process ends");
    // SAFETY: nothing of this process is needed any more; handlers at exit would wait for a GPU that does not answer.
    unsafe { libc::_exit(FAULT_EXIT_CODE) }
}
