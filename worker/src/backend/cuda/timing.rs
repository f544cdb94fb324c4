//! What the GPU takes for the same thing done in several ways.

use super::context::{Event, Stream};
use super::error::CudaError;

/// Rounds, of which the median counts.
const ROUNDS: usize = 3;
/// Length of a turn, in which the card's clock comes to follow its power; and how often a thing is done in one at least.
const TURN_SECONDS: f64 = 4e-3;
const TURN_TIMES: usize = 4;

/// Seconds of one of so many times that `work` is enqueued, one behind the other.
pub(super) fn time(
    stream: &Stream,
    times: usize,
    mut work: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let (begin, end) = (Event::new(stream.gpu())?, Event::new(stream.gpu())?);
    begin.record(stream)?;
    for _ in 0..times {
        work()?;
    }
    end.record(stream)?;
    stream.synchronize()?;
    Ok(end.seconds_since(&begin)? / times as f64)
}

/// Seconds by way, each in its turn at length: what takes less power is faster in a step that takes all of it. `ways` come with what
/// they took alone, `time(way, times)` tells what one of so many times takes.
pub(super) fn time_in_turn<W: Copy>(
    ways: &[(W, f64)],
    mut time: impl FnMut(W, usize) -> Result<f64, CudaError>,
) -> Result<Vec<f64>, CudaError> {
    let mut seconds = vec![Vec::new(); ways.len()];
    for _ in 0..ROUNDS {
        for ((way, alone), of_way) in ways.iter().zip(&mut seconds) {
            let times = ((TURN_SECONDS / alone).ceil() as usize).max(TURN_TIMES);
            of_way.push(time(*way, times)?);
        }
    }
    Ok(seconds.into_iter().map(median).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_take_turns_at_length() {
        let mut turns = Vec::new();
        let mut seconds = [9.0, 1.0, 2.0, 8.0, 3.0, 1.5].into_iter();
        let found = time_in_turn(&[('a', 1e-3), ('b', 1.0)], |way, times| {
            turns.push((way, times));
            Ok(seconds.next().unwrap_or_default())
        });
        assert_eq!(found.expect("times"), [3.0, 1.5]);
        assert_eq!(turns, [('a', 4), ('b', 4)].repeat(3));
        let mut times = 0;
        let mut count = |_, of_turn| {
            times += of_turn;
            Ok(0.0)
        };
        assert_eq!(time_in_turn(&[((), 1e-5)], &mut count).expect("times"), [0.0]);
        assert_eq!(times, 3 * 400);
        assert!(time_in_turn(&[], |(), _| Ok(0.0)).expect("none").is_empty());
    }
}
