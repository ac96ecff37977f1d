//! Finding every page-table entry that maps a page.
//!
//! A walk holds the lock of the anon_vma tree or of the object's mappings, so no space in it can go away, and looks
//! into page tables under a pin. It sees every mapping that exists throughout the walk: entries are set only
//! where the VMA allows, and a VMA of an object joins the list of mappings before it can be faulted on and leaves it after
//! it has been swept. `visit` works on the entry by its protocol, against faults that run at the same time.

use crate::addr::{AddrRange, Frame, PAGE_SHIFT, TABLE_ENTRIES};
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::object::{MappingLink, Object};

use crate::page_table::{BUSY, Level, Pte, Slot, Walk, swap_slot};
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::vma::{VmFlags, Vma};
use core::mem::offset_of;
use core::ops::{ControlFlow, Range};

/// Calls `visit` for each entry that maps `frame`, a private page, with its space, the address of the page and the entry: of
/// the page, or of a block that it is part of (to change that for one page, divide it first), or one that says `Swap` and leads
/// to the page because it is in memory. Blocks on the reverse-mapping lock;
/// not while pinned. O(spaces or mappings that may share the page).
///
/// Returns false when the page had no owner (any more), and so could not be looked for.
pub fn for_each_mapping<H: Host>(
    cpu: &Cpu<H>,
    frame: Frame,
    mut visit: impl FnMut(&Mm<H>, &Ram<'_, H>, u64, &Walk<'_>),
) -> bool {
    loop {
        if let Some(found) = try_each_mapping(cpu, frame, &mut visit) {
            return found;
        }
    }
}

/// One attempt; `None` when the page was given another place (`UFFDIO_MOVE`) before its tree was locked.
fn try_each_mapping<H: Host>(
    cpu: &Cpu<H>,
    frame: Frame,
    visit: &mut impl FnMut(&Mm<H>, &Ram<'_, H>, u64, &Walk<'_>),
) -> Option<bool> {
    let machine = cpu.machine();
    let (anon, owner) = {
        let pin = cpu.pin();
        let meta = machine.frames().meta(frame);
        // The owner is read before and after: in between the frame was in use as a private page, and then so is the
        // owner. A frame that is free keeps other things there.
        let owner = meta.owner();
        let mapped = meta.flags().contains(FrameFlags::ANON) && meta.references() > 0;
        if meta.owner() != owner {
            // Moved, or freed: the next look tells.
            return None;
        }
        if !mapped || owner.is_null() {
            return Some(false);
        }
        // SAFETY: a private page that is mapped names an anon_vma in its tree, whose memory outlasts the pin.
        let anon = unsafe { &*owner.cast::<AnonVma<H>>().cast_const() };
        if !anon.visit() {
            return if meta.owner() == owner { Some(false) } else { None };
        }
        machine.stats().count(&pin, Counter::RmapLock);
        (core::ptr::from_ref(anon), owner)
    };
    // SAFETY: visited: it stays until `leave`.
    let anon = unsafe { &*anon };
    let _early = mutant!("rmap_number_before_lock", 0, machine.frames().meta(frame).index());
    let steady = {
        let tree = anon.lock_tree();
        // Only now: a move may have changed it until here.
        let meta = machine.frames().meta(frame);
        let index = mutant!("rmap_number_before_lock", meta.index(), _early);
        let steady = mutant!("rmap_owner_before_lock", meta.owner() == owner, true);
        linger!("rmap_owner_before_lock");
        if steady {
            tree.for_each_space(|space| {
                // SAFETY: the space of a node in a locked tree is alive, and its cookie is the address of its `Mm`.
                let mm = unsafe { &*space.cast::<Mm<H>>() };
                visit_entry(mm, cpu, index << PAGE_SHIFT, frame, visit);
                mm.relocations.for_each_place(index, |addr| visit_entry(mm, cpu, addr, frame, visit));
            });
        }
        steady
    };
    // SAFETY: ends the visit above.
    unsafe { anon.leave(&cpu.participant()) };
    steady.then_some(true)
}

/// Calls `visit` for each entry that shows a page of `object` in `pages`. Blocks on the object's mapping lock; not
/// while pinned.
pub fn for_each_mapping_of_object<H: Host>(
    cpu: &Cpu<H>,
    object: &Object<H>,
    pages: Range<u64>,
    mut visit: impl FnMut(&Mm<H>, &Vma<H>, &Ram<'_, H>, u64, &Slot),
) {
    for_each_range_of_object(cpu, object, pages, |mm, vma, range, _| {
        for_each_entry(mm, cpu, range, |ram, addr, slot| visit(mm, vma, ram, addr, slot));
    });
}

/// Calls `visit` for each mapping of `object` that shows pages in `pages`, with its space, the addresses at which it
/// shows them, and the first of the pages; not pinned, under the object's mapping lock. Blocks on that; not while pinned.
pub fn for_each_range_of_object<H: Host>(
    cpu: &Cpu<H>,
    object: &Object<H>,
    pages: Range<u64>,
    mut visit: impl FnMut(&Mm<H>, &Vma<H>, AddrRange, u64),
) {
    {
        let pin = cpu.pin();
        cpu.machine().stats().count(&pin, Counter::RmapLock);
    }
    let mappings = object.lock_mappings();
    for link in mappings.iter() {
        let vma = vma_of::<H>(link);
        // SAFETY: links in the list are those of live VMAs: a VMA leaves the list before it is retired.
        let vma = unsafe { &*vma };
        // Start and offset keep their relation under this lock; the end may move, which the sweep of whoever moves it
        // makes up for.
        let (range, first) = (vma.range(), vma.pgoff());
        let from = pages.start.max(first);
        let to = pages.end.min(first.saturating_add(range.pages()));
        if from >= to {
            continue;
        }
        let at = |page: u64| range.start + ((page - first) << PAGE_SHIFT);
        // SAFETY: a VMA in the list belongs to a space that is alive, for the same reason.
        let mm = unsafe { &*vma.space().cast::<Mm<H>>() };
        visit(mm, vma, AddrRange::new(at(from), at(to)), from);
    }
}

/// True when a mapping of `object` lets stores reach it, or may come to (`MAY_WRITE`): what forbids to seal it against them. Blocks on the object's
/// mapping lock; not while pinned. O(mappings).
pub fn is_mapped_for_stores<H: Host>(cpu: &Cpu<H>, object: &Object<H>) -> bool {
    let mut any = false;
    for_each_range_of_object(cpu, object, 0..u64::MAX, |_, vma, _, _| {
        any |= vma.flags().contains(VmFlags::SHARED.union(VmFlags::MAYWRITE));
    });
    any
}

/// Calls `visit` for each entry of `range` that is not empty. Not while pinned.
pub fn for_each_entry<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    range: AddrRange,
    mut visit: impl FnMut(&Ram<'_, H>, u64, &Slot),
) {
    mm.for_each_part(cpu, range, |ram, part| {
        mm.page_table.for_each_slot(ram, part, |addr, slot| {
            visit(ram, addr, slot);
            ControlFlow::Continue(())
        });
    });
}

fn vma_of<H: Host>(link: *const MappingLink) -> *const Vma<H> {
    link.wrapping_byte_sub(offset_of!(Vma<H>, link)).cast()
}

fn visit_entry<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    addr: u64,
    frame: Frame,
    visit: &mut impl FnMut(&Mm<H>, &Ram<'_, H>, u64, &Walk<'_>),
) {
    let mut rounds = 0;
    loop {
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let Some(walk) = mm.page_table.walk(&ram, addr) else { return };
        if walk.raw == BUSY {
            // Not pinned: a collapse owns entries for as long as it copies.
            drop(pin);
            mm.machine.host().relax(cpu.id(), rounds);
            rounds = rounds.saturating_add(1);
            continue;
        }
        let mapped = match walk.level {
            Level::PAGE => match Pte::decode::<H::Format>(walk.raw) {
                // Its page is in memory, if the frame says that this is its slot.
                Pte::Swap(number) if ram.meta(frame).spare() == swap_slot(number) + 1 => Some(frame),
                pte => pte.frame(),
            },
            Level::BLOCK => Pte::block::<H::Format>(walk.raw)
                .map(|(first, _)| Frame(first.0 + (addr >> PAGE_SHIFT) as u32 % TABLE_ENTRIES as u32)),
            _ => None,
        };
        if mapped == Some(frame) {
            visit(mm, &ram, addr, &walk);
        }
        return;
    }
}
