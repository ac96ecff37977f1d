//! How many pages of which kind a space maps: `RssAnon`, `RssFile`, `RssShmem` and `VmSwap` of `status`.
//!
//! # What it guarantees
//!
//! Each CPU counts for itself, by a load and a store in a line that no other CPU writes: a fault adds 1 where it publishes an
//! entry, a call that takes many away subtracts once. A reading sums over the CPUs. So the sums are exact at rest; while
//! others count, a page that was mapped by one CPU and unmapped by another may be missing from the first and not yet
//! from the second, and a sum that would be negative reads as 0. One CPU's count may be negative.
//!
//! # Peaks
//!
//! `VmHWM` and `VmPeak` are taken where things are taken away, as on Linux: the sum *before* that is a candidate. To sum over
//! the CPUs at every call would be felt, so a CPU does it once it has taken away [`PEAK_STEP`] pages since it last did. So a peak
//! may be missed by less than `PEAK_STEP` pages for each CPU, which is what Linux's counters allow themselves, too.
//! The word with the peak is written by calls, when the peak rises, and never by a fault.
//!
//! # Who counts what
//!
//! | where | what |
//! |---|---|
//! | first touch, copy, blocks (`fault`) | `Mm::count_page`, `count_pages` |
//! | a copy in place of an object's page (`fault::handler`) | the copy, and `uncount_page` |
//! | fault-around, populate (`fault::file`) | once a batch |
//! | unmap, `DONTNEED`, `brk` (`space::sweep`), truncation and holes (`rmap::write_back`, `rmap::punch`) | a `Removed`, once a call |
//! | fork (`space::share`) | the child's pages, once a VMA |
//! | collapse | the pages that were missing |
//!
//! Protecting, writing back, dividing blocks and merging VMAs map and unmap nothing. Who moves pages within a space counts
//! nothing; who moves them to another, or to swap and back, adds what comes and removes what goes.
//!
//! # Who may break it
//!
//! Whoever maps or unmaps a page without counting; whoever counts as a CPU that another thread acts as at the same time.
//!
//! Linux counts in the same way since 6.2 (a per-CPU counter for each kind), with batches that go to a shared word.

use super::Mm;
use crate::addr::{Frame, PAGE_SHIFT};
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use crate::sync::{CpuId, Pin};

/// What kind of page an entry maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageKind {
    /// Private memory.
    Anon,
    /// A page of a file.
    File,
    /// A page of shared memory.
    Shmem,
    /// Swapped out.
    Swap,
}

const KINDS: usize = 4;

/// Pages that a CPU takes away before it looks for a peak again.
pub const PEAK_STEP: u64 = 64;

impl PageKind {
    /// The kind of `frame`, which an entry maps, or did until the caller took it; `None` for the page of zeros, and for a
    /// device's memory.
    #[inline]
    pub(crate) fn of<H: Host>(ram: &Ram<'_, H>, frame: Frame) -> Option<Self> {
        if ram.frames.contains(frame) { Self::from_flags(ram.frames.meta(frame).flags()) } else { None }
    }

    /// The kind of page that a frame with these flags holds; `None` for the page of zeros, and for what is counted nowhere.
    #[inline]
    pub(crate) fn from_flags(flags: FrameFlags) -> Option<Self> {
        if flags.contains(FrameFlags::ANON) {
            Some(PageKind::Anon)
        } else if flags.contains(FrameFlags::SHMEM) {
            Some(PageKind::Shmem)
        } else {
            flags.contains(FrameFlags::CACHE).then_some(PageKind::File)
        }
    }
}

/// What one CPU has counted.
#[derive(Default)]
pub(crate) struct Counts {
    pages: [AtomicI64; KINDS],
    /// Pages taken away since this CPU last looked for a peak, and pages of addresses.
    removed: AtomicU64,
    unmapped: AtomicU64,
}

describe!([] Counts { pages, removed, unmapped });

impl Counts {
    #[inline]
    fn add(&self, kind: PageKind, n: i64) {
        let count = &self.pages[kind as usize];
        count.store(count.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }
}

/// The highest values seen, in pages.
#[derive(Default)]
pub(crate) struct Peaks {
    resident: AtomicU64,
    mapped: AtomicU64,
}

describe!([] Peaks { resident, mapped });

/// True, and counting anew, when `step` has come together.
#[inline]
fn is_time(count: &AtomicU64, n: u64) -> bool {
    let sum = count.load(Ordering::Relaxed).saturating_add(n);
    let time = sum >= PEAK_STEP;
    count.store(if time { 0 } else { sum }, Ordering::Relaxed);
    time
}

#[inline]
fn raise(peak: &AtomicU64, now: u64) {
    // Looked at first: it rarely rises.
    if peak.load(Ordering::Relaxed) < now {
        peak.fetch_max(now, Ordering::Relaxed);
    }
}

/// Pages that a call has taken out of the page table of one space, by kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Removed([u64; KINDS]);

impl Removed {
    #[inline]
    pub(crate) fn add(&mut self, kind: Option<PageKind>, n: u64) {
        if let Some(kind) = kind {
            self.0[kind as usize] += n;
        }
    }
}

/// What a space maps, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rss {
    /// Private pages.
    pub anon: u64,
    /// Pages of files.
    pub file: u64,
    /// Pages of shared memory.
    pub shmem: u64,
    /// Pages that are swapped out.
    pub swap: u64,
}

impl Rss {
    /// Pages in memory: what `VmRSS` tells.
    pub fn resident(&self) -> u64 {
        self.anon + self.file + self.shmem
    }
}

impl<H: Host> Mm<H> {
    /// A page of this kind has been mapped, or has been swapped out. By the pinned CPU.
    #[inline]
    pub(crate) fn count_page(&self, pin: &Pin<'_>, kind: PageKind) {
        self.count_pages(pin, kind, 1);
    }

    /// `n` pages of this kind have been mapped.
    #[inline]
    pub(crate) fn count_pages(&self, pin: &Pin<'_>, kind: PageKind, n: u64) {
        self.add_to(pin.cpu(), kind, n as i64);
    }

    /// A page of this kind is not mapped any more, and another has taken its place: there is no peak to look for.
    #[inline]
    pub(crate) fn uncount_page(&self, pin: &Pin<'_>, kind: PageKind) {
        self.add_to(pin.cpu(), kind, -1);
    }

    /// Pages have been unmapped. Once a call: it may sum over the CPUs.
    pub(crate) fn uncount(&self, pin: &Pin<'_>, removed: Removed) {
        let [anon, file, shmem, _] = removed.0;
        let own = self.own(pin.cpu());
        if own.is_some_and(|own| is_time(&own.removed, anon + file + shmem)) {
            raise(&self.peaks.resident, self.rss().resident());
        }
        for (kind, n) in
            [PageKind::Anon, PageKind::File, PageKind::Shmem, PageKind::Swap].into_iter().zip(removed.0)
        {
            if n > 0 {
                self.add_to(pin.cpu(), kind, -(n as i64));
            }
        }
    }

    #[inline]
    fn add_to(&self, cpu: CpuId, kind: PageKind, n: i64) {
        if let Some(own) = self.own(cpu) {
            own.add(kind, n);
        }
    }

    #[inline]
    fn own(&self, cpu: CpuId) -> Option<&Counts> {
        let cpu = mutant!("rss_in_one_place", cpu.index(), 0);
        self.reserves.0.get(cpu).map(|own| &own.counts)
    }

    /// `pages` of addresses are not mapped any more. By a call of `cpu`.
    pub(crate) fn count_unmapped(&self, cpu: CpuId, pages: u64) {
        if self.own(cpu).is_some_and(|own| is_time(&own.unmapped, pages)) {
            raise(&self.peaks.mapped, self.mapped_pages());
        }
        self.mapped.add(cpu, -(pages as i64));
    }

    fn mapped_pages(&self) -> u64 {
        u64::try_from(self.mapped.sum()).unwrap_or(0)
    }

    /// The pages mapped at this moment; exact at rest. O(CPUs).
    pub fn rss(&self) -> Rss {
        let mut sums = [0i64; KINDS];
        for own in &self.reserves.0 {
            for (sum, count) in sums.iter_mut().zip(&own.counts.pages) {
                *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
            }
        }
        let [anon, file, shmem, swap] = sums.map(|sum| u64::try_from(sum).unwrap_or(0));
        Rss { anon, file, shmem, swap }
    }

    /// The most bytes that were resident at a time (`VmHWM`), and mapped (`VmPeak`); see the [module](self). O(CPUs).
    pub fn peaks(&self) -> (u64, u64) {
        let resident = self.peaks.resident.load(Ordering::Relaxed).max(self.rss().resident());
        let mapped = self.peaks.mapped.load(Ordering::Relaxed).max(self.mapped_pages());
        (resident << PAGE_SHIFT, mapped << PAGE_SHIFT)
    }
}
