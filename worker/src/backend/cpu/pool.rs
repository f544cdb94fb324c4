//! A fork-join pool: the threads that one worker's kernels run on.
//!
//! Tasks are claimed one by one, so a thread that the system has put aside costs its own task, not its share. Results never
//! depend on who ran what: a task's output is a function of its number.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use super::isa::Isa;

/// Looks at the ticket before a thread without work parks: some 50 us, more than the gap between two kernels of a step.
const SPINS_BEFORE_PARK: usize = 1000;

/// Threads for one worker. The caller of `run` is one of them; a pool of one starts none.
pub struct Pool {
    shared: Arc<Shared>,
    /// Held by the one `run` that has the threads; another (nested, or from a second thread) runs its tasks itself.
    busy: Mutex<()>,
    helpers: Vec<JoinHandle<()>>,
    isa: Isa,
}

impl Pool {
    /// A pool of `threads` (at least one) with the kernels of `Isa::from_env`.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(threads, Isa::from_env())
    }

    /// A pool whose kernels use `isa`, or the best there is where this processor lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Self {
        let isa = if isa.is_supported() { isa } else { Isa::best() };
        let shared = Arc::new(Shared::new());
        let helpers = (1..threads.max(1)).map_while(|index| spawn_helper(index, shared.clone())).collect();
        Self { shared, busy: Mutex::new(()), helpers, isa }
    }

    /// Threads that work, the caller included.
    pub fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// What the kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Calls `f` once for each of `0..tasks`, on any thread and in any order, and returns when all have ended. The first panic
    /// of a task goes on in the caller, after the others.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let guard = if tasks > 1 && !self.helpers.is_empty() { self.busy.try_lock() } else { None };
        if guard.is_none() {
            return (0..tasks).for_each(f);
        }
        self.shared.publish(tasks, f);
        self.shared.work();
        self.shared.wait_done();
        let panic = self.shared.panic.lock().take();
        drop(guard);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Splits `data` into chunks of `len` (the last may be shorter) and calls `f(index, chunk)` for each, as `run` does.
    pub fn chunks<T: Send>(&self, data: &mut [T], len: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let total = data.len();
        let base = SendPtr(data.as_mut_ptr());
        self.run(total.div_ceil(len.max(1)), &|index| {
            let start = index * len.max(1);
            let end = total.min(start + len.max(1));
            // SAFETY: chunks of distinct indices are disjoint parts of `data`, which `run` outlives and nobody else touches.
            let chunk = unsafe { std::slice::from_raw_parts_mut(base.get().add(start), end - start) };
            f(index, chunk);
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake_helpers();
        for helper in self.helpers.drain(..) {
            // A helper catches its tasks' panics; there is nothing to learn from joining it.
            let _ = helper.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("threads", &self.threads()).field("isa", &self.isa).finish()
    }
}

/// A pointer into memory of which each task touches its own part.
pub(crate) struct SendPtr<T>(*mut T);

impl<T> SendPtr<T> {
    /// For the parts of `data`.
    pub(crate) fn new(data: *mut T) -> Self {
        Self(data)
    }

    /// The pointer; what may be done with it is the user's promise.
    pub(crate) fn get(&self) -> *mut T {
        self.0
    }
}

// SAFETY: a pointer alone does nothing; whoever dereferences it says there why its part is its own.
unsafe impl<T: Send> Send for SendPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SendPtr<T> {}

type Task = dyn Fn(usize) + Sync;

/// What the caller and its helpers share. `ticket` is a job's number in the high half and its unclaimed tasks in the low half;
/// taking one down by compare-and-swap is a claim. A claimed task keeps `run` from returning, so from a claim to the end of its
/// task, and only then, `job` and `tasks` stand still and the closure lives.
struct Shared {
    ticket: AtomicU64,
    /// The caller's closure, its lifetime erased.
    job: UnsafeCell<Option<*const Task>>,
    tasks: AtomicUsize,
    unfinished: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    work_came: Condvar,
    work_done: Condvar,
}

// SAFETY: `job` is written by the one caller that holds `Pool::busy` while no task is claimed, and read between a claim and the
// end of its task; the ticket's store and compare-and-swap order the two. All else is Sync of itself.
unsafe impl Sync for Shared {}
// SAFETY: as above; the closure behind the pointer is Sync.
unsafe impl Send for Shared {}

const UNCLAIMED: u64 = u32::MAX as u64;

impl Shared {
    fn new() -> Self {
        Self {
            ticket: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            tasks: AtomicUsize::new(0),
            unfinished: AtomicUsize::new(0),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            work_came: Condvar::new(),
            work_done: Condvar::new(),
        }
    }

    fn publish(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let count = u32::try_from(tasks).expect("the tasks of one job fit 32 bits");
        // SAFETY: only the lifetime changes; `run` does not return before every claimed task has ended.
        let erased = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const Task>(f) };
        // SAFETY: the job before has no claimed task left, so nobody reads the cell.
        unsafe { *self.job.get() = Some(erased) };
        self.tasks.store(tasks, Ordering::Relaxed);
        self.unfinished.store(tasks, Ordering::Relaxed);
        let number = (self.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        self.ticket.store(number << 32 | u64::from(count), Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_helpers();
        }
    }

    fn wake_helpers(&self) {
        let _guard = self.lock.lock();
        self.work_came.notify_all();
    }

    /// Claims and runs tasks until none is left unclaimed.
    fn work(&self) {
        while let Some(index) = self.claim() {
            // SAFETY: a task of this job is claimed (by us), so the cell stands still and the closure lives.
            let f = unsafe { (*self.job.get()).map(|job| &*job) };
            if let Some(f) = f
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(index)))
            {
                self.panic.lock().get_or_insert(payload);
            }
            if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                let _guard = self.lock.lock();
                self.work_done.notify_one();
            }
        }
    }

    fn claim(&self) -> Option<usize> {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        while ticket & UNCLAIMED > 0 {
            match self.ticket.compare_exchange_weak(ticket, ticket - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(self.tasks.load(Ordering::Relaxed) - (ticket & UNCLAIMED) as usize),
                Err(now) => ticket = now,
            }
        }
        None
    }

    fn has_work(&self) -> bool {
        self.ticket.load(Ordering::SeqCst) & UNCLAIMED > 0
    }

    fn wait_done(&self) {
        let done = || self.unfinished.load(Ordering::SeqCst) == 0;
        if spin_until(done) {
            return;
        }
        let mut guard = self.lock.lock();
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !done() {
            self.work_done.wait(&mut guard);
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    fn help_until_stopped(&self) {
        loop {
            self.work();
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let wanted = || self.has_work() || self.stop.load(Ordering::Relaxed);
            if !spin_until(wanted) {
                self.sleep_until(wanted);
            }
        }
    }

    fn sleep_until(&self, wanted: impl Fn() -> bool) {
        let mut guard = self.lock.lock();
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !wanted() {
            self.work_came.wait(&mut guard);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

fn spin_until(condition: impl Fn() -> bool) -> bool {
    (0..SPINS_BEFORE_PARK).any(|_| {
        std::hint::spin_loop();
        condition()
    })
}

/// None where the system gives no thread: the pool then works with those that it has.
fn spawn_helper(index: usize, shared: Arc<Shared>) -> Option<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(format!("kernel-{index}"));
    thread
        .spawn(move || shared.help_until_stopped())
        .inspect_err(|error| tracing::warn!(%error, index, "could not start a kernel thread"))
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 3, 7, 64, 1000] {
                let runs: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    runs[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    runs.iter().all(|n| n.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn many_jobs_in_a_row() {
        let pool = Pool::new(4);
        let sum = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(5, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 20_000 * 10);
    }

    #[test]
    fn chunks_cover_the_data() {
        let pool = Pool::new(3);
        for (len, chunk) in [(0, 4), (1, 4), (10, 4), (12, 4), (5, 100), (5, 0)] {
            let mut data = vec![usize::MAX; len];
            pool.chunks(&mut data, chunk, &|index, part| part.fill(index));
            let expected: Vec<usize> = (0..len).map(|i| i / chunk.max(1)).collect();
            assert_eq!(data, expected, "{len} by {chunk}");
        }
    }

    #[test]
    fn a_nested_run_does_not_block() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(3, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 12);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        let caught =
            catch_unwind(AssertUnwindSafe(|| pool.run(8, &|task| assert_ne!(task, 3, "task three"))));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, &|task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 28);
    }
}
