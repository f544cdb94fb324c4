//! Masks of constrained rows, once every token before them is known.

use thalweg_model::grammar::TokenMask;

use super::sequence::{Leaving, Running};
use super::{Scheduler, SequenceKey};
use crate::plan::StepMasks;

/// Rows that are worth another thread: a mask takes some 5 us, up to 50 where nothing about it is known beforehand; starting a
/// thread takes 50.
const ROWS_PER_THREAD: usize = 16;
/// Threads at most, beside the engine's: on the CPU they take time from the model's.
const THREADS_MAX: usize = 8;

/// A sequence whose row waits, and the place of its mask.
type Waiting<'a> = (&'a mut Running, &'a mut Option<TokenMask>);

impl Scheduler {
    /// Masks of the oldest step in flight, whose inputs are all known; None when it wants none or has got them.
    pub fn masks(&mut self) -> Option<StepMasks> {
        let step = self.in_flight.front_mut().filter(|step| step.wants_masks)?;
        step.wants_masks = false;
        let keys: Vec<SequenceKey> =
            step.rows.iter().filter(|row| row.constrained).map(|row| row.key).collect();
        let mut masks = vec![None; keys.len()];
        let mut places: Vec<(SequenceKey, &mut Option<TokenMask>)> =
            keys.into_iter().zip(&mut masks).collect();
        places.sort_unstable_by_key(|(key, _)| *key);
        let mut running = self.running.iter_mut();
        let mut waiting: Vec<Waiting<'_>> = Vec::with_capacity(places.len());
        for (key, mask) in places {
            // Both ascend, and who has a row in flight is there. What has ended meanwhile gets no mask.
            let found = running.by_ref().find(|(of, _)| **of == key).map(|(_, running)| running);
            waiting.extend(found.filter(|r| r.leaving != Some(Leaving::Over)).map(|r| (r, mask)));
        }
        compute(&mut waiting);
        Some(StepMasks(masks))
    }
}

fn compute(waiting: &mut [Waiting<'_>]) {
    let threads = (waiting.len() / ROWS_PER_THREAD).clamp(1, THREADS_MAX);
    let share = waiting.len().div_ceil(threads).max(1);
    let (own, others) = waiting.split_at_mut(share.min(waiting.len()));
    std::thread::scope(|scope| {
        for part in others.chunks_mut(share) {
            scope.spawn(|| part.iter_mut().for_each(compute_one));
        }
        own.iter_mut().for_each(compute_one);
    });
}

fn compute_one((running, mask): &mut Waiting<'_>) {
    let sequence = &mut running.sequence;
    let output_index = sequence.output_len() as u32;
    if let Some(constraint) = &mut sequence.constraint {
        **mask = constraint.mask(&sequence.sampling, output_index);
    }
}
