//! Working memory that is cut into equal slabs, one for each thread or piece of work.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::pool::{Pool, SendPtr};

/// Equal parts of one slice, handed out by number.
pub(super) struct Slabs<'a> {
    start: SendPtr<f32>,
    size: usize,
    count: usize,
    memory: PhantomData<&'a mut [f32]>,
}

impl<'a> Slabs<'a> {
    /// Cuts `memory` into slabs of `size`; what is left over is not used.
    pub(super) fn new(memory: &'a mut [f32], size: usize) -> Self {
        Self {
            start: SendPtr::new(memory.as_mut_ptr()),
            size,
            count: memory.len() / size,
            memory: PhantomData,
        }
    }

    /// Slab number `index`.
    ///
    /// # Safety
    /// Nobody else holds this slab.
    #[allow(clippy::mut_from_ref, reason = "slabs of distinct numbers are distinct memory")]
    pub(super) unsafe fn get(&self, index: usize) -> &mut [f32] {
        assert!(index < self.count, "slab {index} of {}", self.count);
        // SAFETY: within the slice, which is borrowed for 'a; the caller alone holds this part.
        unsafe { std::slice::from_raw_parts_mut(self.start.get().add(index * self.size), self.size) }
    }
}

/// Calls `f(thread, index)` for each of `0..count`, in order of starting. No two calls at a time have the same thread number.
pub(super) fn each(pool: &Pool, count: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    let next = AtomicUsize::new(0);
    pool.run(pool.threads().min(count), &|thread| {
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < count) {
            f(thread, index);
        }
    });
}
