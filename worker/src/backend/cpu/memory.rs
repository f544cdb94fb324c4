//! Memory that is zero and takes no room until it is touched, and how much of it the machine can give.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The system refused memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no memory for {what}: {bytes} bytes")]
pub struct OutOfMemory {
    /// What it was for.
    pub what: &'static str,
    /// How much was asked for.
    pub bytes: u64,
}

/// Types for which all bits zero is a value.
pub(super) trait Plain: Copy + Send + Sync {}
impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for f32 {}

/// A slice of zeros straight from the kernel, aligned to a page.
pub(super) struct Zeroed<T: Plain> {
    start: NonNull<T>,
    len: usize,
}

impl<T: Plain> Zeroed<T> {
    pub(super) fn new(len: usize, what: &'static str) -> Result<Self, OutOfMemory> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        let bytes = len.checked_mul(size_of::<T>()).ok_or(OutOfMemory { what, bytes: u64::MAX })?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches no memory of ours.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        start.map(|start| Self { start, len }).ok_or(OutOfMemory { what, bytes: bytes as u64 })
    }
}

impl<T: Plain> Deref for Zeroed<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds len values, zero or written since, and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Zeroed<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> Drop for Zeroed<T> {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping was made with this length and nobody can refer to it any more. A failure would leak it.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len * size_of::<T>()) };
        }
    }
}

// SAFETY: it owns its memory like a Vec does.
unsafe impl<T: Plain> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Zeroed<T> {}

/// Bytes that a process can still take without pushing others out: the kernel's estimate, or what the control group leaves.
/// None where the system does not tell.
pub fn available_bytes() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_available(&text));
    let number = |file| std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let limit = number("/sys/fs/cgroup/memory.max");
    let group = limit.map(|limit| limit.saturating_sub(number("/sys/fs/cgroup/memory.current").unwrap_or(0)));
    machine.into_iter().chain(group).min()
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_until_written() {
        let mut memory = Zeroed::<f32>::new(1 << 20, "test").expect("4 MiB");
        assert!(memory.iter().all(|x| *x == 0.0));
        memory[77] = 1.5;
        assert_eq!((memory[77], memory.len()), (1.5, 1 << 20));
        assert!(Zeroed::<u32>::new(0, "test").expect("nothing").is_empty());
    }

    #[test]
    fn too_much_is_an_error() {
        let result = Zeroed::<u8>::new(1 << 60, "test").err();
        assert_eq!(result, Some(OutOfMemory { what: "test", bytes: 1 << 60 }));
        assert!(Zeroed::<f32>::new(usize::MAX, "test").is_err());
    }

    #[test]
    fn meminfo() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   20480 kB\n";
        assert_eq!(parse_available(text), Some(20 << 20));
        assert_eq!(parse_available("MemTotal: 1 kB"), None);
    }
}
