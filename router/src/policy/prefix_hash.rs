//! Consistent hashing with bounded load, for comparison: the same first blocks go to the same worker.

use super::{Ask, Candidate};

/// A worker takes at most this many times the average.
const LOAD_FACTOR: f64 = 1.25;

/// The highest weight of (key, worker) among those below the load bound: when a worker comes or goes, only its own keys
/// move.
pub(super) fn pick(ask: &Ask, candidates: &[Candidate]) -> usize {
    let total: u64 = candidates.iter().map(|c| u64::from(c.sequences())).sum();
    let average = (total + u64::from(ask.choices)) as f64 / candidates.len() as f64;
    let bound = (LOAD_FACTOR * average).ceil() as u64;
    let fits = |c: &Candidate| u64::from(c.sequences()) + u64::from(ask.choices) <= bound;
    let weight = |i: &usize| mix(ask.prefix_key ^ mix(candidates[*i].name_hash));
    (0..candidates.len())
        .filter(|i| fits(&candidates[*i]))
        .max_by_key(weight)
        .or_else(|| (0..candidates.len()).min_by_key(|i| candidates[*i].sequences()))
        .unwrap_or(0)
}

/// The finaliser of splitmix64: every input bit moves every output bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
