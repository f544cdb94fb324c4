//! Which of the candidates takes a request: plain functions of plain data, time and chance being arguments.

mod candidate;
mod cost;
mod prefix_hash;
pub mod speed;

use rand::{Rng, RngExt};

pub use candidate::{Ask, Candidate};
pub use cost::Cost;
pub use speed::Speed;

/// Costs this close to the least are equal: below it the prediction says nothing.
const TIE_SECONDS: f64 = 0.001;
const TIE_RATIO: f64 = 0.02;

/// How a worker is picked.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Policy {
    /// Least predicted seconds, the prefix cache counted in.
    #[default]
    Cost,
    /// Least predicted seconds, as if no worker held any prefix.
    LeastQueue,
    /// One after the other.
    RoundRobin,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
    /// By the prompt's first blocks on a consistent hash, unless that worker is overloaded.
    PrefixHash,
}

/// A picked worker and what is expected of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Position among the candidates.
    pub index: usize,
    /// Predicted seconds, term by term.
    pub cost: Cost,
}

/// Picks one of the candidates; None if there is none. `turn` counts the picks so far.
pub fn pick(
    policy: Policy,
    ask: &Ask,
    candidates: &[Candidate],
    turn: u64,
    rng: &mut impl Rng,
) -> Option<Pick> {
    if candidates.is_empty() {
        return None;
    }
    let mean = cost::mean_batch(candidates);
    let index = match policy {
        Policy::Cost => least(candidates, rng, |c| cost::predict(ask, c, mean).total()),
        Policy::LeastQueue => {
            least(candidates, rng, |c| cost::predict(ask, &c.without_cache(), mean).total())
        }
        Policy::RoundRobin => (turn % candidates.len() as u64) as usize,
        Policy::PowerOfTwo => power_of_two(candidates, rng),
        Policy::PrefixHash => prefix_hash::pick(ask, candidates),
    };
    Some(Pick { index, cost: cost::predict(ask, &candidates[index], mean) })
}

/// Of those within the tie band of the least one with the fewest sequences, at random where that is even: conversations stay
/// with their first worker, so an uneven first draw would last.
fn least(candidates: &[Candidate], rng: &mut impl Rng, cost: impl Fn(&Candidate) -> f64) -> usize {
    let costs: Vec<f64> = candidates.iter().map(cost).collect();
    let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let bound = best + TIE_SECONDS.max(TIE_RATIO * best);
    let tied = || (0..costs.len()).filter(|i| costs[*i] <= bound);
    let fewest = tied().map(|i| candidates[i].sequences()).min();
    let even: Vec<usize> = tied().filter(|i| Some(candidates[*i].sequences()) == fewest).collect();
    match even.as_slice() {
        [] => rng.random_range(0..costs.len()),
        [only] => *only,
        many => many[rng.random_range(0..many.len())],
    }
}

fn power_of_two(candidates: &[Candidate], rng: &mut impl Rng) -> usize {
    let first = rng.random_range(0..candidates.len());
    if candidates.len() == 1 {
        return first;
    }
    let second = (first + rng.random_range(1..candidates.len())) % candidates.len();
    let load = |i: usize| (candidates[i].sequences(), candidates[i].prefill_tokens_ahead);
    if load(second) < load(first) { second } else { first }
}

#[cfg(test)]
mod tests;
