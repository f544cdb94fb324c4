//! Addresses first, memory later: recorded launches name an address before it is known how much will stand behind it.

use std::sync::Arc;

use cudarc::driver::sys;

use super::context::{Gpu, Stream};
use super::error::{CudaError, check};
use super::memory::Address;

/// A range of addresses, backed by memory from its beginning on, as far as `grow` was told.
#[derive(Debug)]
pub(super) struct Reserved {
    gpu: Arc<Gpu>,
    address: Address,
    bytes: u64,
    granule: u64,
    mapped: u64,
}

impl Reserved {
    /// What memory is mapped in; None where this GPU cannot map it.
    pub(super) fn granule(gpu: &Gpu) -> Result<Option<u64>, CudaError> {
        if !gpu.maps_memory()? {
            return Ok(None);
        }
        let (mut granule, wish) = (0, wish(gpu));
        let recommended = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one number; the description lives during the call.
        let result =
            unsafe { sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const wish, recommended) };
        check(result, || "cuMemGetAllocationGranularity".into())?;
        Ok(Some(granule as u64))
    }

    /// Takes addresses for at least `bytes`, and no memory. The calling thread must be bound.
    pub(super) fn new(gpu: &Arc<Gpu>, bytes: u64, granule: u64) -> Result<Self, CudaError> {
        let (mut address, bytes) = (0, bytes.next_multiple_of(granule));
        if bytes > 0 {
            // SAFETY: writes one address, which Drop gives back.
            let result =
                unsafe { sys::cuMemAddressReserve(&raw mut address, bytes as usize, granule as usize, 0, 0) };
            check(result, || format!("cuMemAddressReserve of {bytes} bytes"))?;
        }
        Ok(Self { gpu: gpu.clone(), address, bytes, granule, mapped: 0 })
    }

    /// Backs at least the first `bytes` with memory, whatever it contains.
    pub(super) fn grow(&mut self, bytes: u64, what: &str) -> Result<(), CudaError> {
        let wanted = bytes.next_multiple_of(self.granule);
        assert!(wanted <= self.bytes, "{wanted} bytes of {} reserved for {what}", self.bytes);
        if wanted <= self.mapped {
            return Ok(());
        }
        let (at, more, wish) = (self.address + self.mapped, (wanted - self.mapped) as usize, wish(&self.gpu));
        let mut memory = 0;
        // SAFETY: writes one handle, which is released below; the mapping keeps the memory.
        check(unsafe { sys::cuMemCreate(&raw mut memory, more, &raw const wish, 0) }, || {
            format!("cuMemCreate of {more} bytes for {what}")
        })?;
        // SAFETY: the range is reserved and not mapped yet; the memory has its length.
        let mapped = unsafe {
            let mapped = sys::cuMemMap(at, more, 0, memory, 0);
            sys::cuMemRelease(memory);
            mapped
        };
        check(mapped, || format!("cuMemMap of {more} bytes for {what}"))?;
        self.mapped = wanted;
        let access = sys::CUmemAccessDesc {
            location: wish.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped; the description lives during the call.
        check(unsafe { sys::cuMemSetAccess(at, more, &raw const access, 1) }, || {
            format!("cuMemSetAccess of {more} bytes for {what}")
        })
    }

    /// Where it begins.
    pub(super) fn address(&self) -> Address {
        self.address
    }

    /// Sets every byte that has memory.
    pub(super) fn fill(&self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        if self.mapped == 0 {
            return Ok(());
        }
        // SAFETY: the range is ours and mapped; work that uses it is in the same stream.
        check(unsafe { sys::cuMemsetD8Async(self.address, byte, self.mapped as usize, stream.raw()) }, || {
            format!("cuMemsetD8Async of {} bytes", self.mapped)
        })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if self.bytes == 0 || !self.gpu.can_free() {
            return;
        }
        // SAFETY: reserved and mapped above, given back once; whoever holds it has waited for the work that uses it.
        unsafe {
            if self.mapped > 0 {
                sys::cuMemUnmap(self.address, self.mapped as usize);
            }
            sys::cuMemAddressFree(self.address, self.bytes as usize);
        }
    }
}

/// Plain memory of this GPU.
fn wish(gpu: &Gpu) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.ordinal() as i32,
        },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}
