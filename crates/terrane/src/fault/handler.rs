//! What kind of fault it is, and the kinds that concern an entry that is there already.

use super::block::{self, Above};
use super::user::{FaultKind, Want};
use super::{Attempt, Stop, Translation, anon, file, private, swap};
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::error::FaultError;
use crate::frame::FrameFlags;
use crate::host::{Host, Ticket};
use crate::mm::rss::PageKind;
use crate::page_table::{Format, Pte, PteFlags, Slot};
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{Access, VmFlags};

/// Steps 3 to 7 for the page at `addr`.
#[inline]
pub(super) fn handle<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    access: Access,
) -> Result<Translation, Stop<H>> {
    let flags = attempt.seen.flags;
    if !flags.allows(access) {
        return Err(Stop::Fail(FaultError::NotAllowed));
    }
    let slot = match attempt.mm.page_table.lookup(&attempt.ram, addr) {
        Some(slot) => slot,
        None => match block::above(attempt, addr, access)? {
            Above::Slot(slot) => slot,
            Above::Block(translation) => return Ok(translation),
        },
    };
    let raw = slot.load();
    match Pte::decode::<H::Format>(raw) {
        Pte::Empty | Pte::UserWp => match attempt.vma.object() {
            None => anon::first_touch(attempt, addr, access, slot, raw),
            Some(object) => file::first_touch(attempt, addr, access, slot, raw, object),
        },
        Pte::Poison => Err(Stop::Fail(FaultError::Poisoned)),
        Pte::Page { frame, flags: allowed } => {
            if access == Access::Write && !allowed.contains(PteFlags::WRITE) {
                return write_protected(attempt, addr, slot, raw, frame, allowed);
            }
            if access == Access::Execute && !allowed.contains(PteFlags::EXEC) {
                // The VMA allows it and the entry does not: a change of protection is under way.
                return Err(changing(attempt));
            }
            // Another CPU was faster, or the processor has a stale translation: nothing to do.
            Ok(Translation { frame, flags: allowed })
        }
        Pte::Busy | Pte::Tombstone => Err(Stop::Again),
        Pte::NoAccess { .. } => Err(changing(attempt)),
        Pte::Swap(payload) => swap::swapped(attempt, access, slot, raw, payload),
        Pte::Guard => Err(Stop::Fail(FaultError::Guard)),
        Pte::Migration(_) | Pte::Block { .. } => Err(Stop::GiveUp(Counter::SpfVmaNotsup)),
    }
}

/// The entry and the VMA disagree: a layout change between them is at work.
pub(super) fn changing<H: Host>(attempt: &Attempt<'_, H>) -> Stop<H> {
    if attempt.seq.is_some() { Stop::GiveUp(Counter::SpfVmaChanged) } else { Stop::Again }
}

/// A store to a page that is mapped read-only.
fn write_protected<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    slot: &Slot,
    raw: u64,
    frame: Frame,
    allowed: PteFlags,
) -> Result<Translation, Stop<H>> {
    if allowed.contains(PteFlags::USER_WP) && attempt.seen.flags.contains(VmFlags::UFFD_WP) {
        return Err(Want::stop(attempt, FaultKind::WriteProtected, Access::Write));
    }
    let ram = &attempt.ram;
    let flags = private::writable_pte(attempt.seen.flags);
    if let (false, Some(object)) = (attempt.seen.flags.is_private(), attempt.vma.object()) {
        // Shared: the page stays, the file's page becomes dirty.
        let taken = slot.take(raw).ok_or(Stop::Again)?;
        if !attempt.still_valid() {
            return Err(Stop::GiveUp(Counter::SpfVmaChanged));
        }
        object.mark_dirty(frame);
        taken.publish(H::Format::page(frame, flags));
        return Ok(Translation { frame, flags });
    }
    let is_anon = ram.frames.meta(frame).flags().contains(FrameFlags::ANON);
    if is_anon && ram.frames.meta(frame).references() == 1 {
        // The last sharer: nobody can join while the entry is taken, for whoever forks must pass it.
        let taken = slot.take(raw).ok_or(Stop::Again)?;
        if !attempt.still_valid() {
            return Err(Stop::GiveUp(Counter::SpfVmaChanged));
        }
        let meta = ram.frames.meta(frame);
        // Both once more: before the entry was taken the frame may have been freed, and be another kind of page now.
        if meta.flags().contains(FrameFlags::ANON) && meta.references() == 1 {
            taken.publish(H::Format::page(frame, flags));
            ram.count(Counter::PgReuse);
            return Ok(Translation { frame, flags });
        }
        return Err(Stop::Again);
    }
    // For the reference to the old page. Whatever kind of page that seems: it may be another by the time the entry is taken.
    if !ram.has_room_for_late() {
        return Err(Stop::Again);
    }
    let anon = private::prepare_anon(attempt)?;
    let copy = attempt.allocate(addr).ok_or(Stop::Fail(FaultError::OutOfMemory))?;
    let Some(taken) = slot.take(raw) else {
        ram.free(copy);
        return Err(Stop::Again);
    };
    if !attempt.still_valid() {
        drop(taken);
        ram.free(copy);
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    // A fork of this space is under way, and other CPUs may still be storing to the old page. The entry was made
    // read-only after the mark was set, so whoever read it that way sees the mark. The locked path waits for the fork.
    let forking = mutant!("forking_copies", attempt.mm.forking.load(Ordering::Acquire), false);
    if attempt.seq.is_some() && forking {
        drop(taken);
        ram.free(copy);
        return Err(Stop::GiveUp(Counter::SpfVmaNotsup));
    }
    // What kind of page it is counts from here on. Before the entry was taken, the frame may have been freed and mapped
    // here again as another kind of page, by an entry with the same bits.
    let marks = ram.frames.meta(frame).flags();
    let kind = PageKind::from_flags(marks);
    // Copied while the entry is taken: its reference keeps the old frame from being freed and used anew, which
    // comparing the entry afterwards would not notice.
    if frame == attempt.mm.machine.zero_frame() {
        ram.zero(copy);
    } else {
        ram.copy(frame, copy);
    }
    // No processor may go on reading the old page once the new one is written.
    // An entry that was never used has left no translation behind, unless the mark was taken away.
    let used = allowed.contains(PteFlags::ACCESSED)
        || mutant!("aged_ignored", marks.contains(FrameFlags::AGED), false);
    let ticket = if used { attempt.shoot_down_page(addr) } else { Ticket::PASSED };
    private::own(attempt, copy, anon, addr);
    taken.publish(H::Format::page(copy, flags));
    ram.event(Counter::PgCow, addr);
    if kind == Some(PageKind::Anon) {
        ram.drop_reference(frame, ticket);
    } else {
        attempt.mm.count_page(ram.pin, PageKind::Anon);
        if let Some(kind) = kind {
            attempt.mm.uncount_page(ram.pin, kind);
        }
    }
    Ok(Translation { frame: copy, flags })
}

impl<H: Host> Attempt<'_, H> {
    /// Makes all CPUs forget the page at `addr`.
    pub(super) fn shoot_down_page(&self, addr: u64) -> Ticket {
        let range = AddrRange::new(addr, addr + PAGE_SIZE);
        self.mm.shoot_down(&self.ram, range)
    }
}
