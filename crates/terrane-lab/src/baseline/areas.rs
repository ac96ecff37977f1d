//! The layout on which index structures are compared: many areas with gaps between them.

use crate::measure::random::Random;

/// Areas of 20 KiB at every 32 KiB. The gaps of three pages are too small for the search for four pages, so that
/// only the tail is free for it.
#[derive(Clone, Copy)]
pub struct Areas {
    /// How many; a power of two where random ones are asked for.
    pub count: u64,
}

/// The first area's address.
const BASE: u64 = 1 << 32;
/// From the start of one area to the start of the next.
const STRIDE: u64 = 32 << 10;
/// The length of an area.
pub const LENGTH: u64 = 20 << 10;

impl Areas {
    /// Where all areas, and room behind them, lie.
    pub fn limits(self) -> std::ops::Range<u64> {
        BASE..BASE + (self.count + 16) * STRIDE
    }

    /// The start of area `index`; from `count` on that is free space.
    #[inline]
    pub fn start(self, index: u64) -> u64 {
        BASE + index * STRIDE
    }

    /// The area whose stretch `address`, which is not below the first, is in.
    #[inline]
    pub fn index(self, address: u64) -> u64 {
        (address - BASE) / STRIDE
    }

    /// The ranges of all areas, ascending.
    pub fn iter(self) -> impl Iterator<Item = (u64, u64)> {
        (0..self.count).map(move |index| (self.start(index), self.start(index) + LENGTH))
    }

    /// A random address inside a random area.
    #[inline]
    pub fn hit(self, random: &mut Random) -> u64 {
        let bits = random.next();
        // The offset stays below 16 KiB, a power of two, so that no division disturbs the loop.
        self.start((bits >> 40) & (self.count - 1)) + (bits & 0x3fff)
    }

    /// The start of a random area.
    #[inline]
    pub fn any(self, random: &mut Random) -> u64 {
        self.start((random.next() >> 40) & (self.count - 1))
    }

    /// How many there are, in words: `64`, `1 K`, `64 K`.
    pub fn words(self) -> String {
        if self.count >= 1 << 20 {
            format!("{} M", self.count >> 20)
        } else if self.count >= 1024 {
            format!("{} K", self.count >> 10)
        } else {
            self.count.to_string()
        }
    }
}

/// The sizes that are compared.
pub const SIZES: [Areas; 3] = [Areas { count: 64 }, Areas { count: 1 << 10 }, Areas { count: 64 << 10 }];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_hit_and_reach_every_area() {
        let mut random = Random::new(1);
        for areas in SIZES {
            let mut seen = std::collections::HashSet::new();
            for _ in 0..areas.count.min(1024) * 20 {
                let address = areas.hit(&mut random);
                let start = BASE + (address - BASE) / STRIDE * STRIDE;
                assert!(address < start + LENGTH && areas.limits().contains(&address));
                assert_eq!(areas.start(areas.index(address)), start);
                seen.insert(start);
            }
            assert!(areas.count > 1024 || seen.len() as u64 == areas.count);
        }
        assert_eq!(SIZES.map(Areas::words), ["64", "1 K", "64 K"]);
    }
}
