//! What layout changes do to the entries of the page table: zap them, shoot them down, free what they held, and change what they
//! allow. The layout itself has been changed before ([`change`](super::change)), so that faults know.

use crate::addr::AddrRange;
use crate::frame::{FrameFlags, FrameList, Grace, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::page_table::{BUSY, Pte, PteFlags, Raw, Slot};
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{Prot, Vma};
use core::ops::ControlFlow;

/// A sweep of parts of the page table: all of them are zapped, then shot down once, then freed.
pub(super) struct Sweep<'a, H: Host> {
    mm: &'a Mm<H>,
    cpu: &'a Cpu<H>,
    pages: FrameList,
    found: bool,
    tables: bool,
    /// Pages of objects are concerned, which live on elsewhere: [`Mm::ending`] is raised.
    ending: bool,
}

impl<'a, H: Host> Sweep<'a, H> {
    pub(super) fn new(mm: &'a Mm<H>, cpu: &'a Cpu<H>) -> Self {
        Self { mm, cpu, pages: FrameList::new(), found: false, tables: false, ending: false }
    }

    /// Empties the entries of `range`, which no VMA covers any more, or whose pages are to be forgotten.
    /// `ends_object`: pages of an object are concerned that may be written through these entries, or whose mapping goes.
    pub(super) fn zap(&mut self, range: AddrRange, ends_object: bool) {
        if ends_object && !self.ending {
            self.ending = true;
            self.mm.ending.fetch_add(1, Ordering::SeqCst);
        }
        let zero = self.mm.machine.zero_frame();
        self.mm.for_each_part(self.cpu, range, |ram, part| {
            self.tables = true;
            self.mm.page_table.zap(ram, part, &mut |_, pte| {
                if let Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } = pte {
                    self.found = true;
                    let meta = ram.frames.meta(frame);
                    if frame != zero && meta.flags().contains(FrameFlags::ANON) && meta.dec_references() == 0
                    {
                        self.pages.push(ram.frames, frame);
                    }
                }
            });
        });
    }

    /// Shoots `range`, which covers all that was zapped, down; frees the frames once that has passed; with `unmapped`,
    /// also the page tables that nothing is mapped in any more. For a caller that holds the range.
    ///
    /// Pages of objects are counted by nobody, and the object may be written back or gone the next moment. So where
    /// stores to them may be under way, or their mapping goes, it waits until the shoot-down has passed; the VMA is still in
    /// the object's list. (Loads under way do not matter to a write-back, and cutting short shoots down every mapping.)
    pub(super) fn finish(self, range: AddrRange, unmapped: bool) {
        let (mm, cpu, ending) = (self.mm, self.cpu, self.ending);
        let ticket = self.shoot_down_and_free(range, unmapped);
        if ending {
            cpu.await_stores(ticket);
            mm.ending.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn shoot_down_and_free(self, range: AddrRange, unmapped: bool) -> Ticket {
        if !self.tables {
            self.cpu.count(Counter::TlbFlushSkipped, 1);
            return Ticket::PASSED; // nothing was ever touched there
        }
        let pin = self.cpu.pin();
        let ram = self.mm.ram(&pin);
        let mut tables = FrameList::new();
        if unmapped {
            let floor = self.mm.index.last_starting_before(&pin, range.start).map_or(0, Vma::end);
            let ceiling = self.mm.index.first_ending_after(&pin, range.start).map_or(u64::MAX, Vma::start);
            self.mm.page_table.free_tables(&ram, floor, ceiling, range, &mut tables);
        }
        // The entries of an object may have been taken away a moment ago, with loads through them still under way.
        if !self.found && tables.is_empty() && !self.ending {
            self.cpu.count(Counter::TlbFlushSkipped, 1);
            return Ticket::PASSED;
        }
        let ticket = self.mm.shoot_down(&ram, range);
        if !tables.is_empty() {
            ram.defer(tables, Grace { epoch: Some(pin.epoch().now()), ticket });
        }
        let mut pages = self.pages;
        if ticket != Ticket::PASSED {
            ram.defer(pages, Grace { epoch: None, ticket });
            return ticket;
        }
        while let Some(frame) = pages.pop(ram.frames) {
            ram.free(frame);
        }
        ticket
    }
}

/// Makes the page table allow no more than `prot` in `range`, and as much for pages that were hidden. Entries that
/// allow less than `prot` stay: the next fault raises them, page by page, where sharing lets it. Returns the ticket of
/// the shoot-down.
pub(super) fn apply_protection<H: Host>(mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange, prot: Prot) -> Ticket {
    let mut reduced = false;
    mm.for_each_part(cpu, range, |ram, part| {
        mm.page_table.for_each_slot(ram, part, |_, slot| {
            reduced |= protect_entry::<H>(ram, slot, prot);
            ControlFlow::Continue(())
        });
    });
    if !reduced {
        cpu.count(Counter::TlbFlushSkipped, 1);
        return Ticket::PASSED;
    }
    let pin = cpu.pin();
    mm.shoot_down(&mm.ram(&pin), range)
}

/// Returns true when the processor may hold a translation that allows more.
fn protect_entry<H: Host>(ram: &Ram<'_, H>, slot: &Slot, prot: Prot) -> bool {
    let mut raw = slot.load();
    loop {
        if raw == BUSY {
            raw = slot.wait_not_busy(ram);
            continue;
        }
        let Some((new, reduced)) = protected::<H>(raw, prot) else { return false };
        match slot.replace(raw, new) {
            Ok(()) => return reduced,
            Err(now) => raw = now,
        }
    }
}

/// The entry for `raw` under `prot`, if it differs, and whether it allows less.
fn protected<H: Host>(raw: Raw, prot: Prot) -> Option<(Raw, bool)> {
    let marks = PteFlags::ACCESSED.union(PteFlags::DIRTY);
    let (frame, before, hidden) = match Pte::decode::<H::Format>(raw) {
        Pte::Page { frame, flags } => (frame, flags, false),
        Pte::NoAccess { frame, flags } => (frame, flags, true),
        _ => return None,
    };
    if prot.is_empty() {
        let flags = before & marks;
        return (!hidden).then(|| (Pte::NoAccess { frame, flags }.encode::<H::Format>(), true));
    }
    let mut after = (before & marks) | PteFlags::READ;
    after.set(PteFlags::EXEC, prot.contains(Prot::EXEC));
    // Permission to store is never given here: the page may be shared.
    after.set(PteFlags::WRITE, before.contains(PteFlags::WRITE) && prot.contains(Prot::WRITE) && !hidden);
    let new = Pte::Page { frame, flags: after }.encode::<H::Format>();
    (new != raw).then(|| (new, !hidden && !after.contains(before & !marks)))
}
