//! Addresses, ranges and page arithmetic.
//!
//! A virtual address is a plain `u64` in bytes: it comes from a trap frame or a system call and may hold
//! anything, so every call checks it. A physical page is a [`Frame`]: a number that cannot be mixed up with
//! an address. Ranges are half open.

use core::fmt;

/// Bits of an address below the page number.
pub const PAGE_SHIFT: u32 = 12;
/// Bytes in a page and in a frame.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;
/// Entries in one page table: a table fills exactly one frame.
pub const TABLE_ENTRIES: usize = if cfg!(terrane_loom) { 4 } else { 512 };

/// Rounds `addr` down to a page boundary.
#[inline]
pub const fn page_floor(addr: u64) -> u64 {
    addr & !(PAGE_SIZE - 1)
}

/// Rounds `addr` up to a page boundary, or `None` when that leaves the 64-bit range.
#[inline]
pub const fn page_ceil(addr: u64) -> Option<u64> {
    match addr.checked_add(PAGE_SIZE - 1) {
        Some(sum) => Some(page_floor(sum)),
        None => None,
    }
}

/// True when `addr` is a multiple of the page size.
#[inline]
pub const fn is_page_aligned(addr: u64) -> bool {
    addr & (PAGE_SIZE - 1) == 0
}

/// A half-open range of virtual addresses, `start..end`, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct AddrRange {
    /// First address inside.
    pub start: u64,
    /// First address behind.
    pub end: u64,
}

impl AddrRange {
    /// The range `start..end`. `end` below `start` gives an empty range at `start`.
    #[inline]
    pub const fn new(start: u64, end: u64) -> Self {
        Self { start, end: if end < start { start } else { end } }
    }

    /// The range of `len` bytes from `start`, or `None` when it wraps.
    #[inline]
    pub const fn of_len(start: u64, len: u64) -> Option<Self> {
        match start.checked_add(len) {
            Some(end) => Some(Self { start, end }),
            None => None,
        }
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Length in whole pages.
    #[inline]
    pub const fn pages(&self) -> u64 {
        self.len() >> PAGE_SHIFT
    }

    /// True when no address is inside.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// True when `addr` is inside.
    #[inline]
    pub const fn contains(&self, addr: u64) -> bool {
        self.start <= addr && addr < self.end
    }

    /// True when all of `other` is inside.
    #[inline]
    pub const fn covers(&self, other: AddrRange) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// True when the two share an address.
    #[inline]
    pub const fn overlaps(&self, other: AddrRange) -> bool {
        self.start < other.end && other.start < self.end
    }

    /// The addresses in both, perhaps none.
    #[inline]
    pub fn intersection(&self, other: AddrRange) -> AddrRange {
        AddrRange::new(self.start.max(other.start), self.end.min(other.end))
    }
}

impl fmt::Debug for AddrRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end)
    }
}

/// A physical page: its physical address shifted right by [`PAGE_SHIFT`].
///
/// 32 bits reach 16 TiB, and keep the per-frame metadata small.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Frame(pub u32);

impl Frame {
    /// The physical address of the frame's first byte.
    #[inline]
    pub const fn address(self) -> u64 {
        (self.0 as u64) << PAGE_SHIFT
    }

    /// The frame that holds the physical address `addr`; bits beyond 16 TiB are cut off.
    #[inline]
    pub const fn containing(addr: u64) -> Self {
        Self((addr >> PAGE_SHIFT) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_round_without_wrapping() {
        assert_eq!((page_floor(0x1fff), page_ceil(0x1001), page_ceil(0)), (0x1000, Some(0x2000), Some(0)));
        assert_eq!((page_ceil(u64::MAX), page_ceil(u64::MAX - 0xfff)), (None, Some(!0xfff)));
        assert_eq!(
            (AddrRange::of_len(u64::MAX, 1), AddrRange::of_len(u64::MAX, 0).map(|r| r.is_empty())),
            (None, Some(true))
        );
    }

    #[test]
    fn ranges_are_half_open() {
        let range = AddrRange::new(0x1000, 0x3000);
        assert!(range.contains(0x1000) && !range.contains(0x3000));
        assert!(
            !range.overlaps(AddrRange::new(0x3000, 0x4000)) && range.covers(AddrRange::new(0x2000, 0x3000))
        );
        assert_eq!(range.intersection(AddrRange::new(0x2000, 0x9000)), AddrRange::new(0x2000, 0x3000));
        assert!(range.intersection(AddrRange::new(0x5000, 0x9000)).is_empty());
        assert_eq!((AddrRange::new(5, 3).len(), range.pages()), (0, 2));
    }
}
