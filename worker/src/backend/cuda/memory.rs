//! Memory of the GPU, and memory of the host that it reads and writes by itself.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Gpu, Stream};
use super::error::{CudaError, check};

/// An address on the GPU.
pub type Address = u64;

/// Everything starts on such a boundary: vector loads and cublasLt ask for it.
pub const ALIGNMENT: u64 = 256;

/// A piece of GPU memory with one owner.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: u64,
}

impl DeviceMemory {
    /// Takes `bytes`, whatever they contain. The calling thread must be bound.
    pub fn new(gpu: &Arc<Gpu>, bytes: u64, what: &str) -> Result<Self, CudaError> {
        let mut address = 0;
        if bytes > 0 {
            // SAFETY: writes one address, which Drop frees.
            check(unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) }, || {
                format!("cuMemAlloc of {bytes} bytes for {what}")
            })?;
        }
        Ok(Self { gpu: gpu.clone(), address, bytes })
    }

    /// Where it begins.
    pub fn address(&self) -> Address {
        self.address
    }

    /// Its length.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sets every byte.
    pub fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range is ours; work that uses it is in the same stream.
        check(unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes as usize, stream.raw()) }, || {
            format!("cuMemsetD8Async of {} bytes", self.bytes)
        })
    }

    /// Enqueues a copy from pinned memory, which must stay as it is until the stream has passed it.
    pub fn copy_from(&self, stream: &Stream, offset: u64, from: &[u8]) -> Result<(), CudaError> {
        assert!(
            offset + from.len() as u64 <= self.bytes,
            "{} bytes at {offset} of {}",
            from.len(),
            self.bytes
        );
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: the range is ours, as just checked; the caller keeps the source alive.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(self.address + offset, from.as_ptr().cast(), from.len(), stream.raw())
        };
        check(result, || format!("cuMemcpyHtoDAsync of {} bytes", from.len()))
    }

    /// Enqueues a copy to pinned memory, which may be read once the stream has passed it.
    pub fn copy_to(&self, stream: &Stream, offset: u64, to: &mut [u8]) -> Result<(), CudaError> {
        assert!(offset + to.len() as u64 <= self.bytes, "{} bytes at {offset} of {}", to.len(), self.bytes);
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: as above, in the other direction.
        let result = unsafe {
            sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), self.address + offset, to.len(), stream.raw())
        };
        check(result, || format!("cuMemcpyDtoHAsync of {} bytes", to.len()))
    }

    /// Copies in and waits. For starts and tests.
    pub fn write(&self, stream: &Stream, offset: u64, from: &[u8]) -> Result<(), CudaError> {
        self.copy_from(stream, offset, from)?;
        stream.synchronize()
    }

    /// Copies out and waits. For starts and tests.
    pub fn read(&self, stream: &Stream, offset: u64, to: &mut [u8]) -> Result<(), CudaError> {
        self.copy_to(stream, offset, to)?;
        stream.synchronize()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.bytes > 0 && self.gpu.can_free() {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that still uses it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Page-locked host memory, zero at first.
#[derive(Debug)]
pub struct Pinned {
    gpu: Arc<Gpu>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory like a Vec does.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// The calling thread must be bound.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, CudaError> {
        let mut start = std::ptr::null_mut();
        let bytes = bytes.max(1);
        // SAFETY: writes one address, which Drop frees.
        check(unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }, || {
            format!("cuMemHostAlloc of {bytes} bytes")
        })?;
        let start = NonNull::new(start.cast::<u8>()).ok_or_else(|| CudaError::Driver {
            call: format!("cuMemHostAlloc of {bytes} bytes"),
            code: "no address".into(),
        })?;
        // SAFETY: so many bytes were just allocated.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { gpu: gpu.clone(), start, bytes })
    }
}

impl Pinned {
    /// Where kernels find it: the same place as the host does.
    pub fn address(&self) -> Address {
        self.start.as_ptr() as u64
    }
}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length and initialised; the GPU writes only what nobody reads meanwhile.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.can_free() {
            // SAFETY: allocated in `new`, freed once.
            unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
        }
    }
}
