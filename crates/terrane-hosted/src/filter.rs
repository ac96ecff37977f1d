//! Which regions a processor may hold translations of: a small set of bits that it writes and shooters read.
//!
//! The address space is cut into regions of 2 MiB, and each region has one of 1024 bits. A bit is set before the
//! first translation of its region is read from the page table, and cleared only together with the whole TLB; so
//! whoever finds a bit clear knows that the processor holds nothing of the region ([`tlb`](crate::tlb) says why
//! that is enough). Several regions share a bit: then somebody is asked in vain, and that is all.
//!
//! Only the owner writes, and only when it comes to a region that is new to it: processors that work in areas of their
//! own ask each other for nothing and write nothing in common.
//!
//! Entries that are dropped one by one, or pushed out of the TLB, leave their bits behind. So when a quarter of the bits is
//! set, the owner empties TLB and filter and begins anew: a flush for each 256 regions that it comes to, and at most
//! one question in four is in vain. A flush of the TLB alone does *not* clear the bits as a rule, though it could: a
//! processor that flushes with every call would write its filter with every call, and those who shoot down in areas of
//! their own would read it each time from its cache. One flush in 64 clears them.

use crossbeam_utils::CachePadded;
use terrane::addr::AddrRange;
use terrane::sync::atomic::{AtomicU64, Ordering, fence};

/// Address bits inside a region.
const REGION_SHIFT: u32 = 21;
const WORDS: usize = 16;
/// Bits in the filter: two cache lines' worth.
const BITS: u64 = WORDS as u64 * 64;
/// Bits that may be set before the owner begins anew.
const FULL: u32 = BITS as u32 / 4;
/// Flushes of the TLB before one also clears the filter.
const FLUSHES: u32 = 64;
/// The longest range, in regions, that is looked up region by region. Longer ones concern whoever holds anything.
const LOOK_UPS: u64 = 256;

/// The set, as everybody sees it.
#[derive(Default)]
pub(crate) struct Filter {
    words: CachePadded<[AtomicU64; WORDS]>,
}

/// The word of a region and its bit. Regions within 2 GiB (aligned) have different bits; above that a hash, so that areas
/// far apart that are laid out alike do not fall on the same bits.
#[inline]
fn place(region: u64) -> (usize, u64) {
    let far = (region / BITS).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
    let bit = (region ^ far) % BITS;
    ((bit / 64) as usize, 1 << (bit % 64))
}

impl Filter {
    /// True when the processor may hold a translation of the range. For a caller that has changed the page table and
    /// made a full fence since. Acquire: when the answer is no, the accesses of the processor to the range have ended and
    /// happen before.
    pub fn may_hold(&self, range: AddrRange) -> bool {
        if range.is_empty() {
            return false;
        }
        let (first, last) = (range.start >> REGION_SHIFT, (range.end - 1) >> REGION_SHIFT);
        if last - first >= LOOK_UPS {
            return self.words.iter().any(|word| word.load(Ordering::Acquire) != 0);
        }
        (first..=last).any(|region| {
            let (word, bit) = place(region);
            self.words[word].load(Ordering::Acquire) & bit != 0
        })
    }
}

/// The owner's side of a filter.
#[derive(Default)]
pub(crate) struct Held {
    /// Bits that are set.
    bits: u32,
    /// Flushes of the TLB since the filter was cleared.
    flushes: u32,
}

impl Held {
    /// True when [`add`](Self::add) needs an empty filter first: the caller flushes its TLB and calls
    /// [`clear`](Self::clear).
    #[inline]
    pub fn is_full(&self) -> bool {
        self.bits >= FULL
    }

    /// Enters the region of `addr`; before the page table is read.
    #[inline]
    pub fn add(&mut self, filter: &Filter, addr: u64) {
        let (word, bit) = place(addr >> REGION_SHIFT);
        let word = &filter.words[word];
        let before = word.load(Ordering::Relaxed);
        if before & bit == 0 {
            // Release, as every store to the filter: whoever reads it sees what came before the last clearing.
            word.store(before | bit, Ordering::Release);
            self.bits += 1;
            // Between the bit and the look at the page table; a shooter makes one between its change and its look at the
            // bit. While the bit stays set, later fills need none.
            fence(Ordering::SeqCst);
        }
    }

    /// The TLB was flushed for another reason than that the filter is full: empties the filter now and then. As
    /// [`clear`](Self::clear).
    pub fn flushed(&mut self, filter: &Filter) {
        self.flushes += 1;
        if self.flushes >= FLUSHES || self.bits >= FULL / 2 {
            self.clear(filter);
        }
    }

    /// Empties the filter. The caller's TLB is empty, and it is not in the middle of an access.
    pub fn clear(&mut self, filter: &Filter) {
        self.flushes = 0;
        if self.bits == 0 {
            return;
        }
        self.bits = 0;
        for word in filter.words.iter().filter(|word| word.load(Ordering::Relaxed) != 0) {
            // Release: accesses through what was in the TLB are over.
            word.store(0, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use std::{hint, thread};
    use terrane::sync::atomic::AtomicUsize;

    const REGION: u64 = 1 << REGION_SHIFT;

    #[test]
    fn what_was_added_is_held_until_the_filter_is_cleared() {
        let (filter, mut held) = (Filter::default(), Held::default());
        let all = AddrRange::new(0, 1 << 47);
        assert!(!filter.may_hold(all));
        held.add(&filter, 5 * REGION + 77);
        for (start, end, holds) in [
            (5 * REGION, 5 * REGION + 1, true),
            (6 * REGION - 1, 6 * REGION, true),
            (4 * REGION, 5 * REGION, false),
            (6 * REGION, 200 * REGION - 1, false),
            (4 * REGION, 5 * REGION + 1, true),
            (0, 1 << 47, true),
            (5 * REGION, 5 * REGION, false),
        ] {
            assert_eq!(filter.may_hold(AddrRange::new(start, end)), holds, "{start:#x} to {end:#x}");
        }
        // A flush now and then clears it.
        for _ in 1..FLUSHES {
            held.flushed(&filter);
            assert!(filter.may_hold(all));
        }
        held.flushed(&filter);
        assert!(!filter.may_hold(all));
        held.add(&filter, 5 * REGION);
        held.clear(&filter);
        assert!(!filter.may_hold(all));
        held.add(&filter, u64::MAX);
        assert!(filter.may_hold(AddrRange::new(u64::MAX - 1, u64::MAX)));
    }

    #[test]
    fn neighbours_have_different_bits_and_it_gets_full() {
        let (filter, mut held) = (Filter::default(), Held::default());
        let base = 0x7f00_0000_0000 & !(BITS * REGION - 1);
        for region in 0..BITS / 4 {
            assert!(!held.is_full());
            let at = base + region * REGION;
            assert!(!filter.may_hold(AddrRange::new(at, at + REGION)));
            held.add(&filter, at);
            held.add(&filter, at + 1);
        }
        assert!(held.is_full());
        held.clear(&filter);
        assert!(!held.is_full());
    }

    /// The two halves of the pattern by themselves, in step, as often as possible. Without the fence in [`Held::add`] an
    /// optimised build fails at once; other builds take too long between the two to see much.
    #[test]
    fn a_walk_or_a_shooter_sees_the_other() {
        const TRIES: usize = 1000;
        let (filter, entry) = (Filter::default(), CachePadded::new(AtomicUsize::new(0)));
        let at = [const { CachePadded::new(AtomicUsize::new(0)) }; 2];
        // More than the caches hold: stores here keep the store buffer from draining.
        let far: Vec<AtomicU64> = (0..1 << 21).map(AtomicU64::new).collect();
        // Both begin each try together, and neither begins the next before the other has ended this one.
        let meet = |me: usize, place: usize| {
            at[me].store(place, Ordering::Release);
            let mut rounds = 0;
            while at[1 - me].load(Ordering::Acquire) < place {
                rounds += 1;
                if rounds % 1000 == 0 {
                    thread::yield_now();
                }
            }
        };
        // One of them a little later than the other, by all sorts of times: the window is some ten nanoseconds wide.
        let delay = |me: usize, n: usize| {
            for round in 0..if n / 32 % 2 == me { n % 32 } else { 0 } {
                hint::black_box(round);
            }
        };
        let (mut tries, end) = (0, Instant::now() + Duration::from_millis(400));
        while tries < 300 && Instant::now() < end {
            tries += 1;
            let mut seen = [[false; TRIES]; 2];
            let [stale, asked] = &mut seen;
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut held = Held::default();
                    for (n, stale) in stale.iter_mut().enumerate() {
                        meet(0, 2 * n + 1);
                        delay(0, n);
                        for m in 0..4 {
                            let place = (n * tries).wrapping_mul(0x9e37_79b9).wrapping_add(m * 99_991);
                            far[place % far.len()].store(0, Ordering::Relaxed);
                        }
                        held.add(&filter, 0);
                        *stale = entry.load(Ordering::Acquire) == n;
                        meet(0, 2 * n + 2);
                        held.clear(&filter);
                    }
                });
                for (n, asked) in asked.iter_mut().enumerate() {
                    meet(1, 2 * n + 1);
                    delay(1, n);
                    entry.store(n + 1, Ordering::Release);
                    fence(Ordering::SeqCst);
                    *asked = filter.may_hold(AddrRange::new(0, 1));
                    meet(1, 2 * n + 2);
                }
            });
            for (stale, asked) in stale.iter().zip(asked) {
                assert!(!*stale || *asked, "an entry was read before its change, and nobody is asked");
            }
            entry.store(0, Ordering::Relaxed);
            at.iter().for_each(|at| at.store(0, Ordering::Relaxed));
        }
    }
}
