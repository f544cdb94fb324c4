//! Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): random numbers that are
//! a function of a key and a counter, so that any worker can go on drawing where another stopped.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// Four random words.
pub(super) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let product = |i: usize, word: u32| u64::from(MULTIPLIERS[i]) * u64::from(word);
        let (a, b) = (product(0, counter[0]), product(1, counter[2]));
        let high = |x: u64| (x >> 32) as u32;
        counter = [high(b) ^ counter[1] ^ key[0], b as u32, high(a) ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Uniform in [0, 1) with 53 bits: number `output_index` of the stream that seed and choice name.
pub(super) fn uniform(seed: u64, choice: u32, output_index: u32) -> f64 {
    let [low, high, ..] = philox([output_index, 0, choice, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (-53f64).exp2()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers that the authors publish with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        let check = |counter, key, expected: [u32; 4]| assert_eq!(philox(counter, key), expected);
        check([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        check([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        check(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        );
    }

    #[test]
    fn streams_differ_and_lie_below_one() {
        let draw = |seed, choice| (0..1000).map(|i| uniform(seed, choice, i)).collect::<Vec<_>>();
        let streams = [draw(1, 0), draw(1, 1), draw(2, 0), draw(1 << 32, 0)];
        for (i, stream) in streams.iter().enumerate() {
            assert!(stream.iter().all(|x| (0.0..1.0).contains(x)));
            let mean = stream.iter().sum::<f64>() / 1000.0;
            assert!((mean - 0.5).abs() < 0.05, "mean {mean}");
            assert!(streams[..i].iter().all(|other| other != stream));
        }
    }
}
