//! Random numbers that cost about a nanosecond, for choosing addresses inside timed loops.

/// A xorshift generator with a multiplied output: good enough to defeat a branch predictor, cheap enough not to show.
#[derive(Clone)]
pub struct Random(u64);

impl Random {
    /// A generator; the same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        // Spreads small seeds over all bits; never zero, where the generator would stay.
        Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number, all 64 bits of it random.
    #[inline]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_from_its_seed_and_spreads() {
        let (mut a, mut b) = (Random::new(7), Random::new(7));
        assert!((0..100).all(|_| a.next() == b.next()));
        let mut seen = [0u32; 16];
        (0..16_000).for_each(|_| seen[(a.next() >> 60) as usize] += 1);
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }
}
