//! First touches of mapped objects: files and shared memory.
//!
//! A page of the object is mapped where it lies in the page cache, or copied at once for a private store.
//! After taking the entry the fault looks twice: at the VMA's counter, and at the page's slot in the object, which
//! stands in for a reference count (see [`object`](crate::object)).
//!
//! Fault-around: a load maps the pages of the aligned window around the address too, as far as they are in memory,
//! in the VMA and not mapped yet. They are taken together, validated once, and published together.

use super::user::{self, FaultKind, Want};
use super::{Attempt, Stop, Translation, private};
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::FaultError;
use crate::host::Host;
use crate::mm::Locking;
use crate::mm::rss::PageKind;
use crate::object::{Object, Page, Slots};
use crate::page_table::{EMPTY, Format, PteFlags, Raw, Slot, Table, Taken};
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::sync::Shared;
use crate::vma::{Access, VmFlags};

/// Entries taken together at most: how long a sweep may have to wait for a fault. 16 is 64 KiB, the default
/// window.
pub(super) const BATCH: usize = 16;

/// Loads that map what is around: not where a handler of user faults wants to know of each page.
pub(super) const NOT_AROUND: VmFlags = VmFlags::UFFD_WP.union(VmFlags::UFFD_MINOR);

/// Nothing is mapped at `addr`, whose entry is `raw`, and the VMA shows `object`.
pub(super) fn first_touch<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    access: Access,
    slot: &Slot,
    raw: Raw,
    object: &Shared<Object<H>>,
) -> Result<Translation, Stop<H>> {
    let index = attempt.seen.index_of(addr);
    let flags = attempt.seen.flags;
    let copies = access == Access::Write && flags.is_private();
    // Before the page is looked for: a store beyond the end of a file, too, leaves a VMA with an anon_vma in Linux, which
    // decides what the VMA merges with.
    let anon = if copies { Some(private::prepare_anon(attempt)?) } else { None };
    let frame = find_page(attempt, object, index, access)?;
    let marked = raw != EMPTY && user::is_protected(attempt, raw);
    if access == Access::Write && marked {
        return Err(Want::stop(attempt, FaultKind::WriteProtected, access));
    }
    if let Some(anon) = anon {
        return copy_at_once(attempt, addr, (slot, raw), object, (index, frame), anon);
    }
    if access != Access::Write
        && attempt.mm.fault_around > PAGE_SIZE
        && !flags.intersects(VmFlags::RAND_READ.union(NOT_AROUND))
    {
        map_around(attempt, addr, object, attempt.mm.fault_around);
    }
    let allowed = if marked {
        flags.read_only_pte().union(PteFlags::ACCESSED).union(PteFlags::USER_WP)
    } else if access == Access::Write {
        private::writable_pte(flags)
    } else if writable_at_once(attempt, object) {
        // Not marked dirty: nobody has stored to it yet.
        private::writable_pte(flags).difference(PteFlags::DIRTY)
    } else {
        flags.read_only_pte().union(PteFlags::ACCESSED)
    };
    linger!("object_maps_leaving");
    let taken = slot.take(raw).ok_or(Stop::Again)?;
    if !attempt.still_valid() || !object.still_holds(attempt.ram.pin, index, frame) {
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    if allowed.contains(PteFlags::WRITE) && object.is_file() {
        object.mark_dirty(frame);
    }
    taken.publish(H::Format::page(frame, allowed));
    if !object.is_device() {
        attempt.mm.count_page(attempt.ram.pin, kind_of(object));
    }
    Ok(Translation { frame, flags: allowed })
}

/// True when a page may be mapped writable though it is only read: stores to it need not be noticed, because
/// there is no file to write them to.
pub(super) fn writable_at_once<H: Host>(attempt: &Attempt<'_, H>, object: &Object<H>) -> bool {
    let flags = attempt.seen.flags;
    !flags.is_private() && flags.contains(VmFlags::WRITE) && !object.is_file()
}

/// What the pages of `object` are counted as.
fn kind_of<H: Host>(object: &Object<H>) -> PageKind {
    if object.is_file() { PageKind::File } else { PageKind::Shmem }
}

/// The frame of page `index`, or why not now.
pub(super) fn find_page<H: Host>(
    attempt: &Attempt<'_, H>,
    object: &Shared<Object<H>>,
    index: u64,
    access: Access,
) -> Result<Frame, Stop<H>> {
    let flags = attempt.seen.flags;
    match object.page(attempt.ram.pin, index) {
        Page::Ready(_) if flags.contains(VmFlags::UFFD_MINOR) => {
            Err(Want::stop(attempt, FaultKind::Minor, access))
        }
        Page::Absent if flags.contains(VmFlags::UFFD_MISSING) => {
            Err(Want::stop(attempt, FaultKind::Missing, access))
        }
        Page::Ready(frame) => Ok(frame),
        Page::Reading(frame) => Err(Stop::Wait(object.clone(), frame)),
        Page::Absent if object.is_file() => Err(Stop::Read(object.clone(), index)),
        Page::Absent => match object
            .make_page_of(attempt.ram.pin, index, |ram| attempt.mm.allocate_page_of(ram, object, index))
        {
            Ok(made) => made.ok_or(Stop::Again),
            Err(FaultError::BeyondEnd) => Err(Stop::Read(object.clone(), index)),
            Err(error) => Err(Stop::Fail(error)),
        },
        Page::Swapped => Err(Stop::Read(object.clone(), index)),
        Page::BeyondEnd => Err(Stop::Fail(FaultError::BeyondEnd)),
    }
}

/// A store to a private mapping of a page that is not mapped: the copy is mapped at once.
fn copy_at_once<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    (slot, raw): (&Slot, Raw),
    object: &Object<H>,
    (index, frame): (u64, Frame),
    anon: &AnonVma<H>,
) -> Result<Translation, Stop<H>> {
    let ram = &attempt.ram;
    let copy = attempt.allocate(addr).ok_or(Stop::Fail(FaultError::OutOfMemory))?;
    // The pin keeps `frame` from being used anew, even if it leaves the cache.
    ram.copy(frame, copy);
    let Some(taken) = slot.take(raw) else {
        ram.free(copy);
        return Err(Stop::Again);
    };
    if !attempt.still_valid() || !object.still_holds(ram.pin, index, frame) {
        drop(taken);
        ram.free(copy);
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    let flags = private::writable_pte(attempt.seen.flags);
    private::own(attempt, copy, anon, addr);
    taken.publish(H::Format::page(copy, flags));
    attempt.mm.count_page(ram.pin, PageKind::Anon);
    ram.count(Counter::PgCow);
    Ok(Translation { frame: copy, flags })
}

/// Maps what is in memory of the window of `bytes` (aligned, a power of two of pages, one table at most) around
/// `addr`, but for `addr` itself. What cannot be had at once is left out.
fn map_around<H: Host>(attempt: &Attempt<'_, H>, addr: u64, object: &Object<H>, bytes: u64) {
    // The locked path holds the page of the fault, not those around it: they may be unmapped or protected this very moment, and
    // without a counter nothing would tell. (The classic lock holds everything.)
    if attempt.seq.is_none() && attempt.mm.locking == Locking::Speculative {
        return;
    }
    let start = (addr & !(bytes - 1)).max(attempt.seen.range.start);
    let end = ((addr & !(bytes - 1)) + bytes).min(attempt.seen.range.end);
    let Some(table) = attempt.mm.page_table.leaf_table(&attempt.ram, addr) else { return };
    let mut at = start;
    let mut around = 0;
    while at < end {
        let stop = end.min(at + BATCH as u64 * PAGE_SIZE);
        around += map_batch(attempt, object, table, at, stop, Some(addr));
        at = stop;
    }
    attempt.ram.stats.add(attempt.ram.pin, Counter::PgFaultAround, around);
}

/// Maps the pages of `start..end` (at most [`BATCH`], within the span of `table`) that are in memory and not mapped,
/// but for the page at `but`. Returns how many.
pub(super) fn map_batch<H: Host>(
    attempt: &Attempt<'_, H>,
    object: &Object<H>,
    table: &Table,
    start: u64,
    end: u64,
    but: Option<u64>,
) -> u64 {
    let pin = attempt.ram.pin;
    let last = object.pages();
    let first_index = attempt.seen.index_of(start);
    let mut flags = attempt.seen.flags.read_only_pte();
    if writable_at_once(attempt, object) {
        flags |= PteFlags::WRITE;
    }
    // Not marked accessed: nobody has asked for these yet.
    let mut batch: [Option<(Taken<'_>, Frame)>; BATCH] = [const { None }; BATCH];
    let mut slots: Option<Slots<'_>> = None;
    let mut any = false;
    let count = ((end - start) >> PAGE_SHIFT) as usize;
    for (n, place) in batch.iter_mut().enumerate().take(count) {
        let (at, index) = (start + ((n as u64) << PAGE_SHIFT), first_index + n as u64);
        let slot = &table[(at >> PAGE_SHIFT) as usize % TABLE_ENTRIES];
        if but == Some(at) || index >= last || slot.load() != EMPTY {
            continue;
        }
        if slots.is_none_or(|slots| index >= slots.end()) {
            slots = object.slots(pin, index);
        }
        let Some(frame) = slots.and_then(|slots| slots.get(index)) else { continue };
        if !object.is_ready(frame) {
            continue;
        }
        linger!("object_maps_leaving_around");
        if let Some(taken) = slot.take(EMPTY) {
            *place = Some((taken, frame));
            any = true;
        }
    }
    if !any || !attempt.still_valid() {
        return 0; // dropping the batch gives the entries back
    }
    let mut mapped = 0;
    let mut slots: Option<Slots<'_>> = None;
    for (n, place) in batch.iter_mut().enumerate().take(count) {
        let Some((taken, frame)) = place.take() else { continue };
        let index = first_index + n as u64;
        if slots.is_none_or(|slots| index >= slots.end()) {
            slots = object.slots(pin, index);
        }
        let ready = mutant!("object_maps_leaving_around", object.is_still_ready(frame), true);
        if slots.and_then(|slots| slots.get(index)) == Some(frame) && ready {
            taken.publish(H::Format::page(frame, flags));
            mapped += 1;
        }
    }
    attempt.mm.count_pages(pin, kind_of(object), mapped);
    mapped
}
