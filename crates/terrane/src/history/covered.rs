//! Ranges of which the log has an image or a note already.

use crate::addr::AddrRange;
use core::cell::Cell;

/// Ranges kept: as many places as a CPU changes in turn, say.
const PLACES: usize = 4;

/// What one CPU has written to the log of a listing, as far as it remembers. It may forget: then it writes once more.
pub struct Covered {
    number: Cell<u64>,
    next: Cell<usize>,
    ranges: [Cell<AddrRange>; PLACES],
}

impl Covered {
    /// Nothing.
    pub const fn new() -> Self {
        const NOTHING: AddrRange = AddrRange { start: 0, end: 0 };
        Self { number: Cell::new(0), next: Cell::new(0), ranges: [const { Cell::new(NOTHING) }; PLACES] }
    }

    /// True when all of `range` is known to be in the log of listing `number`.
    #[inline]
    pub fn contains(&self, number: u64, range: AddrRange) -> bool {
        self.number.get() == number && self.ranges.iter().any(|known| known.get().covers(range))
    }

    /// Remembers `range` as being in the log of listing `number`.
    pub fn add(&self, number: u64, range: AddrRange) {
        if self.number.replace(number) != number {
            self.ranges.iter().for_each(|known| known.set(AddrRange::new(0, 0)));
        }
        // What touches a known range makes it longer.
        let touching = |known: &&Cell<AddrRange>| {
            let known = known.get();
            !known.is_empty() && known.start <= range.end && range.start <= known.end
        };
        if let Some(place) = self.ranges.iter().find(touching) {
            let known = place.get();
            place.set(AddrRange::new(known.start.min(range.start), known.end.max(range.end)));
            return;
        }
        self.ranges[self.next.get()].set(range);
        self.next.set((self.next.get() + 1) % PLACES);
    }
}

impl Default for Covered {
    fn default() -> Self {
        Self::new()
    }
}
