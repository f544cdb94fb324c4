//! The jobs of one layer's attention over the threads.

use std::ops::Range;

use super::super::arena::{Slabs, each};
use super::super::config::BLOCK_TOKENS;
use super::super::isa::Isa;
use super::super::kv::LayerKv;
use super::super::kv_dtype::with_kv_element;
use super::super::lanes::dispatch;
use super::super::pool::{Pool, SendPtr};
use super::super::step::Step;
use super::partial::{FinishKernel, MergeKernel, PartialMut, partial_floats};
use super::tile::{CHUNK, ChunkKernel, Scratch, TILE_QUERIES, Tile, scratch_floats};
use super::{CHUNKS_PER_THREAD, Job, Memory, Shape};

const BLOCKS_PER_CHUNK: usize = CHUNK / BLOCK_TOKENS;

/// One layer's attention, shared by the threads.
pub(super) struct Run<'a> {
    pub(super) shape: Shape,
    pub(super) isa: Isa,
    pub(super) step: &'a Step,
    pub(super) kv: LayerKv<'a>,
    pub(super) jobs: &'a [Job],
    pub(super) qkv: &'a [f32],
    pub(super) stride: usize,
    pub(super) out: SendPtr<f32>,
    pub(super) out_len: usize,
}

impl Run<'_> {
    /// Each job by one thread.
    pub(super) fn whole(&self, pool: &Pool, memory: &mut Memory) {
        let arenas = Slabs::new(&mut memory.arenas, arena_floats(self.shape.head_dim));
        each(pool, self.jobs.len(), &|thread, index| {
            // SAFETY: every thread has an arena of its own.
            let arena = unsafe { arenas.get(thread) };
            let (mut scratch, mut state, mut partial) = split_arena(arena, self.shape.head_dim);
            let job = self.jobs[index];
            state.clear();
            for chunk in 0..job.chunks {
                self.chunk(&job, job.first_chunk + chunk, &mut scratch, &mut partial);
                self.merge(&job, &mut state, &partial);
            }
            self.finish(&job, &state);
        });
    }

    /// Chunks of all jobs over the threads, some at a time, each round merged by job.
    pub(super) fn spread(&self, pool: &Pool, memory: &mut Memory) {
        let arenas = Slabs::new(&mut memory.arenas, arena_floats(self.shape.head_dim));
        let states = Slabs::new(&mut memory.states, partial_floats(self.shape.head_dim));
        let partials = Slabs::new(&mut memory.partials, partial_floats(self.shape.head_dim));
        let per_round = CHUNKS_PER_THREAD * pool.threads();
        let total: usize = self.jobs.iter().map(|job| job.chunks).sum();
        for start in (0..total).step_by(per_round) {
            let round = start..total.min(start + per_round);
            each(pool, round.len(), &|thread, index| {
                let (job, chunk) = self.locate(round.start + index);
                // SAFETY: every thread has an arena of its own, every chunk of a round a partial of its own.
                let (arena, partial) = unsafe { (arenas.get(thread), partials.get(index)) };
                let (mut scratch, ..) = split_arena(arena, self.shape.head_dim);
                self.chunk(&self.jobs[job], chunk, &mut scratch, &mut PartialMut::over(partial));
            });
            each(pool, self.jobs.len(), &|_, index| {
                // SAFETY: every job has a state of its own, and its chunks of the round are its own.
                let mut state = PartialMut::over(unsafe { states.get(index) });
                self.merge_round(index, &round, &mut state, &partials);
            });
        }
    }

    fn merge_round(
        &self,
        index: usize,
        round: &Range<usize>,
        state: &mut PartialMut<'_>,
        partials: &Slabs<'_>,
    ) {
        let job = &self.jobs[index];
        let begin: usize = self.jobs[..index].iter().map(|job| job.chunks).sum();
        let end = begin + job.chunks;
        if round.contains(&begin) {
            state.clear();
        }
        for chunk in begin.max(round.start)..end.min(round.end) {
            // SAFETY: this job's chunks are touched by this task alone.
            let partial = PartialMut::over(unsafe { partials.get(chunk - round.start) });
            self.merge(job, state, &partial);
        }
        if round.contains(&(end - 1)) {
            self.finish(job, state);
        }
    }

    /// Job and absolute chunk of the n-th chunk of all jobs.
    fn locate(&self, mut n: usize) -> (usize, usize) {
        for (index, job) in self.jobs.iter().enumerate() {
            if n < job.chunks {
                return (index, job.first_chunk + n);
            }
            n -= job.chunks;
        }
        unreachable!("chunk beyond the last job");
    }

    fn chunk(&self, job: &Job, chunk: usize, scratch: &mut Scratch<'_>, out: &mut PartialMut<'_>) {
        let mut seen = [(0, 0); TILE_QUERIES];
        let seen = &mut seen[..job.tokens];
        self.see(job, chunk, seen);
        let some = seen.iter().filter(|(from, to)| from < to);
        let low = some.clone().map(|(from, _)| *from).min().unwrap_or(0);
        let high = some.map(|(_, to)| *to).max().unwrap_or(0);
        let (first_block, end_block) = (low / BLOCK_TOKENS, high.div_ceil(BLOCK_TOKENS));
        let mut blocks: [(&[u8], &[u8]); BLOCKS_PER_CHUNK] = [(&[], &[]); BLOCKS_PER_CHUNK];
        let blocks = &mut blocks[..end_block - first_block];
        for (index, block) in blocks.iter_mut().enumerate() {
            let logical = chunk * BLOCKS_PER_CHUNK + first_block + index;
            let physical = self.step.block(job.row, self.shape.kv_group, logical);
            *block = (self.kv.keys(physical, job.kv_head), self.kv.values(physical, job.kv_head));
        }
        let Shape { group, head_dim, scale, .. } = self.shape;
        let at = (self.step.rows[job.row].start + job.token) * self.stride + job.kv_head * group * head_dim;
        let q = &self.qkv[at..at + (job.tokens - 1) * self.stride + group * head_dim];
        let tile = Tile { group, head_dim, scale, q, stride: self.stride, seen, blocks, first_block };
        with_kv_element!(self.kv.dtype, E => {
            dispatch(self.isa, ChunkKernel::<E>::new(tile, scratch, out))
        });
    }

    /// Keys of the chunk that each token of the job sees.
    fn see(&self, job: &Job, chunk: usize, seen: &mut [(usize, usize)]) {
        let begin = chunk * CHUNK;
        for (token, seen) in seen.iter_mut().enumerate() {
            let end = self.step.rows[job.row].context + job.token + token + 1;
            let from = self.shape.window.map_or(0, |window| end.saturating_sub(window));
            *seen = (from.max(begin) - begin, end.clamp(begin, begin + CHUNK) - begin);
        }
    }

    fn merge(&self, job: &Job, state: &mut PartialMut<'_>, next: &PartialMut<'_>) {
        let queries = job.tokens * self.shape.group;
        dispatch(self.isa, MergeKernel { state, next, queries, head_dim: self.shape.head_dim });
    }

    fn finish(&self, job: &Job, state: &PartialMut<'_>) {
        let Shape { kv_heads, group, head_dim, .. } = self.shape;
        let first = self.step.rows[job.row].start + job.token;
        for query in 0..job.tokens * group {
            let head = job.kv_head * group + query % group;
            let at = ((first + query / group) * kv_heads * group + head) * head_dim;
            assert!(at + head_dim <= self.out_len);
            // SAFETY: within the output, as just checked; a job's heads and tokens are its own.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), head_dim) };
            dispatch(self.isa, FinishKernel { state, query, out });
        }
    }
}

/// Floats of a thread's arena: scratch, a state and a partial result.
pub(super) fn arena_floats(head_dim: usize) -> usize {
    scratch_floats(head_dim).iter().sum::<usize>() + 2 * partial_floats(head_dim)
}

fn split_arena(arena: &mut [f32], head_dim: usize) -> (Scratch<'_>, PartialMut<'_>, PartialMut<'_>) {
    let [keys, values, scores] = scratch_floats(head_dim);
    let (keys, rest) = arena.split_at_mut(keys);
    let (values, rest) = rest.split_at_mut(values);
    let (scores, rest) = rest.split_at_mut(scores);
    let (state, partial) = rest.split_at_mut(partial_floats(head_dim));
    (Scratch { keys, values, scores }, PartialMut::over(state), PartialMut::over(partial))
}
