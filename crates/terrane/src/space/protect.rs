//! Changing the protection of mappings.

use super::change::Change;
use super::{AddressSpace, page_range, sweep};
use crate::addr::AddrRange;
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::vma::{Prot, Snapshot, VmFlags, Vma};
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
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        if let Some(result) = self.protect_within(cpu, &mut change, range, prot) {
            drop(change);
            cpu.tidy();
            return result;
        }
        let plan = change.check_protect(range, prot)?;
        if !plan.changes {
            return Ok(());
        }
        if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + plan.splits > limit) {
            return Err(Error::NoMemory);
        }
        change.plan_splits()?;
        change.plan(&cpu.pin(), plan.splits)?;
        change.set_flags(range, |flags| flags.with_prot(prot));
        change.merge_around(range);
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
        Ok(())
    }
}

impl<H: Host> AddressSpace<H> {
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
        if self.has_limits() || mm.may_have_blocks() {
            return None;
        }
        let pin = cpu.pin();
        let (vma, seen) = mm.vma_at(&pin, range.start)?;
        let may = VmFlags::from_bits_retain(u64::from(prot.bits()) << 4);
        if !seen.range.covers(range) || !seen.flags.contains(may) || vma.object().is_some() {
            return None;
        }
        if seen.flags.prot() == prot {
            return Some(Ok(()));
        }
        let splits = usize::from(seen.range.start < range.start) + usize::from(seen.range.end > range.end);
        if splits > 0 && change.plan(&pin, splits).is_err() {
            return None;
        }
        let rest = change.set_flags_within(&pin, range, splits, seen.flags.with_prot(prot))?;
        let has_tables = change.has_tables(&pin, range);
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

struct Plan {
    changes: bool,
    of_object: bool,
    splits: usize,
}

impl<H: Host> Change<'_, H> {
    fn check_protect(&self, range: AddrRange, prot: Prot) -> Result<Plan, Error> {
        let (mut changes, mut of_object) = (false, false);
        let pin = self.cpu.pin();
        let mut result = self.check_covered(&pin, range, |vma, seen| {
            let flags = seen.flags;
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
        let at = |addr: u64| self.mm.vma_at(pin, addr).map_or(range, |(_, seen)| seen.range);
        usize::from(at(range.start).start < range.start) + usize::from(at(range.end - 1).end > range.end)
    }

    /// Checks that VMAs cover `range` without a hole, and each of them with `check`.
    pub(super) fn check_covered(
        &self,
        pin: &crate::sync::Pin<'_>,
        range: AddrRange,
        mut check: impl FnMut(&Vma<H>, Snapshot) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut reached = range.start;
        let mut result = Ok(());
        self.for_each(pin, range, |vma, seen| {
            if seen.range.start > reached {
                return ControlFlow::Break(());
            }
            reached = seen.range.end;
            result = check(vma, seen);
            if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        result?;
        if reached < range.end { Err(Error::NoMemory) } else { Ok(()) }
    }
}
