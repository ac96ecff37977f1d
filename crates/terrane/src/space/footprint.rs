//! How much memory a mapping holds, and with whom it shares it: what `smaps` prints.
//!
//! # What it guarantees
//!
//! A walk of the page table, some tables under each pin; it holds nothing that a fault waits for, and writes nothing that a
//! fault reads. Each entry is looked at once, at its own moment: at rest the sums are exact, beside faults and calls they
//! are of no single one. A page that moves while it is looked for may be missed.
//!
//! # Who shares a page
//!
//! The references of a private page are the entries that map it, so they are the number that Linux calls mapcount. Pages of
//! objects have no references (see [`object`](crate::object)): they are counted by reverse mapping, a table's span of the
//! mapping at a time, by going over the entries of all mappings of the object; where the mapping is the only one,
//! that is left out. The object's mapping lock is held for each span: calls that map or unmap the object wait, some
//! 5 us for each other mapping of the span, faults do not.
//!
//! # Differences from Linux
//!
//! Pages that a fault maps around the one asked for count as referenced there, on x86-64; here they do once they are used.

use super::{AddressSpace, Mapping};
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::mm::{Mm, block_around};
use crate::object::Object;
use crate::page_table::{EMPTY, Level, Pte, PteFlags, Slot, swap_slot};
use crate::rmap::walk::{for_each_entry, for_each_range_of_object};
use crate::sync::Shared;
use crate::vma::VmFlags;
use core::ops::{AddAssign, ControlFlow};

/// Fractions of a byte in a proportional share: 12 bits, as in Linux, so that sums over spaces add up.
const SHARE_SHIFT: u32 = 12;

/// A sum of proportional shares: each page's bytes divided by the number of entries that map it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Share(u64);

impl Share {
    /// The share in a page that `sharers` entries map.
    fn of_page(sharers: u64) -> Self {
        Self((PAGE_SIZE << SHARE_SHIFT) / sharers.max(1))
    }

    /// In bytes, rounded down.
    pub fn bytes(self) -> u64 {
        self.0 >> SHARE_SHIFT
    }
}

impl AddAssign for Share {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

/// What a mapping, or a space, holds in memory. In bytes. Pages of zeros that were only read are not counted, as in Linux.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Footprint {
    /// Mapped pages.
    pub resident: u64,
    /// The share in them.
    pub share: Share,
    /// The share in those that were stored to and are not in a file yet.
    pub share_dirty: Share,
    /// The share in private pages.
    pub share_anon: Share,
    /// The share in pages of files.
    pub share_file: Share,
    /// The share in pages of shared memory.
    pub share_shmem: Share,
    /// The share in pages of mappings that are locked in memory.
    pub share_locked: Share,
    /// Mapped elsewhere too, and as they are in the file.
    pub shared_clean: u64,
    /// Mapped elsewhere too, and stored to.
    pub shared_dirty: u64,
    /// Mapped here only, and as they are in the file.
    pub private_clean: u64,
    /// Mapped here only, and stored to.
    pub private_dirty: u64,
    /// Accessed since somebody last looked.
    pub referenced: u64,
    /// Private pages.
    pub anonymous: u64,
    /// Private pages whose content may be dropped instead of swapped out (`MADV_FREE`).
    pub lazy_free: u64,
    /// Private pages in huge pages.
    pub huge: u64,
    /// Swapped out.
    pub swap: u64,
    /// The share in what is swapped out.
    pub share_swap: Share,
}

impl AddAssign for Footprint {
    fn add_assign(&mut self, other: Self) {
        self.resident += other.resident;
        self.share += other.share;
        self.share_dirty += other.share_dirty;
        self.share_anon += other.share_anon;
        self.share_file += other.share_file;
        self.share_shmem += other.share_shmem;
        self.share_locked += other.share_locked;
        self.shared_clean += other.shared_clean;
        self.shared_dirty += other.shared_dirty;
        self.private_clean += other.private_clean;
        self.private_dirty += other.private_dirty;
        self.referenced += other.referenced;
        self.anonymous += other.anonymous;
        self.lazy_free += other.lazy_free;
        self.huge += other.huge;
        self.swap += other.swap;
        self.share_swap += other.share_swap;
    }
}

/// How many entries map each page of a stretch of an object, of as many pages as a table has entries: counted once for all mappings that show
/// it, of which there may be as many as pages.
#[derive(Debug)]
pub(crate) struct Sharers {
    /// The object's number, and the stretch's first page.
    of: Option<(u64, u64)>,
    counts: [u32; TABLE_ENTRIES],
}

impl Sharers {
    /// Nothing is counted.
    pub(crate) const NONE: Self = Self { of: None, counts: [1; TABLE_ENTRIES] };

    /// The counts of `count` pages of `object` from page `first` on: those of before, or counted now.
    fn of<H: Host>(&mut self, cpu: &Cpu<H>, object: &Object<H>, first: u64, count: u64) -> &[u32] {
        let size = TABLE_ENTRIES as u64;
        let from = match self.of {
            Some((number, from))
                if number == object.number() && from <= first && first + count <= from + size =>
            {
                from
            }
            _ => {
                self.count(cpu, object, first);
                first
            }
        };
        self.counts.get((first - from) as usize..).unwrap_or_default()
    }

    /// Counts the entries that map pages of `object`, from page `first` on.
    fn count<H: Host>(&mut self, cpu: &Cpu<H>, object: &Object<H>, first: u64) {
        self.of = Some((object.number(), first));
        self.counts.fill(0);
        let pages = first..first + TABLE_ENTRIES as u64;
        for_each_range_of_object(cpu, object, pages, |mm, _, range, page| {
            for_each_entry(mm, cpu, range, |ram, addr, slot| {
                let index = page + ((addr - range.start) >> PAGE_SHIFT) - first;
                if let Some(frame) = Pte::decode::<H::Format>(slot.load()).frame()
                    && is_of_object(ram, frame)
                    && let Some(sharers) = self.counts.get_mut(index as usize)
                {
                    *sharers += 1;
                }
            });
        });
    }
}

fn is_of_object<H: Host>(ram: &Ram<'_, H>, frame: Frame) -> bool {
    ram.frames.contains(frame) && ram.frames.meta(frame).flags().contains(FrameFlags::CACHE)
}

/// One page that is mapped.
struct Found {
    frame: Frame,
    flags: PteFlags,
    /// In a huge page.
    huge: bool,
}

/// What a walk adds to.
struct Census<'a, H: Host> {
    mm: &'a Mm<H>,
    locked: bool,
    sum: Footprint,
}

impl<H: Host> Census<'_, H> {
    fn add(&mut self, ram: &Ram<'_, H>, page: Found, sharers_of_object: u32) {
        // Not counted: the page of zeros, and a device's memory.
        let Some(kind) = PageKind::of(ram, page.frame) else { return };
        let meta = ram.frames.meta(page.frame);
        let (state, anon) = (meta.flags(), kind == PageKind::Anon);
        let sharers = u64::from(if anon { meta.references() } else { sharers_of_object });
        let share = Share::of_page(sharers);
        let sum = &mut self.sum;
        sum.resident += PAGE_SIZE;
        sum.share += share;
        match kind {
            PageKind::File => sum.share_file += share,
            PageKind::Shmem => sum.share_shmem += share,
            PageKind::Anon | PageKind::Swap => sum.share_anon += share,
        }
        if self.locked {
            sum.share_locked += share;
        }
        if page.flags.contains(PteFlags::ACCESSED) || state.contains(FrameFlags::REFERENCED) {
            sum.referenced += PAGE_SIZE;
        }
        let dirty = page.flags.contains(PteFlags::DIRTY) || state.contains(FrameFlags::DIRTY);
        if anon {
            sum.anonymous += PAGE_SIZE;
            sum.huge += if page.huge { PAGE_SIZE } else { 0 };
            sum.lazy_free += if state.contains(FrameFlags::LAZYFREE) && !dirty { PAGE_SIZE } else { 0 };
        }
        if dirty {
            sum.share_dirty += share;
        }
        *match (sharers > 1, dirty) {
            (true, true) => &mut sum.shared_dirty,
            (true, false) => &mut sum.shared_clean,
            (false, true) => &mut sum.private_dirty,
            (false, false) => &mut sum.private_clean,
        } += PAGE_SIZE;
    }

    /// Adds what `range`, of one table's span at most, maps; `sharers` of its pages if they are an object's.
    fn add_span(&mut self, ram: &Ram<'_, H>, range: AddrRange, sharers: &[u32]) {
        let _ = self.mm.page_table.for_each_run(ram, range, |run| {
            Slot::for_each_used(run.slots, |index, slot| {
                let raw = slot.load();
                if run.level == Level::PAGE {
                    let place = (run.address_of(index) - range.start) >> PAGE_SHIFT;
                    match Pte::decode::<H::Format>(raw) {
                        Pte::Page { frame, flags } | Pte::NoAccess { frame, flags } => {
                            let sharers = sharers.get(place as usize).map_or(1, |&sharers| sharers);
                            self.add(ram, Found { frame, flags, huge: false }, sharers);
                        }
                        Pte::Swap(payload) => {
                            let sharers = self.mm.machine.swap().sharers(ram, swap_slot(payload));
                            self.sum.swap += PAGE_SIZE;
                            self.sum.share_swap += Share::of_page(sharers.into());
                        }
                        _ => {}
                    }
                } else if let Some((first, flags)) = Pte::block::<H::Format>(raw) {
                    let part = range.intersection(block_around(run.addr));
                    let below = (part.start - run.addr) >> PAGE_SHIFT;
                    for n in below..below + part.pages() {
                        let frame = Frame(first.0 + n as u32);
                        self.add(ram, Found { frame, flags, huge: true }, 1);
                    }
                }
                ControlFlow::Continue(())
            })
        });
    }
}

impl<H: Host> AddressSpace<H> {
    /// What `mapping`, as a listing has shown it, holds at this moment; see the head of the module for how exact that is.
    /// O(pages), and O(pages) for each other mapping of the same object. Blocks on the object's mapping lock; not while
    /// pinned.
    pub fn footprint(&self, cpu: &Cpu<H>, mapping: &Mapping) -> Footprint {
        let mut sharers = Sharers::NONE;
        self.footprint_with(cpu, mapping, &mut sharers)
    }

    /// The same, for one of many mappings: with what was counted for those before.
    pub(crate) fn footprint_with(&self, cpu: &Cpu<H>, mapping: &Mapping, sharers: &mut Sharers) -> Footprint {
        let mm = self.mm();
        let object = self.object_at(cpu, mapping);
        let swapped = object.as_ref().map_or(0, |object| self.swapped_of(cpu, mapping, object));
        // A second look at who maps it is not worth a lock: the sums are of no single moment.
        let shared = object.filter(|object| object.lock_mappings().len() > 1);
        let mut census =
            Census { mm, locked: mapping.flags.contains(VmFlags::LOCKED), sum: Footprint::default() };
        let mut at = mapping.range.start;
        while let Some(span) = self.next_span(cpu, AddrRange::new(at, mapping.range.end)) {
            let first = (mapping.offset >> PAGE_SHIFT) + ((span.start - mapping.range.start) >> PAGE_SHIFT);
            let counts = match &shared {
                Some(object) => sharers.of(cpu, object, first, span.pages()),
                None => &[],
            };
            let pin = cpu.pin();
            census.add_span(&mm.ram(&pin), span, counts);
            at = span.end;
        }
        // As in Linux: without a share.
        census.sum.swap += swapped << PAGE_SHIFT;
        census.sum
    }

    /// Pages of shared memory in swap that `mapping` shows. Of a private mapping that may be stored to, those where it has no page of
    /// its own.
    fn swapped_of(&self, cpu: &Cpu<H>, mapping: &Mapping, object: &Object<H>) -> u64 {
        let first = mapping.offset >> PAGE_SHIFT;
        let all = !mapping.flags.is_private() || !mapping.flags.contains(VmFlags::WRITE);
        let mut count = 0;
        object.for_each_swapped(cpu, first..first + mapping.range.pages(), |ram, index| {
            let addr = mapping.range.start + ((index - first) << PAGE_SHIFT);
            let walk = || self.mm().page_table.walk(ram, addr);
            count += u64::from(all || walk().is_none_or(|walk| walk.raw == EMPTY));
        });
        count
    }

    /// The first part of `range` in which there is a table or a block: as much as one maps.
    fn next_span(&self, cpu: &Cpu<H>, range: AddrRange) -> Option<AddrRange> {
        if range.is_empty() {
            return None;
        }
        let pin = cpu.pin();
        let mut found = None;
        let _ = self.mm().page_table.for_each_run(&self.mm().ram(&pin), range, |run| {
            found = Some(block_around(run.addr).intersection(range));
            ControlFlow::Break(())
        });
        found
    }

    /// The object that `mapping` shows, if it is still there.
    fn object_at(&self, cpu: &Cpu<H>, mapping: &Mapping) -> Option<Shared<Object<H>>> {
        if mapping.object == 0 {
            return None;
        }
        let pin = cpu.pin();
        let vma = self.mm().index.find(&pin, mapping.range.start)?;
        vma.object().filter(|object| object.number() == mapping.object).cloned()
    }
}
