//! The heap: `brk` (requirement E2).
//!
//! The break is kept in bytes, the VMA in pages. Growing moves the end of the heap's VMA, or makes it; shrinking moves
//! it back. Neither takes a reverse-mapping lock. Where nothing was ever touched both are over in one step, as
//! [`at_once`](super::at_once) tells, and hold no range: growing beside free addresses, shrinking to the start of the heap's last VMA or above.

use super::change::Change;
use super::map::MapRequest;
use super::place::Fits;
use super::sweep::Sweep;
use super::{AddressSpace, Limit};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_ceil};
use crate::error::Error;
use crate::fault::user::events::Unmapping;
use crate::host::Host;
use crate::index::{Entry, Reserve};
use crate::machine::Cpu;
use crate::mm::Locking;
use crate::stats::Counter;
use crate::vma::{Prot, VmFlags, merge};
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
            cmp::Ordering::Less => {
                let gone = AddrRange::new(new, old);
                if !self.shrink_at_once(cpu, gone, moved) {
                    self.shrink(cpu, gone, moved)?;
                }
            }
            cmp::Ordering::Greater => {
                let grown = AddrRange::new(old, new);
                if !self.grow_at_once(cpu, grown, moved) {
                    self.grow(cpu, grown, moved)?;
                }
            }
        }
        Ok(())
    }

    /// The attributes of the heap.
    fn heap_flags(&self) -> VmFlags {
        (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC).with_prot(Prot::READ | Prot::WRITE)
            | VmFlags::ACCOUNT
            | self.mm().future_flags()
    }

    /// True when the heap may move in one step, as far as the space tells.
    fn may_move_at_once(&self) -> bool {
        let config = self.config();
        config.locking == Locking::Speculative && !config.rmap_lock_on_end_move && !self.has_limits()
    }

    /// The same as far as others tell, under the lock of the leaf: a listing would have to be told of the heap and of its record.
    #[inline]
    fn may_move_untold(&self, cpu: &Cpu<H>, range: AddrRange) -> bool {
        self.mm().history.active() == 0 && self.mm().may_step(cpu, range)
    }

    /// The short way of [`grow`](Self::grow): the heap's VMA ends where it did, and nothing is near. False, and nothing done, when it is
    /// not as simple as that. Under the lock of the heap.
    #[inline]
    fn grow_at_once(&self, cpu: &Cpu<H>, grown: AddrRange, heap: AddrRange) -> bool {
        let (mm, flags, pages) = (self.mm(), self.heap_flags(), grown.pages());
        let is_simple = self.may_move_at_once()
            // As in Linux: the heap continues what it has, and not what lies below its start.
            && heap.start < grown.start
            && !flags.contains(VmFlags::LOCKED)
            && self.check_commit(flags, pages).is_ok();
        if !is_simple {
            return false;
        }
        let pin = cpu.pin();
        let candidate = merge::Candidate { flags, object: None, pgoff: grown.start >> PAGE_SHIFT, pages };
        // What follows keeps its distance of a page, as in Linux.
        let is_done = mm.index.extend_up_at_once(&pin, grown.start, grown.end, PAGE_SIZE, |low| {
            if !candidate.extends_up(low) || low.seq.is_changing() {
                return false;
            }
            low.change(|low| {
                let may = self.may_move_untold(cpu, grown);
                if may {
                    low.set_end(grown.end);
                }
                may
            })
        });
        if is_done {
            mm.account(cpu.id(), flags, pages as i64);
            mm.mapped.add(cpu.id(), pages as i64);
            // Before the pin ends: who lists afterwards reads it.
            mm.heap.set(heap);
        }
        is_done
    }

    /// The short way of [`shrink`](Self::shrink): cuts untouched memory off the heap's VMA. False, and nothing done, when it is not as
    /// simple as that. Under the lock of the heap.
    #[inline]
    fn shrink_at_once(&self, cpu: &Cpu<H>, gone: AddrRange, heap: AddrRange) -> bool {
        let (mm, pages) = (self.mm(), gone.pages());
        let is_simple = self.may_move_at_once()
            && !mm.may_have_blocks()
            && !mm.may_be_sealed()
            && mm.relocations.is_empty();
        if !is_simple {
            return false;
        }
        let pin = cpu.pin();
        if mm.has_tables(&pin, gone) || !self.may_move_untold(cpu, gone) {
            return false;
        }
        // Nothing is divided or taken out, which would take nodes.
        let cut = mm.index.edit(&mut Reserve::new(), &pin, gone.start, 0, |vma, edit| {
            let all = edit.range();
            let fits = all.end == gone.end && all.start < gone.start && vma.object().is_none();
            if !fits || vma.seq.is_changing() {
                return None;
            }
            let flags = vma.flags();
            vma.change(|vma| {
                let untouched = mutant!("break_ignores_tables", !mm.has_tables(&pin, gone), true);
                let may = self.may_move_untold(cpu, gone) && untouched && !mm.may_be_sealed();
                if may {
                    vma.set_end(gone.start);
                    edit.set_end(gone.start);
                }
                may.then_some(flags)
            })
        });
        let Some(Some(flags)) = cut else { return false };
        mm.count_unmapped(cpu.id(), pages);
        mm.account(cpu.id(), flags, -(pages as i64));
        cpu.count(Counter::TlbFlushSkipped, 1);
        mm.heap.set(heap);
        true
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
        let (future, flags) = (self.mm().future_flags(), self.heap_flags());
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
