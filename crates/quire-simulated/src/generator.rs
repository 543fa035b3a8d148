//! Pseudo-random numbers.

/// A small generator: the same numbers from the same seed, on every machine.
#[derive(Clone, Debug)]
pub struct Generator(u64);

impl Generator {
    /// Starts from `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Generator {
        Generator(seed)
    }

    /// The next number (splitmix64).
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `limit` (0 for a limit of 0).
    pub fn below(&mut self, limit: usize) -> usize {
        (self.next_u64() % limit.max(1) as u64) as usize
    }

    /// True once in so many times; never for 0.
    pub fn one_in(&mut self, many: u32) -> bool {
        many != 0 && self.next_u64().is_multiple_of(u64::from(many))
    }
}
