//! Pages of an object on their way out, and back from swap (the protocol is in the head of [`object`](super)).

use super::cache::Place;
use super::{Object, Source};
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::frame::{FrameFlags, FrameList, FrameMeta, Grace, Ram};
use crate::host::{File, Host, IoError, Ticket};
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::atomic::{Ordering, fence};
use crate::sync::{Pin, Shared};
use core::ops::Range;
use core::slice;

impl<H: Host> Object<H> {
    /// The object of which `frame` is a page, and the number of the page, for who knows the frame by its number alone. `None` when it is
    /// none, is being read or written, or the object is at its end.
    pub(crate) fn of_page(cpu: &Cpu<H>, frame: Frame) -> Option<(Shared<Self>, u64)> {
        let pin = cpu.pin();
        let meta = cpu.machine().ram(&pin).meta(frame);
        let flags = meta.flags();
        let free = flags.contains(FrameFlags::CACHE | FrameFlags::UPTODATE)
            && !flags.intersects(FrameFlags::HELD | FrameFlags::LOCKED);
        if !free || !meta.replace_flags(flags, flags | FrameFlags::HELD) {
            return None;
        }
        linger!("dismissed_while_held");
        // SAFETY: a page of an object has its address, which was exposed; and the object stays while one of its pages is
        // held: its end takes them all out.
        let object = unsafe { Shared::try_own(meta.owner().cast_const().cast::<Self>()) };
        let index = meta.index();
        meta.clear_flags(FrameFlags::HELD);
        object.map(|object| (object, index))
    }

    /// Calls `visit` for each of `pages` that is in swap, ascending. Not while pinned.
    pub(crate) fn for_each_swapped(
        &self,
        cpu: &Cpu<H>,
        pages: Range<u64>,
        mut visit: impl FnMut(&Ram<'_, H>, u64),
    ) {
        let mut next = (!self.is_file()).then_some(pages.start);
        while let Some(first) = next.take() {
            let pin = cpu.pin();
            let ram = self.machine().ram(&pin);
            let mut seen = 0;
            self.pages.for_each_until(first, |index, slot| {
                if index >= pages.end {
                    return false;
                }
                if seen == 256 {
                    // In pieces: a pin is short.
                    next = Some(index);
                    return false;
                }
                seen += 1;
                if matches!(slot.place(), Place::Swap(_)) {
                    visit(&ram, index);
                }
                true
            });
        }
    }

    /// Takes page `index`, if it is `frame`, out of use: faults wait for it from now on. Under the object's lock for write-back.
    pub(crate) fn begin_leaving(&self, pin: &Pin<'_>, index: u64, frame: Frame) -> bool {
        let meta = self.machine().ram(pin).meta(frame);
        loop {
            // The lock keeps it there.
            if self.pages.get(pin, index) != Some(frame) {
                return false;
            }
            let flags = meta.flags();
            if !flags.contains(FrameFlags::CACHE | FrameFlags::UPTODATE)
                || flags.intersects(FrameFlags::LOCKED | FrameFlags::WRITEBACK | FrameFlags::UNEVICTABLE)
            {
                return false;
            }
            let out = (flags | FrameFlags::LOCKED) - FrameFlags::UPTODATE;
            if meta.replace_flags(flags, out) {
                // Dekker's pattern with `still_holds`: flags written, fence, entries read; entry taken, flags read.
                mutant!("leave_without_fence", fence(Ordering::SeqCst), ());
                return true;
            }
        }
    }

    /// Gives the page of [`begin_leaving`](Self::begin_leaving) back as it was.
    pub(crate) fn stay(&self, frame: Frame) {
        end(self, self.machine().frames().meta(frame), |flags| {
            (flags | FrameFlags::UPTODATE) - FrameFlags::LOCKED - FrameFlags::WAITERS
        });
    }

    /// Writes what must be written of the page of [`begin_leaving`](Self::begin_leaving), which nothing maps any more, takes it out of
    /// the object and gives its frame up; else it stays. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NoMemory`] without a place in swap: the page stays, a dirty one dirty.
    pub(crate) fn finish_leaving(&self, cpu: &Cpu<H>, index: u64, frame: Frame) -> Result<(), Error> {
        let place = match self.write_leaving(cpu, index, frame) {
            Ok(place) => place,
            Err(error) => {
                self.stay(frame);
                return Err(error);
            }
        };
        let pin = cpu.pin();
        let ram = self.machine().ram(&pin);
        if let Some(slot) = self.pages.slot(&pin, index) {
            let changed = slot.replace(Place::Frame(frame), place);
            debug_assert!(changed.is_ok(), "a page that is leaving changes its place");
        }
        end(self, ram.meta(frame), kind_of);
        let mut list = FrameList::new();
        list.push(ram.frames, frame);
        // Faults may still have its number.
        ram.defer(list, Grace { epoch: Some(pin.epoch().now()), ticket: Ticket::PASSED });
        Ok(())
    }

    /// Gives the page of [`begin_leaving`](Self::begin_leaving), which nothing maps any more, the frame `to`, fresh from the allocator, and the old
    /// frame up.
    pub(crate) fn finish_moving(&self, cpu: &Cpu<H>, index: u64, frame: Frame, to: Frame) {
        let pin = cpu.pin();
        let ram = self.machine().ram(&pin);
        ram.copy(frame, to);
        let (old, new) = (ram.meta(frame), ram.meta(to));
        new.set_owner(core::ptr::from_ref(self).cast_mut().cast());
        new.set_index(index);
        let passing = FrameFlags::LOCKED | FrameFlags::WAITERS;
        new.init_flags((old.flags() | FrameFlags::UPTODATE) - passing);
        if let Some(slot) = self.pages.slot(&pin, index) {
            let changed = slot.replace(Place::Frame(frame), Place::Frame(to));
            debug_assert!(changed.is_ok(), "a page that is leaving changes its place");
        }
        end(self, old, kind_of);
        let mut list = FrameList::new();
        list.push(ram.frames, frame);
        // Faults may still have its number.
        ram.defer(list, Grace { epoch: Some(pin.epoch().now()), ticket: Ticket::PASSED });
    }

    fn write_leaving(&self, cpu: &Cpu<H>, index: u64, frame: Frame) -> Result<Place, Error> {
        let meta = self.machine().frames().meta(frame);
        let Source::File(file) = &self.source else {
            return self.machine().swap().store(cpu, frame).map(Place::Swap);
        };
        if !meta.clear_flags(FrameFlags::DIRTY).contains(FrameFlags::DIRTY) {
            return Ok(Place::None);
        }
        let offset = index << PAGE_SHIFT;
        let count = self.len().saturating_sub(offset).min(PAGE_SIZE) as usize;
        let bytes = self.machine().host().bytes(frame);
        // SAFETY: a page of memory, which nothing maps and nobody else writes while it is `LOCKED`.
        let result = file.write_at(offset, unsafe { slice::from_raw_parts(bytes.as_ptr(), count) });
        let pin = cpu.pin();
        let stats = self.machine().stats();
        match result {
            Ok(()) => {
                stats.count(&pin, Counter::PgPgOut);
                Ok(Place::None)
            }
            Err(IoError) => {
                stats.count(&pin, Counter::WriteBackError);
                mutant!("leave_forgets_failure", self.mark_dirty(frame), ());
                Err(Error::Io)
            }
        }
    }

    /// Brings page `index` of memory without a file back from swap, if it is there. Blocks; not while pinned.
    pub(super) fn swap_in(&self, cpu: &Cpu<H>, index: u64) -> Result<(), FaultError> {
        let begun = {
            let pin = cpu.pin();
            let ram = self.machine().ram(&pin);
            match self.pages.slot(&pin, index).map(|slot| (slot, slot.place())) {
                Some((slot, place @ Place::Swap(number))) => {
                    let frame = ram.allocate().ok_or(FaultError::OutOfMemory)?;
                    let meta = ram.meta(frame);
                    meta.set_owner(core::ptr::from_ref(self).cast_mut().cast());
                    meta.set_index(index);
                    meta.init_flags(FrameFlags::CACHE | FrameFlags::SHMEM | FrameFlags::LOCKED);
                    if slot.replace(place, Place::Frame(frame)).is_ok() {
                        Some((number, frame))
                    } else {
                        end(self, meta, |_| FrameFlags::empty());
                        ram.free(frame);
                        None
                    }
                }
                _ => None,
            }
        };
        let Some((number, frame)) = begun else { return Ok(()) };
        let result = self.machine().swap().load(cpu, number, frame);
        {
            let pin = cpu.pin();
            let ram = self.machine().ram(&pin);
            if result.is_ok() {
                end(self, ram.meta(frame), |_| FrameFlags::CACHE | FrameFlags::SHMEM | FrameFlags::UPTODATE);
                self.machine().swap().release(&ram, number);
            } else {
                if let Some(slot) = self.pages.slot(&pin, index) {
                    let changed = slot.replace(Place::Frame(frame), Place::Swap(number));
                    debug_assert!(changed.is_ok(), "a page that is being read changes its place");
                }
                end(self, ram.meta(frame), |_| FrameFlags::empty());
                let mut list = FrameList::new();
                list.push(ram.frames, frame);
                ram.defer(list, Grace { epoch: Some(pin.epoch().now()), ticket: Ticket::PASSED });
            }
        }
        // Who has cut the object short meanwhile waits for us, or has taken the page out of its slot before we began.
        result
    }
}

/// What is left of a page that has left its object: who took an entry of it away just before has yet to see what kind of page it was.
fn kind_of(flags: FrameFlags) -> FrameFlags {
    flags & mutant!("leave_forgets_kind", FrameFlags::CACHE | FrameFlags::SHMEM, FrameFlags::empty())
}

/// Changes the flags of a page that the caller has `LOCKED` for the last time, and wakes who waits for it.
fn end<H: Host>(object: &Object<H>, meta: &FrameMeta, change: impl Fn(FrameFlags) -> FrameFlags) {
    let before = loop {
        let flags = meta.flags();
        if meta.replace_flags(flags, change(flags)) {
            break flags;
        }
    };
    if before.contains(FrameFlags::WAITERS) {
        object.machine().host().wake_all(meta.flags_word());
    }
}
