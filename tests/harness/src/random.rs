//! Random numbers that a failing test can repeat.

/// SplitMix64. Prints its seed, so that a failure tells how to see it again.
pub struct Random(u64);

impl Random {
    /// Starts from the seed in `THALWEG_TEST_SEED`, or from `default`.
    pub fn from_env(default: u64) -> Self {
        let given = std::env::var("THALWEG_TEST_SEED").ok();
        let seed = given.map_or(default, |seed| seed.parse().expect("THALWEG_TEST_SEED is a whole number"));
        eprintln!("THALWEG_TEST_SEED={seed}");
        Self(seed)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    /// Puts items in a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}
