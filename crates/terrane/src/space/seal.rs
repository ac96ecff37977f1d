//! Sealing mappings, and beginning anew: `mseal`, and what `exec` does to a space.
//!
//! A sealed mapping stays where it is and as it is until its space ends or begins anew: it is not unmapped, nor replaced by a fixed mapping,
//! nor moved, resized, or given another protection. Faults and stores go on. As in Linux nothing undoes it.
//!
//! Nor is memory that may not be stored to emptied by advice ([`refuses_advice`]).
//!
//! Calls that take mappings away look at every mapping in their range before they begin, but only in a space that has sealed
//! something: the mark ([`Mm::may_be_sealed`]) is raised by a call that holds the range it is about, so a call that holds an address of it later
//! sees the mark.

use super::AddressSpace;
use super::change::Change;
use crate::addr::{AddrRange, PAGE_SIZE, is_page_aligned};
use crate::error::Error;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::sync::atomic::Ordering;
use crate::vma::{Advice, VmFlags};
use core::ops::ControlFlow;

/// True when a mapping with these attributes, of an object or not, is sealed against `advice`: memory that may not be stored to keeps its content.
#[inline]
pub(super) fn refuses_advice(flags: VmFlags, of_object: bool, advice: Advice) -> bool {
    flags & (VmFlags::SEALED | VmFlags::WRITE) == VmFlags::SEALED && !of_object && discards(advice)
}

/// True for advice after which a page may read as zeros, in this process or a child.
fn discards(advice: Advice) -> bool {
    matches!(
        advice,
        Advice::Free
            | Advice::DontNeed
            | Advice::DontNeedLocked
            | Advice::Remove
            | Advice::DontFork
            | Advice::WipeOnFork
            | Advice::GuardInstall
    )
}

impl<H: Host> Mm<H> {
    /// False when nothing in the space is sealed.
    #[inline]
    pub(crate) fn may_be_sealed(&self) -> bool {
        self.sealed.load(Ordering::Relaxed)
    }

    /// Says that something may be. Before it is.
    pub(crate) fn expect_seals(&self) {
        if !self.may_be_sealed() {
            self.sealed.store(true, Ordering::Relaxed);
        }
    }
}

impl<H: Host> Change<'_, H> {
    /// Whether all of `range`, which is the change's, may be unmapped. Not while pinned. As in Linux, a refused call has divided the mapping in which
    /// the range begins, unless that one is sealed.
    ///
    /// # Errors
    /// [`Error::NotPermitted`] when a part of it is sealed.
    #[inline]
    pub(super) fn check_seals(&mut self, range: AddrRange) -> Result<(), Error> {
        if self.mm.may_be_sealed() && !range.is_empty() { self.look_for_seals(range) } else { Ok(()) }
    }

    #[cold]
    fn look_for_seals(&mut self, range: AddrRange) -> Result<(), Error> {
        let (mut first, mut sealed) = (true, false);
        {
            let pin = self.cpu.pin();
            self.for_each(&pin, range, |_, seen| {
                sealed = seen.flags.contains(VmFlags::SEALED);
                if sealed {
                    return ControlFlow::Break(());
                }
                first = false;
                ControlFlow::Continue(())
            });
        }
        if !sealed {
            return Ok(());
        }
        if !first {
            self.plan(&self.cpu.pin(), 1)?;
            self.divide_at(range.start);
        }
        Err(Error::NotPermitted)
    }
}

impl<H: Host> AddressSpace<H> {
    /// Seals the mappings of `len` bytes (rounded up to pages) at `addr`: see the calls that give [`Error::NotPermitted`] for them.
    /// O(log n) and the mappings in the range.
    ///
    /// # Errors
    /// [`Error::Invalid`] for flags (there are none), an unaligned address, or a range that wraps; [`Error::NoMemory`] when a part of the
    /// range is not mapped, or a VMA must be divided and there is no memory for that. Nothing has changed then.
    pub fn mseal(&self, cpu: &Cpu<H>, addr: u64, len: u64, flags: u64) -> Result<(), Error> {
        let rounded = len.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1);
        if flags != 0 || !is_page_aligned(addr) || len != 0 && rounded == 0 {
            return Err(Error::Invalid);
        }
        let end = addr.checked_add(rounded).ok_or(Error::Invalid)?;
        if end == addr {
            return Ok(());
        }
        let range = AddrRange::new(addr, end);
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        let splits = {
            let pin = cpu.pin();
            let mut reached = range.start;
            change.for_each(&pin, range, |_, seen| {
                if seen.range.start > reached {
                    return ControlFlow::Break(());
                }
                reached = seen.range.end;
                ControlFlow::Continue(())
            });
            if reached < range.end {
                return Err(Error::NoMemory);
            }
            change.splits(&pin, range)
        };
        if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
            return Err(Error::NoMemory);
        }
        change.plan_splits()?;
        change.plan(&cpu.pin(), splits)?;
        self.mm().expect_seals();
        change.alter(range, |_, flags| flags | VmFlags::SEALED);
        change.committed();
        change.cut_blocks();
        drop(change);
        cpu.tidy();
        Ok(())
    }

    /// Begins anew, as `exec` does: everything is unmapped, sealed mappings included, there is no heap any more, and what is mapped
    /// from now on is not locked by an earlier `mlockall`. Limits stay. Cannot fail. Other threads that use the space find nothing
    /// mapped; a listing shows all that was there, or nothing. O(what is mapped).
    pub fn exec(&self, cpu: &Cpu<H>) {
        let mm = self.mm();
        let heap = mm.heap.lock();
        let all = self.config().range;
        let mut change = Change::begin(mm, cpu, all);
        if self.has_limits() {
            change.hold_limits();
        }
        // Whole VMAs: nothing needs to be divided or reserved.
        change.remove(all, true);
        mm.note_heap(cpu);
        mm.heap.set(AddrRange::new(0, 0));
        mm.future.store(0, Ordering::Relaxed);
        mm.sealed.store(false, Ordering::Relaxed);
        drop(change);
        drop(heap);
        cpu.tidy();
    }
}
