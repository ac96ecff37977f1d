//! The heap: `brk` (requirement E2).
//!
//! The break is kept in bytes, the VMA in pages. Growing moves the end of the heap's VMA, or makes it; shrinking moves
//! it back. Neither takes a reverse-mapping lock.

use super::AddressSpace;
use super::change::Change;
use super::map::MapRequest;
use super::sweep::Sweep;
use crate::addr::{AddrRange, PAGE_SHIFT, page_ceil};
use crate::error::Error;
use crate::host::Host;
use crate::index::Entry;
use crate::machine::Cpu;
use crate::vma::{Prot, VmFlags};

impl<H: Host> AddressSpace<H> {
    /// Says where the heap begins (in bytes; the first page boundary at or above is where it is mapped), as a program loader
    /// does once, before the first [`brk`](Self::brk).
    ///
    /// # Errors
    /// [`Error::Invalid`] when `start` lies outside the space's range or a heap is mapped already.
    pub fn set_heap(&self, cpu: &Cpu<H>, start: u64) -> Result<(), Error> {
        let mut change = Change::begin(self.mm(), cpu);
        let inside = self.config().range.contains(start) && page_ceil(start).is_some();
        if !inside || !change.layout.heap.is_empty() {
            return Err(Error::Invalid);
        }
        change.layout.heap = AddrRange::new(start, start);
        Ok(())
    }

    /// Moves the program break to `end` (in bytes) if that can be, and returns the break that holds then: `end`, or the old
    /// one, as Linux's system call does. Before [`set_heap`](Self::set_heap) that is 0.
    pub fn brk(&self, cpu: &Cpu<H>, end: u64) -> u64 {
        let mut change = Change::begin(self.mm(), cpu);
        let heap = change.layout.heap;
        if end < heap.start || heap.start == 0 {
            return heap.end;
        }
        match self.move_break(&mut change, heap, end) {
            Ok(()) => {
                change.layout.heap = AddrRange::new(heap.start, end);
                drop(change);
                cpu.tidy();
                end
            }
            Err(_) => heap.end,
        }
    }

    fn move_break(&self, change: &mut Change<'_, H>, heap: AddrRange, end: u64) -> Result<(), Error> {
        let old = page_ceil(heap.end).ok_or(Error::NoMemory)?;
        let new = page_ceil(end).ok_or(Error::NoMemory)?;
        if new == old {
            return Ok(());
        }
        let lock = self.config().rmap_lock_on_end_move;
        if new < old {
            return self.shrink(change, AddrRange::new(new, old), lock);
        }
        let grown = AddrRange::new(old, new);
        if new > self.config().range.end {
            return Err(Error::NoMemory);
        }
        let pin = change.cpu.pin();
        // What follows keeps its distance: the guard gap of a stack.
        let next = self.mm().index.first_ending_after(&pin, old);
        if next.is_some_and(|vma| vma.start().saturating_sub(vma.guard_below()) < new) {
            return Err(Error::NoMemory);
        }
        self.check_limits(change, &pin, grown)?;
        change.plan(&pin, 1)?;
        let flags =
            (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC).with_prot(Prot::READ | Prot::WRITE);
        change.insert_or_extend(pin, grown, flags, old >> PAGE_SHIFT, None, lock);
        Ok(())
    }

    fn shrink(&self, change: &mut Change<'_, H>, gone: AddrRange, lock: bool) -> Result<(), Error> {
        let last = {
            let pin = change.cpu.pin();
            let vma = self.mm().index.find(&pin, gone.start);
            vma.filter(|vma| vma.end() == gone.end && vma.start() < gone.start && vma.object().is_none())
                .map(|vma| vma.start())
        };
        let Some(start) = last else {
            // Other things have been mapped into the heap, or all of it goes.
            let pin = change.cpu.pin();
            let affected = change.look_at(&pin, gone);
            change.plan(&pin, affected.records())?;
            drop(pin);
            change.remove(gone, &affected);
            return Ok(());
        };
        change.move_end(start, gone.start, lock);
        let mut sweep = Sweep::new(self.mm(), change.cpu);
        sweep.zap(gone, false);
        sweep.finish(gone, true);
        Ok(())
    }

    /// Where the heap begins and the break is now, in bytes.
    pub fn heap(&self) -> AddrRange {
        self.mm().layout.read().heap
    }

    /// Bytes mapped.
    pub fn mapped_bytes(&self) -> u64 {
        self.mm().layout.read().total_pages << PAGE_SHIFT
    }

    /// Maps `len` bytes of private memory anywhere, readable and writable: short for [`map`](Self::map).
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_anonymous(&self, cpu: &Cpu<H>, len: u64) -> Result<u64, Error> {
        self.map(cpu, MapRequest::anonymous(len, Prot::READ | Prot::WRITE))
    }
}
