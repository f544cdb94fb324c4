//! Memory of packed weights, in huge pages where the system has them: a step reads every page once, and small pages would cost it a
//! TLB miss for each 4 KiB and stop the prefetchers there. Small matrices therefore share chunks.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// Most matrices of a layer fit many times; what is left of the last chunk is never touched, hence never resident.
const CHUNK_BYTES: usize = 32 << 20;
/// Matrices of at least this have a mapping of their own.
const OWN_CHUNK_BYTES: usize = 8 << 20;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Matrices begin on cache lines.
const ALIGNMENT: usize = 64;

/// The chunk that has room yet, and how much of it is taken. Chunks live as long as their matrices.
static OPEN_CHUNK: Mutex<(Weak<Chunk>, usize)> = Mutex::new((Weak::new(), 0));

/// Bytes of one owner within a chunk, zero at first.
pub(super) struct Pages {
    chunk: Arc<Chunk>,
    offset: usize,
    len: usize,
}

impl Pages {
    /// `len` zero bytes, aligned to a cache line.
    pub(super) fn zeroed(len: usize) -> io::Result<Self> {
        if len >= OWN_CHUNK_BYTES {
            return Ok(Self { chunk: Arc::new(Chunk::map(len)?), offset: 0, len });
        }
        let mut open = OPEN_CHUNK.lock();
        let (chunk, offset) = match open.0.upgrade() {
            Some(chunk) if open.1 + len <= chunk.len => (chunk, open.1),
            _ => (Arc::new(Chunk::map(CHUNK_BYTES)?), 0),
        };
        *open = (Arc::downgrade(&chunk), (offset + len).next_multiple_of(ALIGNMENT));
        Ok(Self { chunk, offset, len })
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies in the chunk, which is mapped and initialised (zeroed by the system) while we hold it; no other
        // `Pages` was given any part of it.
        unsafe { std::slice::from_raw_parts(self.chunk.start.as_ptr().add(self.offset), self.len) }
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.chunk.start.as_ptr().add(self.offset), self.len) }
    }
}

/// A mapping whose start is aligned to a huge page.
struct Chunk {
    mapped: NonNull<libc::c_void>,
    mapped_len: usize,
    start: NonNull<u8>,
    len: usize,
}

impl Chunk {
    fn map(len: usize) -> io::Result<Self> {
        let mapped_len = len.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no memory in use.
        let address = unsafe {
            libc::mmap(std::ptr::null_mut(), mapped_len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        let mapped = NonNull::new(address).filter(|address| address.as_ptr() != libc::MAP_FAILED);
        let mapped = mapped.ok_or_else(io::Error::last_os_error)?;
        let gap = address.cast::<u8>().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        // SAFETY: the gap is at most the huge page by which the mapping is longer than `len`.
        let start = unsafe { mapped.cast::<u8>().add(gap) };
        advise_huge(start.as_ptr().cast(), len);
        Ok(Self { mapped, mapped_len, start, len })
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `map`; every `Pages` in it is gone.
        unsafe { libc::munmap(self.mapped.as_ptr(), self.mapped_len) };
    }
}

// SAFETY: a chunk is plain memory; `Pages` hands out its parts by Rust's rules for borrows.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

/// Only a wish: small pages serve as well, if slower.
#[cfg(target_os = "linux")]
fn advise_huge(address: *mut libc::c_void, len: usize) {
    // SAFETY: the range lies in a mapping of our own, and the advice changes no contents.
    unsafe { libc::madvise(address, len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_address: *mut libc::c_void, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_aligned_and_apart() {
        let mut parts: Vec<Pages> = [0, 1, 100, 5 << 20, 7 << 20, 7 << 20, 7 << 20, 9 << 20]
            .map(|len| Pages::zeroed(len).unwrap())
            .into();
        for (index, part) in parts.iter_mut().enumerate() {
            assert!(part.iter().all(|&byte| byte == 0), "part {index}");
            assert!((part.as_ptr() as usize).is_multiple_of(ALIGNMENT), "part {index}");
            part.fill(index as u8 + 1);
        }
        for (index, part) in parts.iter().enumerate() {
            assert!(part.iter().all(|&byte| byte == index as u8 + 1), "part {index} was overwritten");
        }
    }
}
