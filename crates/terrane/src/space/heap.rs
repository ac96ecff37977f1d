//! The heap: `brk` (requirement E2).
//!
//! The break is kept in bytes, the VMA in pages. Growing moves the end of the heap's VMA, or makes it; shrinking moves
//! it back. Neither takes a reverse-mapping lock.

use super::change::Change;
use super::map::MapRequest;
use super::place::Fits;
use super::sweep::Sweep;
use super::{AddressSpace, Limit};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_ceil};
use crate::error::Error;
use crate::fault::user::events::Unmapping;
use crate::host::Host;
use crate::index::Entry;
use crate::machine::Cpu;
use crate::vma::{Prot, VmFlags};
use core::cmp;

/// What moving the break to `end` unmaps.
fn gone(heap: AddrRange, end: u64) -> AddrRange {
    match (page_ceil(end), page_ceil(heap.end)) {
        (Some(new), Some(old)) if new < old && end >= heap.start => AddrRange::new(new, old),
        _ => AddrRange::new(0, 0),
    }
}

impl<H: Host> AddressSpace<H> {
    /// Says where the heap begins (in bytes; the first page boundary at or above is where it is mapped), as a program loader
    /// does once, before the first [`brk`](Self::brk).
    ///
    /// # Errors
    /// [`Error::Invalid`] when `start` lies outside the space's range or a heap is mapped already.
    pub fn set_heap(&self, cpu: &Cpu<H>, start: u64) -> Result<(), Error> {
        let heap = &self.mm().heap;
        let _one_at_a_time = heap.lock();
        let inside = self.config().range.contains(start) && page_ceil(start).is_some();
        if !inside || !heap.range().is_empty() {
            return Err(Error::Invalid);
        }
        heap.set(AddrRange::new(start, start));
        cpu.tidy();
        Ok(())
    }

    /// Moves the program break to `end` (in bytes) if that can be, and returns the break that holds then: `end`, or the old
    /// one, as Linux's system call does. Before [`set_heap`](Self::set_heap) that is 0.
    pub fn brk(&self, cpu: &Cpu<H>, end: u64) -> u64 {
        let (moved, heap, told) = loop {
            // Handlers are told before anything is held, of what will be unmapped if the break stays where it is until then.
            let guess = gone(self.mm().heap.range(), end);
            let Ok(told) = Unmapping::announce(self.mm(), cpu, guess) else {
                return self.mm().heap.range().end;
            };
            let _lock = self.mm().heap.lock();
            let heap = self.mm().heap.range();
            if end < heap.start || heap.start == 0 {
                return heap.end;
            }
            if gone(heap, end) == guess {
                break (self.move_break(cpu, heap, end), heap, told);
            }
        };
        if moved.is_ok() {
            told.done(cpu);
        }
        if moved.is_ok() && end > heap.end && self.mm().future_flags().contains(VmFlags::LOCKED) {
            // As in Linux, the page of the old break is left as it is.
            let gained = AddrRange::new(page_ceil(heap.end).unwrap_or(end), page_ceil(end).unwrap_or(end));
            let _ = self.fill_locked(cpu, gained, true);
        }
        cpu.tidy();
        if moved.is_ok() { end } else { heap.end }
    }

    fn move_break(&self, cpu: &Cpu<H>, heap: AddrRange, end: u64) -> Result<(), Error> {
        let old = page_ceil(heap.end).ok_or(Error::NoMemory)?;
        let new = page_ceil(end).ok_or(Error::NoMemory)?;
        if new > self.config().range.end.max(old) {
            return Err(Error::NoMemory);
        }
        let moved = AddrRange::new(heap.start, end);
        match new.cmp(&old) {
            cmp::Ordering::Equal => self.mm().heap.set(moved),
            cmp::Ordering::Less => self.shrink(cpu, AddrRange::new(new, old), moved)?,
            cmp::Ordering::Greater => self.grow(cpu, AddrRange::new(old, new), moved)?,
        }
        Ok(())
    }

    fn grow(&self, cpu: &Cpu<H>, grown: AddrRange, heap: AddrRange) -> Result<(), Error> {
        let mut change = Change::begin(self.mm(), cpu, grown);
        if self.has_limits() {
            change.hold_limits();
        }
        let pin = cpu.pin();
        // What follows keeps its distance: a page, as in Linux, and the guard gap of a stack.
        let next = self.mm().index.first_ending_after(&pin, grown.start);
        let limit = next.map_or(u64::MAX, |vma| vma.start().saturating_sub(vma.guard_below()));
        if grown.end + PAGE_SIZE > limit {
            return Err(Error::NoMemory);
        }
        let future = self.mm().future_flags();
        let flags = (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC)
            .with_prot(Prot::READ | Prot::WRITE)
            | VmFlags::ACCOUNT
            | future;
        // As in Linux: the heap by itself, too.
        if self.limit(Limit::Data).is_some_and(|limit| heap.len() > limit) {
            return Err(Error::NoMemory);
        }
        self.check_limits(&change, &pin, grown, flags)?;
        self.check_memlock(future, grown.pages())?;
        self.check_commit(flags, grown.pages())?;
        change.plan(&pin, 1)?;
        let lock = self.config().rmap_lock_on_end_move;
        // As in Linux: the heap continues what it has, and not what lies below its start.
        let first = grown.start <= heap.start;
        let fits = first.then_some(Fits { up: false, down: false });
        change.insert_or_extend(pin, grown, flags, grown.start >> PAGE_SHIFT, None, lock, fits);
        self.mm().note_heap(cpu);
        self.mm().heap.set(heap);
        Ok(())
    }

    fn shrink(&self, cpu: &Cpu<H>, gone: AddrRange, heap: AddrRange) -> Result<(), Error> {
        let mut change = Change::begin(self.mm(), cpu, gone);
        if self.has_limits() {
            change.hold_limits();
        }
        // As in Linux: what is gone already cannot be given back.
        if change.is_free(&cpu.pin(), gone) {
            return Err(Error::NoMemory);
        }
        change.plan_splits()?;
        change.check_seals(gone)?;
        if change.cut_top(gone, self.config().rmap_lock_on_end_move) {
            self.mm().note_heap(cpu);
            self.mm().heap.set(heap);
            change.committed();
            change.cut_blocks();
            let mut sweep = Sweep::new(self.mm(), cpu);
            sweep.zap(gone, false);
            sweep.finish(gone, true);
            self.mm().relocations.forget(gone);
            return Ok(());
        }
        // Other things have been mapped into the heap, or all of it goes.
        let pin = cpu.pin();
        let removal = change.removal(&pin, gone);
        change.plan(&pin, removal.records)?;
        drop(pin);
        self.mm().note_heap(cpu);
        self.mm().heap.set(heap);
        change.remove(gone, true);
        Ok(())
    }

    /// Where the heap begins and the break is now, in bytes.
    pub fn heap(&self) -> AddrRange {
        self.mm().heap.range()
    }

    /// Bytes mapped.
    pub fn mapped_bytes(&self) -> u64 {
        (self.mm().mapped.sum() as u64) << PAGE_SHIFT
    }

    /// Maps `len` bytes of private memory anywhere, readable and writable: short for [`map`](Self::map).
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_anonymous(&self, cpu: &Cpu<H>, len: u64) -> Result<u64, Error> {
        self.map(cpu, MapRequest::anonymous(len, Prot::READ | Prot::WRITE))
    }
}
