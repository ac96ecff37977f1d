//! The software TLB: a direct-mapped cache of translations, private to one processor.
//!
//! An entry is two words. The tag holds the page's address and, in the twelve bits below it, the generation of the
//! cache: flushing everything is a step of the generation, and only when those bits have run through are the
//! entries really cleared. The other word is where the page is, with what it may be used for in the bits below.
//!
//! What an entry says is true only inside an access, after the check of the request word; see
//! [`tlb`](crate::tlb).

use crate::error::HostedError;
use crate::tlb::Forget;
use core::ptr;
use terrane::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE};

/// Entries: 2 MiB of translations in 8 KiB, a quarter of a first-level cache.
const ENTRIES: usize = 512;
/// The bits of an address inside its page.
const OFFSET: u64 = PAGE_SIZE - 1;

/// What an access needs of an entry, as bits beside the page's location.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Needs(usize);

impl Needs {
    /// A load: every entry allows it.
    pub const LOAD: Needs = Needs(0);
    /// A store: the page is writable, and its page-table entry is marked dirty.
    pub const STORE: Needs = Needs(1);
    /// An instruction fetch.
    pub const FETCH: Needs = Needs(2);

    /// Both.
    pub const fn and(self, other: Needs) -> Needs {
        Needs(self.0 | other.0)
    }
}

#[derive(Clone, Copy)]
struct Entry {
    /// Page address and generation.
    tag: u64,
    /// Host address of the page, and the needs it meets.
    page: *mut u8,
}

/// Generation 0 is never current, so this matches nothing.
const EMPTY: Entry = Entry { tag: 0, page: ptr::null_mut() };

/// The cache.
pub(crate) struct Translations {
    entries: Box<[Entry; ENTRIES]>,
    /// 1 ..= `OFFSET`.
    generation: u64,
    /// Full flushes so far.
    pub flushes: u64,
}

// SAFETY: the pointers are only numbers to this module; whoever uses them answers for it.
unsafe impl Send for Translations {}

impl Translations {
    pub fn new() -> Result<Self, HostedError> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(ENTRIES).map_err(|_| HostedError::OutOfMemory)?;
        entries.resize(ENTRIES, EMPTY);
        let entries = entries.into_boxed_slice().try_into().map_err(|_| HostedError::OutOfMemory)?;
        Ok(Self { entries, generation: 1, flushes: 0 })
    }

    #[inline(always)]
    fn index(addr: u64) -> usize {
        (addr >> PAGE_SHIFT) as usize % ENTRIES
    }

    #[inline(always)]
    fn tag(&self, addr: u64) -> u64 {
        addr & !OFFSET | self.generation
    }

    /// Where the byte at `addr` is, if a translation that meets `needs` is cached.
    #[inline(always)]
    pub fn lookup(&self, addr: u64, needs: Needs) -> Option<*mut u8> {
        let entry = &self.entries[Self::index(addr)];
        if entry.tag != self.tag(addr) || entry.page.addr() & needs.0 != needs.0 {
            return None;
        }
        Some(entry.page.map_addr(|page| page & !(OFFSET as usize) | (addr & OFFSET) as usize))
    }

    /// Caches that the page of `addr` is at `page`, which is aligned to pages, for the uses in `meets`.
    pub fn insert(&mut self, addr: u64, page: *mut u8, meets: Needs) {
        let tag = self.tag(addr);
        self.entries[Self::index(addr)] = Entry { tag, page: page.map_addr(|page| page | meets.0) };
    }

    /// Drops what a shoot-down asks for.
    pub fn forget(&mut self, what: Forget) {
        match what {
            Forget::All => self.forget_all(),
            Forget::Range(range) => self.forget_range(range),
        }
    }

    /// Drops everything. O(1) but for one time in 4095.
    pub fn forget_all(&mut self) {
        self.flushes += 1;
        self.generation += 1;
        if self.generation > OFFSET {
            self.entries.fill(EMPTY);
            self.generation = 1;
        }
    }

    /// Drops the pages of `range`. O(pages).
    fn forget_range(&mut self, range: AddrRange) {
        let mut page = range.start & !OFFSET;
        while page < range.end {
            let tag = self.tag(page);
            let entry = &mut self.entries[Self::index(page)];
            if entry.tag == tag {
                *entry = EMPTY;
            }
            match page.checked_add(PAGE_SIZE) {
                Some(next) => page = next,
                None => break,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = PAGE_SIZE as usize;

    fn page(n: usize) -> *mut u8 {
        ptr::without_provenance_mut(n * PAGE)
    }

    #[test]
    fn an_entry_serves_its_page_and_its_uses() {
        let mut tlb = Translations::new().unwrap();
        assert!(tlb.lookup(0, Needs::LOAD).is_none());
        tlb.insert(0x5123, page(7), Needs::FETCH);
        assert_eq!(tlb.lookup(0x5fff, Needs::LOAD), Some(page(7).wrapping_add(0xfff)));
        assert_eq!(tlb.lookup(0x5000, Needs::FETCH), Some(page(7)));
        assert!(tlb.lookup(0x5000, Needs::STORE).is_none());
        assert!(tlb.lookup(0x5000 + (ENTRIES * PAGE) as u64, Needs::LOAD).is_none());
        tlb.insert(0x5000, page(8), Needs::STORE.and(Needs::FETCH));
        assert_eq!(tlb.lookup(0x5008, Needs::STORE), Some(page(8).wrapping_add(8)));
        // The highest page there is.
        tlb.insert(u64::MAX, page(9), Needs::LOAD);
        assert_eq!(tlb.lookup(!OFFSET, Needs::LOAD), Some(page(9)));
        tlb.forget(Forget::Range(AddrRange::new(u64::MAX - 1, u64::MAX)));
        assert!(tlb.lookup(!OFFSET, Needs::LOAD).is_none());
    }

    #[test]
    fn a_range_is_dropped_and_nothing_else() {
        let mut tlb = Translations::new().unwrap();
        for n in 0..8 {
            tlb.insert(n * PAGE_SIZE, page(n as usize + 1), Needs::LOAD);
        }
        tlb.forget(Forget::Range(AddrRange::new(2 * PAGE_SIZE, 5 * PAGE_SIZE)));
        for n in 0..8 {
            assert_eq!(tlb.lookup(n * PAGE_SIZE, Needs::LOAD).is_some(), !(2..5).contains(&n), "page {n}");
        }
        // The page that shares an entry with a dropped one stays.
        let far = 6 * PAGE_SIZE + (ENTRIES * PAGE) as u64;
        tlb.insert(far, page(1), Needs::LOAD);
        tlb.forget(Forget::Range(AddrRange::new(6 * PAGE_SIZE, 7 * PAGE_SIZE)));
        assert!(tlb.lookup(far, Needs::LOAD).is_some());
    }

    #[test]
    fn old_generations_never_come_back() {
        let mut tlb = Translations::new().unwrap();
        tlb.insert(0x9000, page(3), Needs::STORE);
        for _ in 0..3 * PAGE {
            tlb.forget_all();
            assert!(tlb.lookup(0x9000, Needs::LOAD).is_none());
        }
    }
}
