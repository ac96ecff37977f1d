//! Private pages: their marks, and their way to swap (the protocol is in the head of [`swap`](crate::swap)).
//!
//! The frame is known by its number alone, and may be freed and become another page at any moment, until an entry of it is owned: an
//! entry that maps it has a reference. So nothing is written to its metadata before, and everything read before is read again then.
//!
//! The anon_vma that the page names is visited throughout. Its memory stays therefore as long as the page keeps the name, also
//! when all spaces have left it while the page is being written; others who find the page by its number may look at it.

use super::{Reclaim, Verdict, Why};
use crate::addr::{AddrRange, Frame, PAGE_SIZE};
use crate::fault::may_vanish;
use crate::frame::{FrameFlags, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::mm::rss::PageKind;
use crate::page_table::{EMPTY, Format, Level, PAYLOAD_USER_WP, Pte, PteFlags, Walk, swap_slot};
use crate::rmap::AnonVma;
use crate::rmap::walk::for_each_mapping;
use crate::stats::Counter;
use crate::swap::{Found, Leaving, Left};
use crate::vma::{Access, VmFlags};
use core::ptr::{self, NonNull};

/// A page's anon_vma, whose memory stays while this lives.
struct Visit<'a, H: Host> {
    cpu: &'a Cpu<H>,
    anon: NonNull<AnonVma<H>>,
}

impl<'a, H: Host> Visit<'a, H> {
    /// `None` when the frame is no private page, or somebody else is at work on it.
    fn of(cpu: &'a Cpu<H>, frame: Frame) -> Option<Self> {
        let pin = cpu.pin();
        let meta = cpu.machine().frames().meta(frame);
        let owner = meta.owner();
        let flags = meta.flags();
        let usable = flags.contains(FrameFlags::ANON) && !flags.contains(FrameFlags::LOCKED);
        if !usable || owner.is_null() || meta.references() == 0 || meta.owner() != owner {
            return None;
        }
        let anon = NonNull::new(owner.cast::<AnonVma<H>>())?;
        // SAFETY: between the two looks at the owner the frame was a private page of it that was mapped, or known to a slot
        // with an entry; so the anon_vma was in its tree, and its memory outlasts the pin.
        let visited = unsafe { anon.as_ref() }.visit();
        drop(pin);
        visited.then_some(Self { cpu, anon })
    }
}

impl<H: Host> Drop for Visit<'_, H> {
    fn drop(&mut self) {
        // SAFETY: visited by `of`, and not used any more.
        unsafe { self.anon.as_ref().leave(&self.cpu.participant()) };
    }
}

/// Looks at a private page, and swaps it out if it may go.
pub(super) fn look<H: Host>(cpu: &Cpu<H>, frame: Frame, why: Why) -> Verdict {
    let machine = &**cpu.machine();
    let meta = machine.frames().meta(frame);
    let flags = meta.flags();
    if flags.contains(FrameFlags::LOCKED) {
        return Verdict::Busy;
    }
    if flags.contains(FrameFlags::REFERENCED) {
        // Whatever the frame is by now: this takes nothing but the mark.
        meta.clear_flags(FrameFlags::REFERENCED);
        if why != Why::Advised {
            return Verdict::Stays;
        }
    }
    if !machine.swap().is_on() && !flags.intersects(FrameFlags::LAZYFREE | FrameFlags::DROPPABLE) {
        return Verdict::Stays;
    }
    let Some(visit) = Visit::of(cpu, frame) else { return Verdict::Stays };
    if why == Why::Advised {
        // As in Linux: one program's advice does not concern the others'.
        if meta.references() > 1 {
            return Verdict::Stays;
        }
    } else if is_in_use(cpu, frame, visit.anon) {
        return Verdict::Stays;
    }
    swap_out(cpu, frame, visit.anon, why)
}

/// True when the page still is one of `anon`, for the owner of an entry that maps it.
fn is_of<H: Host>(ram: &Ram<'_, H>, frame: Frame, anon: NonNull<AnonVma<H>>) -> bool {
    let meta = ram.meta(frame);
    meta.flags().contains(FrameFlags::ANON) && ptr::eq(meta.owner().cast_const().cast(), anon.as_ptr())
}

/// True when the mapping at `addr` keeps its pages in memory, or is not to be found. For the owner of the entry: a call that locks
/// the mapping later finds the page gone, and waits for the entry.
fn is_locked<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, addr: u64) -> bool {
    let Some(vma) = mm.index.find(ram.pin, addr) else { return true };
    mutant!("reclaim_anon_takes_locked", vma.flags().contains(VmFlags::LOCKED), false)
}

/// Takes the marks of having been accessed away. True when there were any, or the page must stay for another reason.
fn is_in_use<H: Host>(cpu: &Cpu<H>, frame: Frame, anon: NonNull<AnonVma<H>>) -> bool {
    let mut in_use = false;
    let mut cold_block = None;
    for_each_mapping(cpu, frame, |mm, ram, addr, walk| {
        if walk.level != Level::PAGE {
            match age_block(mm, ram, addr, walk) {
                Some(()) => cold_block = Some((ptr::from_ref(mm), addr)),
                None => in_use = true,
            }
            return;
        }
        let flags = match Pte::decode::<H::Format>(walk.raw) {
            Pte::Page { flags, .. } => flags,
            _ => return,
        };
        if !flags.contains(PteFlags::ACCESSED) {
            return;
        }
        in_use = true;
        let Some(taken) = walk.slot.take(walk.raw) else { return };
        if !is_of(ram, frame, anon) {
            return;
        }
        mark_aged(ram, frame);
        taken.publish(H::Format::with_flags(walk.raw, flags - PteFlags::ACCESSED));
    });
    in_use || cold_block.is_some()
}

/// Says that an entry of the page has lost a mark; for the owner of the entry.
pub(super) fn mark_aged<H: Host>(ram: &Ram<'_, H>, frame: Frame) {
    let meta = ram.meta(frame);
    // Looked at first: it is set for good.
    if mutant!("aged_untold", !meta.flags().contains(FrameFlags::AGED), false) {
        meta.set_flags(FrameFlags::AGED);
    }
}

/// Takes the mark of a block away once a round; a block without it is divided, and its pages are looked at from then on. `None`
/// when it is in use.
fn age_block<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, addr: u64, walk: &Walk<'_>) -> Option<()> {
    let (first, flags) = Pte::block::<H::Format>(walk.raw)?;
    // Once a round: with the first of its pages.
    if crate::mm::block_around(addr).start != addr {
        return None;
    }
    if flags.contains(PteFlags::ACCESSED) {
        if let Some(taken) = walk.slot.take(walk.raw) {
            for n in 0..crate::frame::BLOCK_FRAMES as u32 {
                mark_aged(ram, Frame(first.0 + n));
            }
            taken.publish(
                Pte::Block { frame: first, flags: flags - PteFlags::ACCESSED }.encode::<H::Format>(),
            );
        }
        return None;
    }
    if is_locked(mm, ram, addr) {
        return None;
    }
    let reclaim: &Reclaim = mm.machine.reclaim();
    let mut table = ram.allocate().or_else(|| reclaim.take_table());
    let divided = mm.divide_block(ram, addr, &mut table);
    if let Some(unused) = table {
        ram.free(unused);
    }
    divided.ok()
}

/// Unmaps the page everywhere and writes it to swap.
fn swap_out<H: Host>(cpu: &Cpu<H>, frame: Frame, anon: NonNull<AnonVma<H>>, why: Why) -> Verdict {
    let machine = &**cpu.machine();
    let swap = machine.swap();
    let (mut again, mut spare) = {
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        match swap.leave_again(&ram, frame) {
            Some(leaving) => (Some(leaving), None),
            // Without a slot it may still vanish.
            None => (None, swap.begin(&ram)),
        }
    };
    let owner = machine.frames().meta(frame).owner();
    if let Some(leaving) = again.take_if(|_| !ptr::eq(owner.cast_const().cast(), anon.as_ptr())) {
        // Another page by now, whose anon_vma was not visited.
        swap.write_out(cpu, leaving, false);
        return Verdict::Stays;
    }
    let unmapped = unmap(cpu, frame, anon, why, again, &mut spare);
    if let Some(slot) = spare {
        let pin = cpu.pin();
        swap.cancel(&machine.ram(&pin), slot);
    }
    match unmapped {
        Unmapped::No => Verdict::Stays,
        Unmapped::Vanished => Verdict::Freed,
        Unmapped::Leaving(leaving, stays) => match swap.write_out(cpu, leaving, !stays) {
            Left::Freed => Verdict::Freed,
            Left::Stayed => Verdict::Stays,
        },
    }
}

/// Takes the entries of the page, shoots them down and awaits the stores. `slot` is taken if the page begins to leave here.
fn unmap<H: Host>(
    cpu: &Cpu<H>,
    frame: Frame,
    anon: NonNull<AnonVma<H>>,
    why: Why,
    leaving: Option<Leaving>,
    slot: &mut Option<u64>,
) -> Unmapped {
    let mut out = Out { frame, anon, why, leaving, ticket: Ticket::PASSED, stays: false, vanished: false };
    for_each_mapping(cpu, frame, |mm, ram, addr, walk| out.entry(mm, ram, addr, walk, slot));
    mutant!("reclaim_anon_not_awaited", cpu.await_stores(out.ticket), ());
    if let Some(leaving) = &out.leaving {
        cpu.machine().swap().settle(cpu.machine(), leaving);
    }
    if out.vanished {
        return Unmapped::Vanished;
    }
    match out.leaving {
        Some(leaving) => Unmapped::Leaving(leaving, out.stays),
        None => Unmapped::No,
    }
}

/// What came of unmapping a page.
enum Unmapped {
    /// Nothing: it stays.
    No,
    /// It is known to a slot; whether an entry keeps it.
    Leaving(Leaving, bool),
    /// It is gone for good.
    Vanished,
}

/// Moves a private page to the frame `to`, fresh from the allocator. False when it stays where it is; then `to` is still the
/// caller's. Not while pinned.
pub(super) fn migrate<H: Host>(cpu: &Cpu<H>, frame: Frame, to: Frame) -> bool {
    let machine = &**cpu.machine();
    let swap = machine.swap();
    let Some(visit) = Visit::of(cpu, frame) else { return false };
    let mut slot = {
        let pin = cpu.pin();
        swap.begin_move(&machine.ram(&pin))
    };
    if slot.is_none() {
        return false;
    }
    let unmapped = unmap(cpu, frame, visit.anon, Why::Moved, None, &mut slot);
    {
        let pin = cpu.pin();
        if let Some(slot) = slot {
            swap.cancel(&machine.ram(&pin), slot);
        }
    }
    let Unmapped::Leaving(leaving, stays) = unmapped else { return false };
    let moved = if stays {
        swap.write_out(cpu, leaving, false);
        false
    } else {
        let pin = cpu.pin();
        swap.move_to(&machine.ram(&pin), leaving, to)
    };
    map_back(cpu, if moved { to } else { frame });
    moved
}

/// Makes entries that say that a page is swapped out, which is in `frame`, map it: those that can be had.
pub(super) fn map_back<H: Host>(cpu: &Cpu<H>, frame: Frame) {
    for_each_mapping(cpu, frame, |mm, ram, addr, walk| map_again(mm, ram, addr, walk));
}

/// Makes an entry that says `Swap` map the page, which is in memory, if nothing speaks against it.
fn map_again<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, addr: u64, walk: &Walk<'_>) {
    let Pte::Swap(payload) = Pte::decode::<H::Format>(walk.raw) else { return };
    let number = swap_slot(payload);
    let Some(vma) = mm.index.find(ram.pin, addr) else { return };
    let Some(seq) = vma.seq.read() else { return };
    let seen = vma.snapshot();
    if !seen.range.contains(addr) || !vma.seq.unchanged(seq) || !seen.flags.allows(Access::Read) {
        return;
    }
    linger!("map_again_unvalidated");
    let Some(taken) = walk.slot.take(walk.raw) else { return };
    if !mutant!("map_again_unvalidated", vma.seq.unchanged_while_owned(seq), true) {
        return;
    }
    match mm.machine.swap().find(ram, number) {
        Some(Found::Page { frame, alone }) => {
            let mut flags = seen.flags.read_only_pte();
            if payload & PAYLOAD_USER_WP != 0 {
                flags |= PteFlags::USER_WP;
            } else if alone && seen.flags.allows(Access::Write) {
                flags |= PteFlags::WRITE | PteFlags::DIRTY;
            }
            taken.publish(H::Format::page(frame, flags));
            mm.count_page(ram.pin, PageKind::Anon);
            mm.uncount_page(ram.pin, PageKind::Swap);
        }
        Some(Found::Away) => mm.machine.swap().cancel(ram, number),
        Some(Found::Unsettled) | None => {}
    }
}

/// A page on its way out, from entry to entry.
struct Out<H: Host> {
    frame: Frame,
    anon: NonNull<AnonVma<H>>,
    why: Why,
    leaving: Option<Leaving>,
    ticket: Ticket,
    /// An entry keeps it: the others stay as they are by now.
    stays: bool,
    /// It was in nobody's interest.
    vanished: bool,
}

impl<H: Host> Out<H> {
    fn entry(&mut self, mm: &Mm<H>, ram: &Ram<'_, H>, addr: u64, walk: &Walk<'_>, spare: &mut Option<u64>) {
        if self.stays || matches!(Pte::decode::<H::Format>(walk.raw), Pte::Swap(_)) {
            return;
        }
        let swap = mm.machine.swap();
        // Whatever speaks against it: dropping what was taken gives the entry back.
        self.stays = true;
        let flags = match Pte::decode::<H::Format>(walk.raw) {
            _ if walk.level != Level::PAGE => return,
            Pte::Page { flags, .. } | Pte::NoAccess { flags, .. } => flags,
            _ => return,
        };
        let Some(taken) = walk.slot.take(walk.raw) else { return };
        if !is_of(ram, self.frame, self.anon) {
            return;
        }
        // A page that is moved stays in memory.
        if self.why != Why::Moved && is_locked(mm, ram, addr) {
            return;
        }
        if flags.contains(PteFlags::ACCESSED) && !matches!(self.why, Why::Advised | Why::Moved) {
            return;
        }
        if self.leaving.is_none() && self.why != Why::Moved && may_vanish(ram.meta(self.frame), flags) {
            taken.publish(EMPTY);
            mm.uncount_page(ram.pin, PageKind::Anon);
            let ticket = mm.shoot_down(ram, AddrRange::new(addr, addr + PAGE_SIZE));
            // The only entry: nobody else can reach it.
            ram.drop_reference(self.frame, ticket);
            ram.count(Counter::PgLazyFreed);
            self.vanished = true;
            return;
        }
        if ram.meta(self.frame).flags().contains(FrameFlags::DROPPABLE) && self.why != Why::Moved {
            // Never written anywhere: it waits for the others to leave it.
            return;
        }
        if flags.contains(PteFlags::DIRTY) && ram.meta(self.frame).flags().contains(FrameFlags::LAZYFREE) {
            // It was stored to since it might be forgotten. The entry that brings it back may not say so any more.
            let gone = mutant!("swap_keeps_lazyfree", FrameFlags::LAZYFREE, FrameFlags::empty());
            ram.meta(self.frame).clear_flags(gone);
        }
        let number = match &self.leaving {
            None => {
                let Some(number) = *spare else { return };
                let Some(leaving) = swap.leave(ram, number, self.frame) else { return };
                *spare = None;
                self.leaving = Some(leaving);
                number
            }
            Some(leaving) => {
                if !swap.leave_entry(ram, leaving) {
                    return;
                }
                leaving.slot()
            }
        };
        // What a handler of user faults has protected stays so.
        let mark = if flags.contains(PteFlags::USER_WP) { PAYLOAD_USER_WP } else { 0 };
        taken.publish(Pte::Swap(number | mark).encode::<H::Format>());
        mm.count_page(ram.pin, PageKind::Swap);
        mutant!("swap_out_uncounted", mm.uncount_page(ram.pin, PageKind::Anon), ());
        let page = AddrRange::new(addr, addr + PAGE_SIZE);
        let ticket = mm.shoot_down(ram, page);
        if ticket != Ticket::PASSED {
            // They pass in order: the last one's ticket stands for all.
            self.ticket = ticket;
        }
        self.stays = false;
    }
}
