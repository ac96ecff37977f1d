//! Changing the protection of mappings.

use super::change::Change;
use super::{AddressSpace, page_range};
use crate::addr::AddrRange;
use crate::error::Error;
use crate::frame::Ram;
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::page_table::{BUSY, Pte, PteFlags, Raw, Slot};
use crate::sync::atomic::Ordering;
use crate::vma::{Prot, VmFlags, Vma};
use core::ops::ControlFlow;

impl<H: Host> AddressSpace<H> {
    /// Changes what is allowed in `len` bytes (rounded up to pages) at `addr`. VMAs are divided and merged as needed. A
    /// length of 0 does nothing. O(log n) and the pages that are present, where something is taken away.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address; [`Error::NoMemory`] when part of the range is not mapped, or a VMA
    /// must be divided and there is no memory or room in the limits for that; [`Error::Access`] for stores to a shared mapping of a file that
    /// cannot be written. Unlike in Linux nothing has changed then, not even in the part before a hole.
    pub fn protect(&self, cpu: &Cpu<H>, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        let range = page_range(addr, len).map_err(|error| {
            // As in Linux: the alignment is looked at first, a wrapping length later.
            if crate::addr::is_page_aligned(addr) { Error::NoMemory } else { error }
        })?;
        if range.is_empty() {
            return Ok(());
        }
        let mut change = Change::begin(self.mm(), cpu);
        let plan = change.check_protect(range, prot)?;
        if !plan.changes {
            return Ok(());
        }
        let splits = plan.splits;
        if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
            return Err(Error::NoMemory);
        }
        change.plan(&cpu.pin(), splits)?;
        change.split(range.start);
        change.split(range.end);
        change.set_flags(range, |flags| flags.with_prot(prot));
        if plan.of_object {
            self.mm().ending.fetch_add(1, Ordering::SeqCst);
        }
        let ticket = change.apply_protection(range, prot);
        change.merge_around(range);
        // Stores under way through old translations end before the caller may rely on the protection, and before a fork,
        // which would take pages that look read-only for pages that stand still.
        cpu.await_stores(ticket);
        if plan.of_object {
            self.mm().ending.fetch_sub(1, Ordering::SeqCst);
        }
        drop(change);
        cpu.tidy();
        Ok(())
    }
}

struct Plan {
    changes: bool,
    of_object: bool,
    splits: usize,
}

impl<H: Host> Change<'_, H> {
    fn check_protect(&self, range: AddrRange, prot: Prot) -> Result<Plan, Error> {
        let (mut changes, mut of_object) = (false, false);
        let pin = self.cpu.pin();
        let mut result = self.check_covered(&pin, range, |vma| {
            let flags = vma.flags();
            let may = (flags.bits() >> 4) & u64::from(Prot::all().bits());
            if u64::from(prot.bits()) & !may != 0 {
                return Err(Error::Access);
            }
            changes |= flags.prot() != prot;
            of_object |= vma.object().is_some();
            Ok(())
        });
        if range.end > self.mm.index.limits().end {
            result = Err(Error::NoMemory);
        }
        result.map(|()| Plan { changes, of_object, splits: self.splits(&pin, range) })
    }

    /// VMAs that reach over a boundary of `range`.
    pub(super) fn splits(&self, pin: &crate::sync::Pin<'_>, range: AddrRange) -> usize {
        let reaches_over =
            |at: u64| usize::from(self.mm.index.find(pin, at).is_some_and(|vma: &Vma<H>| vma.start() < at));
        reaches_over(range.start) + reaches_over(range.end)
    }

    /// Checks that VMAs cover `range` without a hole, and each of them with `check`.
    pub(super) fn check_covered(
        &self,
        pin: &crate::sync::Pin<'_>,
        range: AddrRange,
        mut check: impl FnMut(&Vma<H>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut reached = range.start;
        let mut result = Ok(());
        self.for_each(pin, range, |vma| {
            if vma.start() > reached {
                return ControlFlow::Break(());
            }
            reached = vma.end();
            result = check(vma);
            if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        result?;
        if reached < range.end { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// Changes the attributes of the VMAs in `range`, which none reaches over.
    pub(super) fn set_flags(&mut self, range: AddrRange, new: impl Fn(VmFlags) -> VmFlags) {
        let pin = self.cpu.pin();
        self.for_each(&pin, range, |vma| {
            let (before, after) = (vma.flags(), new(vma.flags()));
            if before != after {
                vma.change(|vma| vma.set_flags(after));
            }
            ControlFlow::Continue(())
        });
    }

    /// Merges VMAs in and beside `range` that have become one mapping.
    pub(super) fn merge_around(&mut self, range: AddrRange) {
        // From above, so that each boundary is still there when it is looked at. Boundaries inside: only where several
        // VMAs lay in the range.
        self.merge_at(range.end);
        let mut at = range.end;
        loop {
            let below = {
                let pin = self.cpu.pin();
                self.mm.index.last_starting_before(&pin, at).map(Vma::start)
            };
            match below {
                Some(start) if start > range.start => {
                    self.merge_at(start);
                    at = start;
                }
                _ => break,
            }
        }
        self.merge_at(range.start);
    }

    /// Makes the page table allow no more than `prot` in `range`, and as much for pages that were hidden. Entries that
    /// allow less than `prot` stay: the next fault raises them, page by page, where sharing lets it. Returns the ticket of
    /// the shoot-down.
    fn apply_protection(&self, range: AddrRange, prot: Prot) -> Ticket {
        let mut reduced = false;
        self.mm.for_each_part(self.cpu, range, |ram, part| {
            self.mm.page_table.for_each_slot(ram, part, |_, slot| {
                reduced |= protect_entry::<H>(ram, slot, prot);
                ControlFlow::Continue(())
            });
        });
        if !reduced {
            return Ticket::PASSED;
        }
        let pin = self.cpu.pin();
        self.mm.shoot_down(&self.mm.ram(&pin), range)
    }
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
