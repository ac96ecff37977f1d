//! Changing the protection of mappings.

use super::accounts::{Growth, protected};
use super::change::Change;
use super::{AddressSpace, page_range, sweep};
use crate::addr::AddrRange;
use crate::error::Error;
use crate::fault;
use crate::host::Host;
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{Prot, Snapshot, VmFlags, Vma};
use alloc::vec::Vec;
use core::ops::ControlFlow;

impl<H: Host> AddressSpace<H> {
    /// Changes what is allowed in `len` bytes (rounded up to pages) at `addr`. VMAs are divided and merged as needed. A
    /// length of 0 does nothing. O(log n) and the pages that are present, where something is taken away.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address; [`Error::NoMemory`] when part of the range is not mapped, or a VMA
    /// must be divided and there is no memory or room in the limits for that; [`Error::Access`] for stores to a shared mapping of a file that
    /// cannot be written; [`Error::NotPermitted`] for a sealed mapping. As in Linux, what lies before a hole, or before a mapping that
    /// does not allow it, is changed nevertheless.
    pub fn protect(&self, cpu: &Cpu<H>, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        let range = page_range(addr, len).map_err(|error| {
            // As in Linux: the alignment is looked at first, a wrapping length later.
            if crate::addr::is_page_aligned(addr) { Error::NoMemory } else { error }
        })?;
        if range.is_empty() {
            return Ok(());
        }
        if self.protect_at_once(cpu, range, prot) {
            return Ok(());
        }
        let change = Change::begin(self.mm(), cpu, range);
        self.protect_held(cpu, change, range, prot)
    }

    /// [`protect`](Self::protect) of a part of what `change` holds.
    fn protect_held(
        &self,
        cpu: &Cpu<H>,
        mut change: Change<'_, H>,
        range: AddrRange,
        prot: Prot,
    ) -> Result<(), Error> {
        if self.has_limits() {
            change.hold_limits();
        }
        if let Some(result) = self.protect_within(cpu, &mut change, range, prot) {
            drop(change);
            cpu.tidy();
            return result;
        }
        let plan = change.check_protect(range, prot);
        if !plan.changes {
            return plan.result;
        }
        // What lies before an obstacle.
        let range = plan.range;
        change.narrow(range);
        plan.growth.check(self)?;
        if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + plan.splits > limit) {
            return Err(Error::NoMemory);
        }
        let fills = change.parts_to_fill(range, prot, plan.fills)?;
        change.plan_splits()?;
        change.plan(&cpu.pin(), plan.splits)?;
        self.alter_protection(&mut change, range, prot);
        change.committed();
        if plan.of_object {
            self.mm().ending.fetch_add(1, Ordering::SeqCst);
        }
        change.cut_blocks();
        let ticket = sweep::apply_protection(self.mm(), cpu, range, prot);
        // Stores under way through old translations end before the caller may rely on the protection, and before a fork,
        // which would take pages that look read-only for pages that stand still.
        cpu.await_stores(ticket);
        if plan.of_object {
            self.mm().ending.fetch_sub(1, Ordering::SeqCst);
        }
        drop(change);
        cpu.tidy();
        for part in fills {
            let _ = self.fill_locked(cpu, part, true);
        }
        plan.result
    }

    /// One VMA after the other. As in Linux, locked private memory that becomes writable is copied at once, before the next VMA is looked at: that
    /// decides what merges. Here it gets its anon_vma in that order, and its pages when the call lets the range go.
    fn alter_protection(&self, change: &mut Change<'_, H>, range: AddrRange, prot: Prot) {
        let mut at = range.start;
        while at < range.end {
            let rest = AddrRange::new(at, range.end);
            let Some(altered) = change.alter_next(rest, |vma, flags| protected(vma, flags, prot)) else {
                break;
            };
            if is_filled(altered.old, prot) {
                // Without memory for it there will be none for the pages either.
                let _ = fault::prepare_to_fill(self.mm(), change.cpu, altered.part.start);
            }
            at = altered.part.end;
        }
    }

    /// [`protect`](Self::protect) with `PROT_GROWSDOWN`: from the beginning of the stack that `addr` lies in, or that is the first
    /// above it.
    ///
    /// # Errors
    /// As [`protect`](Self::protect); [`Error::Invalid`] when it is no mapping that grows downwards.
    pub fn protect_down(&self, cpu: &Cpu<H>, addr: u64, len: u64, prot: Prot) -> Result<(), Error> {
        let range = page_range(addr, len)
            .map_err(|error| if crate::addr::is_page_aligned(addr) { Error::NoMemory } else { error })?;
        if range.is_empty() {
            return Ok(());
        }
        loop {
            let found = {
                let pin = cpu.pin();
                self.mm().index.first_ending_after(&pin, addr).and_then(Vma::read)
            };
            let start = found.map_or(addr, |seen| seen.range.start.min(addr));
            let change = Change::begin(self.mm(), cpu, AddrRange::new(start, range.end));
            let seen = {
                let pin = cpu.pin();
                self.mm().next_vma(&pin, addr, range.end).map(|(_, seen)| seen)
            };
            let seen = seen.ok_or(Error::NoMemory)?;
            if !seen.flags.contains(VmFlags::GROWSDOWN) {
                return Err(Error::Invalid);
            }
            // It may have grown, or been divided, before it was held.
            if seen.range.start >= start {
                let range = AddrRange::new(seen.range.start, range.end);
                return self.protect_held(cpu, change, range, prot);
            }
        }
    }
}

/// What the protection of a part of one VMA comes to.
pub(super) struct Within {
    /// The attributes that the part gets.
    pub(super) flags: VmFlags,
    /// Ends of the VMA that lie beyond the part.
    pub(super) splits: usize,
}

impl<H: Host> AddressSpace<H> {
    /// Whether protecting `range` comes to changing attributes within `vma`, which says `seen`, and nothing else: memory, of which nothing
    /// has to be checked but what it says itself.
    #[inline]
    pub(super) fn look_within(
        &self,
        vma: &Vma<H>,
        seen: &Snapshot,
        range: AddrRange,
        prot: Prot,
    ) -> Option<Within> {
        let mm = self.mm();
        let may = VmFlags::from_bits_retain(u64::from(prot.bits()) << 4);
        let flags = protected(vma, seen.flags, prot);
        let is_accounted_anew = flags.contains(VmFlags::ACCOUNT) && !seen.flags.contains(VmFlags::ACCOUNT);
        let is_simple = seen.range.covers(range)
            && seen.flags.contains(may)
            && vma.object().is_none()
            && !seen.flags.intersects(VmFlags::SEALED.union(VmFlags::LOCKED))
            && !(is_accounted_anew && mm.machine.commit().is_strict())
            && !mm.may_have_blocks()
            && !self.has_limits();
        let splits = usize::from(seen.range.start < range.start) + usize::from(seen.range.end > range.end);
        is_simple.then_some(Within { flags, splits })
    }

    /// The short way of `protect`, which as a rule is all of it: a range within one VMA of memory. One pin, and one step for
    /// all that becomes of the VMA and those beside it. `None`, and nothing done, when it is not as simple as that.
    #[inline]
    fn protect_within(
        &self,
        cpu: &Cpu<H>,
        change: &mut Change<'_, H>,
        range: AddrRange,
        prot: Prot,
    ) -> Option<Result<(), Error>> {
        let mm = self.mm();
        let pin = cpu.pin();
        let (vma, seen) = mm.vma_at(&pin, range.start)?;
        let Within { flags, splits } = self.look_within(vma, &seen, range, prot)?;
        if seen.flags.prot() == prot {
            return Some(Ok(()));
        }
        if splits > 0 && change.plan(&pin, splits).is_err() {
            return None;
        }
        let rest = change.set_flags_within(&pin, range, splits, flags)?;
        mm.recount(cpu.id(), seen.flags, flags, range.pages() as i64);
        let has_tables = mm.has_tables(&pin, range);
        drop(pin);
        change.finish_within(range, rest);
        change.committed();
        if has_tables {
            cpu.await_stores(sweep::apply_protection(mm, cpu, range, prot));
        } else {
            cpu.count(Counter::TlbFlushSkipped, 1);
        }
        Some(Ok(()))
    }
}

/// Whether a mapping with the attributes `old` is filled in when `prot` is to hold.
fn is_filled(old: VmFlags, prot: Prot) -> bool {
    let locked = VmFlags::WRITE | VmFlags::SHARED | VmFlags::LOCKED_MASK;
    old & locked == VmFlags::LOCKED && prot.contains(Prot::WRITE)
}

struct Plan {
    /// Up to the first obstacle.
    range: AddrRange,
    /// What that is.
    result: Result<(), Error>,
    changes: bool,
    of_object: bool,
    /// Parts that are to be filled in: locked private memory becomes writable, and as in Linux is copied at once.
    fills: usize,
    splits: usize,
    growth: Growth,
}

impl<H: Host> Change<'_, H> {
    fn check_protect(&self, range: AddrRange, prot: Prot) -> Plan {
        let (mut changes, mut of_object, mut growth) = (false, false, Growth::default());
        let mut fills = 0;
        let mut reached = range.start;
        let pin = self.cpu.pin();
        let mut result = Err(Error::NoMemory);
        self.for_each(&pin, range, |vma, seen| {
            let flags = seen.flags;
            let may = (flags.bits() >> 4) & u64::from(Prot::all().bits());
            if seen.range.start > reached {
                return ControlFlow::Break(());
            }
            if u64::from(prot.bits()) & !may != 0 {
                result = Err(Error::Access);
                return ControlFlow::Break(());
            }
            if flags.contains(VmFlags::SEALED) {
                result = Err(Error::NotPermitted);
                return ControlFlow::Break(());
            }
            changes |= flags.prot() != prot;
            growth.add(flags, protected(vma, flags, prot), seen.range.intersection(range));
            of_object |= vma.object().is_some();
            fills += usize::from(is_filled(flags, prot));
            reached = seen.range.end.min(range.end);
            ControlFlow::Continue(())
        });
        if reached == range.end {
            result = Ok(());
        }
        let range = AddrRange::new(range.start, reached);
        let splits = if range.is_empty() { 0 } else { self.splits(&pin, range) };
        Plan { range, result, changes, of_object, fills, splits, growth }
    }

    /// The parts of `range` that are to be filled in once `prot` holds: `count` at most, which the plan has counted. Allocates,
    /// so not under a pin.
    fn parts_to_fill(&self, range: AddrRange, prot: Prot, count: usize) -> Result<Vec<AddrRange>, Error> {
        let mut parts = Vec::new();
        parts.try_reserve_exact(count).map_err(|_| Error::NoMemory)?;
        if count > 0 {
            self.for_each(&self.cpu.pin(), range, |_, seen| {
                if is_filled(seen.flags, prot) && parts.len() < count {
                    parts.push(seen.range.intersection(range));
                }
                ControlFlow::Continue(())
            });
        }
        Ok(parts)
    }

    /// VMAs that reach over a boundary of `range`.
    pub(super) fn splits(&self, pin: &crate::sync::Pin<'_>, range: AddrRange) -> usize {
        let at = |addr: u64| self.mm.vma_at(pin, addr).map_or(range, |(_, seen)| seen.range);
        usize::from(at(range.start).start < range.start) + usize::from(at(range.end - 1).end > range.end)
    }
}
