//! The same answer over random schedules: batch mates, chunk sizes, prefix hits, preemptions, aborts, resumes.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use thalweg_worker::runner::Runner;

use crate::grammars::grammars;
use crate::workload::{RequestSource, Simulation, hash_oracle, random_setting};

const SEEDS: u64 = 400;

#[test]
fn every_answer_is_that_of_the_sequence_alone() {
    // scheduler-05, prefix-cache-01.
    let (mut preemptions, mut finished) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let simulation = run(seed);
        preemptions += simulation.scheduler.preemptions();
        finished += simulation.finished.len();
        assert_eq!(simulation.scheduler.violations(), 0);
    }
    println!("{finished} sequences finished, {preemptions} preemptions");
    assert!(preemptions > SEEDS && finished > 10 * SEEDS as usize, "the schedules are too easy");
}

fn run(seed: u64) -> Simulation {
    let mut rng = StdRng::seed_from_u64(seed);
    let (config, model, max_model_len) = random_setting(&mut rng);
    let mut source = RequestSource::new(&mut rng, hash_oracle(model), max_model_len);
    source.grammars = grammars();
    source.embeds = true;
    let mut simulation = Simulation::over(config, model);
    let requests = rng.random_range(5..30);
    drive(&mut rng, &mut simulation, &mut source, requests);
    simulation
}

/// Adds requests, aborts some and steps, all at random, until every one has ended.
pub(crate) fn drive<R: Runner>(
    rng: &mut StdRng,
    simulation: &mut Simulation<R>,
    source: &mut RequestSource,
    requests: usize,
) {
    let mut left = requests;
    let arrivals = rng.random_range(0.05..1.0);
    while left > 0 {
        if rng.random_bool(arrivals) {
            source.next(rng).into_iter().for_each(|new| simulation.add(new));
            left -= 1;
        }
        if rng.random_bool(0.03) && !simulation.live.is_empty() {
            let victim = rng.random_range(0..simulation.live.len());
            let request = simulation.live.keys().nth(victim).unwrap().request;
            simulation.abort(request);
        }
        // Uneven pace: steps are one or two deep, and plans see arrivals at any point.
        if rng.random_bool(0.7) {
            simulation.submit();
        }
        if rng.random_bool(0.6) {
            simulation.collect();
        }
    }
    simulation.finish();
}
