//! Paged attention, causal and windowed, for prompts and single tokens alike.
//!
//! A job is a tile of queries: the heads of one KV head for some consecutive tokens of a row. It walks the 256-token chunks
//! that its queries see, upward, and merges their partial results in that order. Where a step has too few jobs to keep the
//! threads busy, chunks are computed apart and merged afterwards, by the same operations in the same order.

use super::kv::LayerKv;
use super::memory::{OutOfMemory, Zeroed};
use super::pool::{Pool, SendPtr};
use super::step::Step;
use partial::partial_floats;
use run::{Run, arena_floats};
use tile::{CHUNK, TILE_QUERIES};

mod block;
mod partial;
mod run;
#[cfg(test)]
mod tests;
mod tile;

/// Below this many jobs per thread, chunks are spread over the threads.
const JOBS_PER_THREAD: usize = 4;
/// Chunks computed apart before they are merged, per thread.
const CHUNKS_PER_THREAD: usize = 16;

/// Shape of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) kv_heads: usize,
    /// Query heads per KV head.
    pub(super) group: usize,
    pub(super) head_dim: usize,
    pub(super) scale: f32,
    /// Tokens that a query sees, itself included.
    pub(super) window: Option<usize>,
    pub(super) kv_group: usize,
}

/// Queries and where their attention goes; both by token.
pub(super) struct Activations<'a> {
    /// A token's queries are the first floats of its row.
    pub(super) qkv: &'a [f32],
    /// Floats of a row of `qkv`.
    pub(super) stride: usize,
    /// `[token][head][head_dim]`.
    pub(super) out: &'a mut [f32],
}

/// Working memory: one arena per thread, and states and partial results of jobs whose chunks are spread.
pub(super) struct Memory {
    threads: usize,
    head_dim: usize,
    arenas: Zeroed<f32>,
    states: Zeroed<f32>,
    partials: Zeroed<f32>,
    jobs: Vec<Job>,
}

/// A tile of one row.
#[derive(Clone, Copy)]
struct Job {
    row: usize,
    /// First token within the row.
    token: usize,
    tokens: usize,
    kv_head: usize,
    first_chunk: usize,
    chunks: usize,
}

impl Memory {
    pub(super) fn new(threads: usize, head_dim: usize) -> Result<Self, OutOfMemory> {
        let what = "attention";
        let partial = partial_floats(head_dim);
        Ok(Self {
            threads,
            head_dim,
            arenas: Zeroed::new(threads * arena_floats(head_dim), what)?,
            states: Zeroed::new(threads * JOBS_PER_THREAD * partial, what)?,
            partials: Zeroed::new(threads * CHUNKS_PER_THREAD * partial, what)?,
            jobs: Vec::new(),
        })
    }
}

/// Bytes of [`Memory`].
pub(super) fn memory_bytes(threads: usize, head_dim: usize) -> u64 {
    let partials = (JOBS_PER_THREAD + CHUNKS_PER_THREAD) * partial_floats(head_dim);
    (4 * threads * (arena_floats(head_dim) + partials)) as u64
}

/// Attention of all rows of a step over one layer's cache.
pub(super) fn attention(
    pool: &Pool,
    shape: Shape,
    step: &Step,
    kv: LayerKv<'_>,
    memory: &mut Memory,
    x: &mut Activations<'_>,
) {
    assert!(memory.threads == pool.threads() && memory.head_dim == shape.head_dim);
    let mut jobs = std::mem::take(&mut memory.jobs);
    plan_jobs(&shape, step, &mut jobs);
    let out = SendPtr::new(x.out.as_mut_ptr());
    let (qkv, stride, out_len) = (x.qkv, x.stride, x.out.len());
    let run = Run { shape, isa: pool.isa(), step, kv, jobs: &jobs, qkv, stride, out, out_len };
    let spread = jobs.len() < JOBS_PER_THREAD * pool.threads() && jobs.iter().any(|job| job.chunks > 1);
    if spread && pool.threads() > 1 {
        run.spread(pool, memory)
    } else {
        run.whole(pool, memory)
    }
    memory.jobs = jobs;
}

/// Later tiles of a row see more, and are begun first.
fn plan_jobs(shape: &Shape, step: &Step, jobs: &mut Vec<Job>) {
    jobs.clear();
    let tokens_per_tile = (TILE_QUERIES / shape.group).max(1);
    for (row, meta) in step.rows.iter().enumerate() {
        for token in (0..meta.len).step_by(tokens_per_tile).rev() {
            let tokens = tokens_per_tile.min(meta.len - token);
            let position = meta.context + token;
            let first_seen = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let first_chunk = first_seen / CHUNK;
            let chunks = (position + tokens - 1) / CHUNK + 1 - first_chunk;
            let job = |kv_head| Job { row, token, tokens, kv_head, first_chunk, chunks };
            jobs.extend((0..shape.kv_heads).map(job));
        }
    }
}
