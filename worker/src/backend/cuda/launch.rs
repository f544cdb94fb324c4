//! Arguments and launches of kernels.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::context::Stream;
use super::error::{CudaError, check};
use super::memory::Address;

/// Most arguments that a kernel has.
const ARGUMENTS_MAX: usize = 20;

/// Arguments of one launch, in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Args {
    /// Each at the start of its own eight bytes; a GPU's host is little-endian.
    values: [u64; ARGUMENTS_MAX],
    count: usize,
}

impl Args {
    pub fn new() -> Self {
        Self::default()
    }

    fn push(mut self, value: u64) -> Self {
        self.values[self.count] = value;
        self.count += 1;
        self
    }

    /// An address, 0 being the null pointer.
    pub fn address(self, value: Address) -> Self {
        self.push(value)
    }

    /// A 64-bit number.
    pub fn u64(self, value: u64) -> Self {
        self.push(value)
    }

    /// A size, count or index that kernels take as a 32-bit integer.
    pub fn int(self, value: usize) -> Self {
        debug_assert!(i32::try_from(value).is_ok(), "{value} as an int");
        self.push(u64::from(value as u32))
    }

    /// A 32-bit integer with a sign.
    pub fn i32(self, value: i32) -> Self {
        self.push(u64::from(value as u32))
    }

    /// A float.
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }
}

/// Blocks, threads of a block, and dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    pub blocks: (usize, usize),
    pub threads: usize,
    pub shared_bytes: usize,
    /// Blocks of a cluster; 1: there are none.
    pub cluster: usize,
}

impl Grid {
    /// One-dimensional, without dynamic shared memory.
    pub fn of(blocks: usize, threads: usize) -> Self {
        Self::plane((blocks, 1), threads)
    }

    /// Two-dimensional blocks.
    pub fn plane(blocks: (usize, usize), threads: usize) -> Self {
        Self { blocks, threads, shared_bytes: 0, cluster: 1 }
    }

    pub fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    pub fn with_cluster(self, cluster: usize) -> Self {
        Self { cluster, ..self }
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    pub function: sys::CUfunction,
    pub name: &'static str,
}

// SAFETY: a handle of the driver, which may be used from any thread while its module is loaded.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Where launches go, and how.
#[derive(Clone, Copy, Debug)]
pub struct Launcher<'a> {
    pub stream: &'a Stream,
    /// Each kernel may begin before the one ahead of it has ended; it waits where it reads.
    pub overlapped: bool,
}

impl Launcher<'_> {
    /// Enqueues a kernel; nothing for an empty grid.
    ///
    /// # Safety
    /// The arguments are what the kernel takes, and addresses among them belong to memory that is large enough and lives until
    /// the kernel has ended.
    pub unsafe fn launch(&self, kernel: Kernel, grid: Grid, args: Args) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_with_maps(kernel, grid, args, &[]) }
    }

    /// The same of a kernel whose last arguments are layouts of arrays.
    ///
    /// # Safety
    /// As `launch`; the arrays are as large as the kernel's boxes reach.
    pub unsafe fn launch_with_maps(
        &self,
        kernel: Kernel,
        grid: Grid,
        mut args: Args,
        maps: &[sys::CUtensorMap],
    ) -> Result<(), CudaError> {
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        debug_assert!(args.count + maps.len() <= ARGUMENTS_MAX);
        let values = args.values[..args.count].iter_mut().map(|value| std::ptr::from_mut(value).cast());
        let maps = maps.iter().map(|map| std::ptr::from_ref(map).cast_mut().cast());
        for (pointer, argument) in pointers.iter_mut().zip(values.chain(maps)) {
            *pointer = argument;
        }
        let (mut attributes, count) = attributes(self.overlapped, grid.cluster);
        let config = sys::CUlaunchConfig {
            hStream: self.stream.raw(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
            ..config(grid)
        };
        // SAFETY: the configuration and the arguments live during the call, which copies them; the caller vouches for the rest.
        let result = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                kernel.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        check(result, || {
            let Grid { blocks, threads, shared_bytes, .. } = grid;
            let name = kernel.name;
            format!("launch of {name}, {blocks:?} blocks of {threads:?} threads, {shared_bytes} bytes shared")
        })
    }
}

/// Clusters of this grid that the card runs at once: parts of it may have too few multiprocessors left for one more.
pub(super) fn resident_clusters(kernel: Kernel, grid: Grid) -> Result<usize, CudaError> {
    let (mut attributes, count) = attributes(false, grid.cluster);
    let config = sys::CUlaunchConfig { attrs: attributes.as_mut_ptr(), numAttrs: count, ..config(grid) };
    let mut clusters = 0;
    // SAFETY: the configuration lives during the call, which writes one number.
    let result =
        unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut clusters, kernel.function, &raw const config) };
    check(result, || format!("cuOccupancyMaxActiveClusters of {}", kernel.name))?;
    Ok(clusters.max(1) as usize)
}

/// A launch on the default stream, with no attributes.
fn config(grid: Grid) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: grid.blocks.0 as u32,
        gridDimY: grid.blocks.1 as u32,
        gridDimZ: 1,
        blockDimX: grid.threads as u32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared_bytes as u32,
        hStream: std::ptr::null_mut(),
        attrs: std::ptr::null_mut(),
        numAttrs: 0,
    }
}

/// What a launch is asked to be, and how many of them hold.
fn attributes(overlapped: bool, cluster: usize) -> ([sys::CUlaunchAttribute; 2], u32) {
    use sys::CUlaunchAttributeID as Id;
    // SAFETY: C structs of numbers, for which zero is a value.
    let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    if overlapped {
        attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[count].value.programmaticStreamSerializationAllowed = 1;
        count += 1;
    }
    if cluster > 1 {
        attributes[count].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[count].value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster as u32, y: 1, z: 1 };
        count += 1;
    }
    (attributes, count as u32)
}
