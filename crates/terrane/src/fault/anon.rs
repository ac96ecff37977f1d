//! First touches of private anonymous memory, and the accounts of its frames.
//!
//! `references` of an anonymous frame counts the page-table entries that map it. It rises only in `fork`,
//! which passes the entry of the parent; so whoever has taken an entry and sees 1 is the only owner. The frame of
//! zeros is not counted at all: all spaces map it.

use super::user::{self, FaultKind, Want};
use super::{Attempt, Stop, Translation, private};
use crate::error::FaultError;
use crate::host::Host;
use crate::mm::rss::PageKind;
use crate::page_table::{EMPTY, Format, PteFlags, Raw, Slot};
use crate::stats::Counter;
use crate::vma::{Access, VmFlags};

/// Nothing is mapped at `addr`, whose entry is `raw`, and the VMA is anonymous and private.
#[inline]
pub(super) fn first_touch<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    access: Access,
    slot: &Slot,
    raw: Raw,
) -> Result<Translation, Stop<H>> {
    if attempt.seen.flags.contains(VmFlags::UFFD_MISSING) {
        return Err(Want::stop(attempt, FaultKind::Missing, access));
    }
    let marked = raw != EMPTY && user::is_protected(attempt, raw);
    if access != Access::Write {
        return read_zeros(attempt, slot, raw, marked);
    }
    if marked {
        return Err(Want::stop(attempt, FaultKind::WriteProtected, access));
    }
    let ram = &attempt.ram;
    let anon = private::prepare_anon(attempt)?;
    let frame = attempt.allocate(addr).ok_or(Stop::Fail(FaultError::OutOfMemory))?;
    // Before the entry is taken: zeroing is most of a fault, and a sweep waits for whoever has taken an entry.
    ram.zero(frame);
    let Some(taken) = slot.take(raw) else {
        ram.free(frame);
        return Err(Stop::Again);
    };
    if !attempt.still_valid() {
        drop(taken);
        ram.free(frame);
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    let flags = private::writable_pte(attempt.seen.flags);
    private::own(attempt, frame, anon, addr);
    taken.publish(H::Format::page(frame, flags));
    attempt.mm.count_page(ram.pin, PageKind::Anon);
    Ok(Translation { frame, flags })
}

/// A load from memory never written: the frame of zeros, read-only.
fn read_zeros<H: Host>(
    attempt: &Attempt<'_, H>,
    slot: &Slot,
    raw: Raw,
    marked: bool,
) -> Result<Translation, Stop<H>> {
    let frame = attempt.mm.machine.zero_frame();
    let mut flags = attempt.seen.flags.read_only_pte().union(PteFlags::ACCESSED);
    flags.set(PteFlags::USER_WP, marked);
    let taken = slot.take(raw).ok_or(Stop::Again)?;
    if !attempt.still_valid() {
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    taken.publish(H::Format::page(frame, flags));
    Ok(Translation { frame, flags })
}
