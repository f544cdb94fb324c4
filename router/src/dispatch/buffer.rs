//! Tokens between a worker and a client: workers are always drained, and the memory for it is bounded over all
//! requests. When it is full, the request whose client has read nothing for longest is cut off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hashbrown::HashMap;
use parking_lot::Mutex;
use thalweg_proto::code::ErrorCode;
use thalweg_proto::v1;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::generation::GenerationEvent;
use crate::error::RouterError;

/// All buffers of a router.
pub(super) struct BufferPool {
    bytes_max: usize,
    bytes: AtomicUsize,
    last_number: AtomicU64,
    buffers: Mutex<HashMap<u64, Arc<Shared>>>,
}

/// What was received for one client and not yet read.
pub(super) struct Buffer {
    number: u64,
    pool: Arc<BufferPool>,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    arrived: Notify,
    cut: Notify,
    complete: AtomicBool,
}

struct State {
    events: VecDeque<(usize, GenerationEvent)>,
    bytes: usize,
    last_read: Instant,
    end: Option<Result<(), RouterError>>,
}

impl BufferPool {
    pub(super) fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            bytes: AtomicUsize::new(0),
            last_number: AtomicU64::new(0),
            buffers: Mutex::default(),
        })
    }

    /// Bytes held at present.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Buffers in use: one per generation.
    pub(super) fn len(&self) -> usize {
        self.buffers.lock().len()
    }

    /// A buffer for one generation.
    pub(super) fn open(self: &Arc<Self>) -> Arc<Buffer> {
        let number = self.last_number.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                events: VecDeque::new(),
                bytes: 0,
                last_read: Instant::now(),
                end: None,
            }),
            arrived: Notify::new(),
            cut: Notify::new(),
            complete: AtomicBool::new(false),
        });
        self.buffers.lock().insert(number, Arc::clone(&shared));
        Arc::new(Buffer { number, pool: Arc::clone(self), shared })
    }

    fn cut_most_stalled(&self) {
        let buffers = self.buffers.lock();
        let stalled_since = |shared: &&Arc<Shared>| {
            let state = shared.state.lock();
            (state.bytes > 0).then_some(state.last_read)
        };
        let victim =
            buffers.values().filter_map(|s| Some((stalled_since(&s)?, s))).min_by_key(|(since, _)| *since);
        if let Some((_, victim)) = victim {
            let freed = victim
                .cut("the client read too slowly and the router's buffer is full; the request was ended");
            self.bytes.fetch_sub(freed, Ordering::Relaxed);
        }
    }
}

impl Buffer {
    /// Adds an event.
    pub(super) fn push(&self, event: GenerationEvent) {
        let bytes = event_bytes(&event);
        let total = {
            let mut state = self.shared.state.lock();
            if state.end.is_some() {
                return;
            }
            if state.bytes == 0 {
                // What is unread now was not there before.
                state.last_read = Instant::now();
            }
            state.events.push_back((bytes, event));
            state.bytes += bytes;
            // While no reader can take the event: what is taken off was added before.
            self.pool.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
        };
        self.shared.arrived.notify_one();
        if total > self.pool.bytes_max {
            self.pool.cut_most_stalled();
        }
    }

    /// The next event is the last, though the task behind it has still to close what it holds.
    pub(super) fn complete(&self) {
        self.shared.complete.store(true, Ordering::Release);
    }

    /// Nothing is left to be cancelled.
    pub(super) fn is_complete(&self) -> bool {
        self.shared.complete.load(Ordering::Acquire)
    }

    /// Nothing comes after this.
    pub(super) fn end(&self, end: Result<(), RouterError>) {
        self.shared.state.lock().end.get_or_insert(end);
        self.shared.arrived.notify_one();
    }

    /// Waits until the client has read nothing for so long although something was there, and cuts it off.
    pub(super) async fn stalled(&self, timeout: Duration) {
        loop {
            let unread_since = self.unread_since();
            let deadline = unread_since.unwrap_or_else(Instant::now) + timeout;
            if unread_since.is_some() && deadline <= Instant::now() {
                let freed = self.shared.cut("the client read nothing for too long; the request was ended");
                self.pool.bytes.fetch_sub(freed, Ordering::Relaxed);
                return;
            }
            sleep_until(deadline).await;
        }
    }

    fn unread_since(&self) -> Option<Instant> {
        let state = self.shared.state.lock();
        (state.bytes > 0).then_some(state.last_read)
    }

    /// Waits until this buffer was cut off to make room for others.
    pub(super) async fn cut_off(&self) {
        self.shared.cut.notified().await;
    }

    /// The next event; None at the end. An error is the last event.
    pub(super) async fn next(&self) -> Option<Result<GenerationEvent, RouterError>> {
        loop {
            if let Some(next) = self.try_next() {
                return next;
            }
            self.shared.arrived.notified().await;
        }
    }

    fn try_next(&self) -> Option<Option<Result<GenerationEvent, RouterError>>> {
        let mut state = self.shared.state.lock();
        state.last_read = Instant::now();
        if let Some((bytes, event)) = state.events.pop_front() {
            state.bytes -= bytes;
            self.pool.bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Some(Some(Ok(event)));
        }
        let end = state.end.as_mut()?;
        Some(std::mem::replace(end, Ok(())).err().map(Err))
    }
}

impl Shared {
    /// Bytes freed.
    fn cut(&self, message: &str) -> usize {
        let mut state = self.state.lock();
        state.events.clear();
        state.end = Some(Err(RouterError::new(ErrorCode::Cancelled, message)));
        self.arrived.notify_one();
        self.cut.notify_one();
        std::mem::take(&mut state.bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.pool.buffers.lock().remove(&self.number);
        let left = std::mem::take(&mut self.shared.state.lock().bytes);
        self.pool.bytes.fetch_sub(left, Ordering::Relaxed);
    }
}

/// About what an event takes in memory.
fn event_bytes(event: &GenerationEvent) -> usize {
    let logprobs = |list: &[v1::TokenLogprobs]| -> usize {
        list.iter().map(|l| size_of::<v1::TokenLogprobs>() + size_of_val(l.top.as_slice())).sum()
    };
    let content = match event {
        GenerationEvent::Prompt(info) => {
            logprobs(&info.prompt_logprobs) + size_of_val(info.embedding.as_slice())
        }
        GenerationEvent::Deltas(deltas) => deltas
            .iter()
            .map(|d| {
                size_of::<v1::ChoiceDelta>() + size_of_val(d.token_ids.as_slice()) + logprobs(&d.logprobs)
            })
            .sum(),
    };
    size_of::<GenerationEvent>() + content
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(count: u32) -> GenerationEvent {
        GenerationEvent::Deltas(vec![v1::ChoiceDelta {
            token_ids: (0..count).collect(),
            ..Default::default()
        }])
    }

    #[tokio::test(start_paused = true)]
    async fn events_come_in_order_and_the_end_last() {
        let pool = BufferPool::new(1 << 20);
        let buffer = pool.open();
        buffer.push(tokens(1));
        buffer.push(tokens(2));
        buffer.end(Err(RouterError::new(ErrorCode::Internal, "x")));
        buffer.push(tokens(3));
        assert_eq!(buffer.next().await.unwrap().unwrap(), tokens(1));
        assert_eq!(buffer.next().await.unwrap().unwrap(), tokens(2));
        assert_eq!(buffer.next().await.unwrap().unwrap_err().message, "x");
        assert!(buffer.next().await.is_none() && buffer.next().await.is_none());
        assert_eq!(pool.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_cut_off_and_one_that_waits_is_not() {
        const STALL: Duration = Duration::from_secs(30);
        let pool = BufferPool::new(1 << 20);
        let [waits, sleeps] = [pool.open(), pool.open()];
        tokio::time::advance(10 * STALL).await;
        waits.push(tokens(1));
        waits.next().await.unwrap().unwrap();
        sleeps.push(tokens(1));
        let begin = Instant::now();
        tokio::select! {
            () = sleeps.stalled(STALL) => assert_eq!(begin.elapsed(), STALL),
            () = waits.stalled(STALL) => panic!("nothing was there to be read"),
        }
        assert_eq!(sleeps.next().await.unwrap().unwrap_err().code, ErrorCode::Cancelled);
        assert_eq!(pool.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_most_stalled_client_makes_room() {
        let pool = BufferPool::new(2 * event_bytes(&tokens(1_000)) + 1);
        let [slow, slower, reading] = [pool.open(), pool.open(), pool.open()];
        slower.push(tokens(1_000));
        tokio::time::advance(Duration::from_secs(1)).await;
        slow.push(tokens(10));
        slow.next().await.unwrap().unwrap();
        slow.push(tokens(500));
        reading.push(tokens(10));
        reading.next().await.unwrap().unwrap();
        reading.push(tokens(1_000));
        slower.cut_off().await;
        assert_eq!(slower.next().await.unwrap().unwrap_err().code, ErrorCode::Cancelled);
        assert_eq!(slow.next().await.unwrap().unwrap(), tokens(500), "the others lose nothing");
        assert_eq!(reading.next().await.unwrap().unwrap(), tokens(1_000));
        drop((slow, slower, reading));
        assert_eq!((pool.bytes(), pool.len()), (0, 0));
    }
}
