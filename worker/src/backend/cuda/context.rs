//! A GPU with its context, and the stream and events of one user of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::driver::sys;

use super::driver::{load_cublas_lt, load_driver};
use super::error::{CudaError, check};

/// An opened GPU. Its primary context stays retained as long as this lives.
#[derive(Debug)]
pub struct Gpu {
    ordinal: usize,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    multiprocessors: usize,
    capability: (i32, i32),
    /// Of one block, when it asks for more than the usual 48 KiB.
    shared_bytes: usize,
    /// It hangs, or has failed: nothing is given back to it any more, since that could wait for ever.
    lost: AtomicBool,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above; what changes is atomic.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// Opens a GPU by its number among those that the driver shows.
    pub fn open(ordinal: usize, libraries: Option<&std::path::Path>) -> Result<Arc<Self>, CudaError> {
        load_driver(libraries)?;
        let (mut count, mut handle, mut context) = (0, 0, std::ptr::null_mut());
        // SAFETY: the library is loaded; each call writes one value to where it is told.
        unsafe {
            check(sys::cuInit(0), || "cuInit".into())?;
            check(sys::cuDeviceGetCount(&raw mut count), || "cuDeviceGetCount".into())?;
            if ordinal >= count as usize {
                return Err(CudaError::NoDevice { ordinal, count: count as usize });
            }
            check(sys::cuDeviceGet(&raw mut handle, ordinal as i32), || format!("cuDeviceGet({ordinal})"))?;
        }
        let name = device_name(handle)?;
        use sys::CUdevice_attribute as A;
        let major = attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(handle, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(CudaError::TooOld { name, major, minor });
        }
        let multiprocessors = attribute(handle, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared_bytes =
            attribute(handle, A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize;
        let capability = (major, minor);
        // SAFETY: as above; the context is released in Drop.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, handle) }, || {
            format!("cuDevicePrimaryCtxRetain({ordinal})")
        })?;
        let lost = AtomicBool::new(false);
        let gpu = Self { ordinal, handle, context, name, multiprocessors, capability, shared_bytes, lost };
        gpu.bind()?;
        Ok(Arc::new(gpu))
    }

    /// GPUs that the driver shows; no context is made. `needs_blas`: cublasLt must be there too.
    pub fn count(libraries: Option<&std::path::Path>, needs_blas: bool) -> Result<usize, CudaError> {
        load_driver(libraries)?;
        let mut count = 0;
        // SAFETY: the library is loaded; writes one integer.
        unsafe {
            check(sys::cuInit(0), || "cuInit".into())?;
            check(sys::cuDeviceGetCount(&raw mut count), || "cuDeviceGetCount".into())?;
        }
        if count == 0 {
            return Err(CudaError::NoDevice { ordinal: 0, count: 0 });
        }
        if needs_blas {
            load_cublas_lt(libraries)?;
        }
        Ok(count as usize)
    }

    /// Makes its context the calling thread's.
    pub fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained while self lives.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, || "cuCtxSetCurrent".into())
    }

    /// As the driver names it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Shared memory that one block may have.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    /// H100, H200 and their like: kernels for them alone.
    pub fn is_hopper(&self) -> bool {
        self.capability == (9, 0)
    }

    /// Bytes that are free, and bytes that there are. The calling thread must be bound.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two values.
        check(unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }, || "cuMemGetInfo".into())?;
        Ok((free as u64, total as u64))
    }

    /// Memory can be mapped behind addresses that were reserved before.
    pub(super) fn maps_memory(&self) -> Result<bool, CudaError> {
        let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        Ok(attribute(self.handle, supported)? != 0)
    }

    /// From now on nothing is given back.
    pub fn give_up(&self) {
        self.lost.store(true, Ordering::Relaxed);
    }

    /// Whether what was taken can be given back; the thread is bound then.
    pub fn can_free(&self) -> bool {
        !self.lost.load(Ordering::Relaxed) && self.bind().is_ok()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.lost.load(Ordering::Relaxed) {
            // SAFETY: retained once in `open`; everything made in it holds an Arc of self, and is gone.
            unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.handle) };
        }
    }
}

fn attribute(device: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) }, || {
        format!("cuDeviceGetAttribute({attribute:?})")
    })?;
    Ok(value)
}

fn device_name(device: sys::CUdevice) -> Result<String, CudaError> {
    let mut bytes = [0u8; 128];
    // SAFETY: the driver writes at most so many bytes, a zero at the end.
    check(unsafe { sys::cuDeviceGetName(bytes.as_mut_ptr().cast(), bytes.len() as i32, device) }, || {
        "cuDeviceGetName".into()
    })?;
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Ok(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

/// Work in order.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: sys::CUstream,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that waits for no other. The calling thread must be bound.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle, which Drop destroys.
        check(unsafe { sys::cuStreamCreate(&raw mut raw, flags) }, || "cuStreamCreate".into())?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits for all of it. For starts and tests: it knows no time limit.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        check(unsafe { sys::cuStreamSynchronize(self.raw) }, || "cuStreamSynchronize".into())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    raw: sys::CUevent,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Event {}

/// Waiting is a spin for so long: most steps end within it, and a sleep would add to each.
const SPIN: Duration = Duration::from_millis(20);
/// After that.
const NAP: Duration = Duration::from_micros(200);

impl Event {
    /// The calling thread must be bound.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: writes one handle, which Drop destroys.
        check(unsafe { sys::cuEventCreate(&raw mut raw, flags) }, || "cuEventCreate".into())?;
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Marks what has been enqueued so far.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: both live, in one context.
        check(unsafe { sys::cuEventRecord(self.raw, stream.raw) }, || "cuEventRecord".into())
    }

    /// Waits until the work before it is done, or for `timeout`. An error of that work surfaces here.
    pub fn wait(&self, timeout: Duration) -> Result<(), CudaError> {
        let begin = tokio::time::Instant::now();
        loop {
            // SAFETY: the event lives.
            let result = unsafe { sys::cuEventQuery(self.raw) };
            if result != sys::CUresult::CUDA_ERROR_NOT_READY {
                return check(result, || "a step on the GPU".into());
            }
            let waited = begin.elapsed();
            if waited > timeout {
                return Err(CudaError::Hung { seconds: timeout.as_secs() });
            }
            if waited < SPIN { std::thread::yield_now() } else { std::thread::park_timeout(NAP) }
        }
    }

    /// Seconds from `start` to this one; both have been waited for.
    pub fn seconds_since(&self, start: &Self) -> Result<f64, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events live and were recorded with timing.
        check(unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, start.raw, self.raw) }, || {
            "cuEventElapsedTime".into()
        })?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            // SAFETY: created in `new`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
