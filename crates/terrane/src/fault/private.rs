//! What all faults on private pages share: the anon_vma of a VMA, and making a frame a page of it.

use super::{Attempt, Stop};
use crate::addr::{Frame, PAGE_SHIFT};
use crate::error::FaultError;
use crate::frame::FrameFlags;
use crate::host::Host;
use crate::page_table::PteFlags;
use crate::rmap::AnonVma;
use crate::stats::Counter;
use crate::vma::{Anon, VmFlags, Vma, merge};
use core::ptr;

/// The flags of a page of this VMA that may be written from now on.
#[inline]
pub(super) fn writable_pte(flags: VmFlags) -> PteFlags {
    flags.read_only_pte().union(PteFlags::WRITE).union(PteFlags::ACCESSED).union(PteFlags::DIRTY)
}

/// Makes `frame`, fresh from the allocator, a private page at `addr`. Only once the entry is taken and the VMA found
/// valid: from here on a walk that meets the frame trusts its owner, and the sweep that ends the owner waits for
/// the entry.
#[inline]
pub(super) fn own<H: Host>(attempt: &Attempt<'_, H>, frame: Frame, anon: &AnonVma<H>, addr: u64) {
    let meta = attempt.ram.frames.meta(frame);
    meta.set_owner(anon.page_owner().cast_mut().cast());
    meta.set_index(addr >> PAGE_SHIFT);
    // What may vanish does so also when it has been stored to.
    let droppable = attempt.seen.flags.contains(VmFlags::DROPPABLE);
    meta.init_flags(if droppable { FrameFlags::ANON.union(FrameFlags::DROPPABLE) } else { FrameFlags::ANON });
}

/// The anon_vma of the attempt's VMA, made if there is none: by compare-and-swap, without a lock.
#[inline]
pub(crate) fn prepare_anon<'a, H: Host>(attempt: &Attempt<'a, H>) -> Result<&'a AnonVma<H>, Stop<H>> {
    match attempt.vma.anon() {
        Anon::Some(anon) => Ok(anon),
        Anon::Frozen => Err(Stop::GiveUp(Counter::SpfVmaNoanon)),
        Anon::Closed => Err(Stop::GiveUp(Counter::SpfVmaChanged)),
        Anon::None => make_anon(attempt),
    }
}

#[cold]
fn make_anon<'a, H: Host>(attempt: &Attempt<'a, H>) -> Result<&'a AnonVma<H>, Stop<H>> {
    let vma = attempt.vma;
    // As in Linux: a neighbour that could be merged with this VMA but for its protection shares its anon_vma, so
    // that a later change of protection can merge them.
    if let Some(anon) = neighbours_anon(attempt) {
        if vma.install_anon(ptr::NonNull::from(anon)) {
            return Ok(anon);
        }
        // Another CPU has set one meanwhile. The count is given back without the lock: the neighbour that lent
        // it was a user then; if it has left since, this was the last use and the node must be seen off.
        return Err(Stop::GiveBack(ptr::NonNull::from(anon)));
    }
    let Ok(fresh) = AnonVma::try_new(attempt.mm.cookie()) else {
        return Err(Stop::Fail(FaultError::OutOfMemory));
    };
    if !vma.install_anon(fresh) {
        // SAFETY: made above, installed nowhere.
        unsafe { AnonVma::discard(fresh) };
        return Err(Stop::Again);
    }
    // SAFETY: installed: it lives as long as the VMA uses it, and an epoch longer; the attempt is pinned.
    Ok(unsafe { fresh.as_ref() })
}

/// The anon_vma of a neighbour that could be merged with the attempt's VMA, with one user more: the caller.
/// Neighbours may change while they are looked at; at worst a VMA shares an anon_vma with one that is no neighbour
/// any more, which makes walks longer and nothing wrong.
fn neighbours_anon<'a, H: Host>(attempt: &Attempt<'a, H>) -> Option<&'a AnonVma<H>> {
    let (mm, pin, range) = (attempt.mm, attempt.ram.pin, attempt.seen.range);
    let lend = |neighbour: &'a Vma<H>| {
        neighbour
            .anon_vma()
            .filter(|anon| anon.is_root() && ptr::eq(anon.space(), mm.cookie()) && anon.try_use())
    };
    // The one above first, as Linux does.
    let above = mm.index.find(pin, range.end);
    if let Some(anon) = above.filter(|above| merge::alike_but_for_prot(attempt.vma, above)).and_then(lend) {
        return Some(anon);
    }
    let below = range.start.checked_sub(1).and_then(|last| mm.index.find(pin, last));
    below.filter(|below| merge::alike_but_for_prot(below, attempt.vma)).and_then(lend)
}
