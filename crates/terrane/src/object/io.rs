//! Reading pages in and writing them back.

use super::cache::Place;
use super::{Object, Page, Source};
use crate::addr::{Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError, OutOfMemory};
use crate::frame::{FrameFlags, FrameList, Grace};
use crate::host::{File, Host, IoError, Ticket};
use crate::machine::Cpu;
use crate::stats::Counter;
use crate::sync::Pin;
use crate::sync::atomic::{AtomicU8, Ordering};
use core::ops::Range;
use core::ptr;
use core::slice;

/// Pages read along with a missing one: the aligned group it belongs to. 64 KiB, as large as the window of
/// fault-around, so that a fault after the read maps the whole group.
const READ_AHEAD: u64 = 16;

impl<H: Host> Object<H> {
    /// Reads page `index` in, and those of its neighbourhood that are missing too (`ahead`), as far as memory
    /// allows. Blocks; not while pinned. Returns when the page is there or another CPU reads it.
    ///
    /// # Errors
    /// [`FaultError::Io`] when the page cannot be read, [`FaultError::OutOfMemory`], [`FaultError::BeyondEnd`].
    pub fn read_in(&self, cpu: &Cpu<H>, index: u64, ahead: bool) -> Result<(), FaultError> {
        if index >= self.pages() {
            // Perhaps because it has just been cut short, while the caller made the page.
            let was_made = self.pages.place(&cpu.pin(), index) != Place::None;
            if was_made {
                self.cut_again(cpu);
            }
            return Err(FaultError::BeyondEnd);
        }
        self.read_one(cpu, index)?;
        if ahead && self.is_file() {
            let first = index & !(READ_AHEAD - 1);
            for other in (first..first + READ_AHEAD).filter(|&other| other != index && other < self.pages()) {
                // Nobody has asked for these: whatever keeps them away now will be met again if somebody does.
                if self.read_one(cpu, other).is_err() {
                    break;
                }
            }
        }
        Ok(())
    }

    fn read_one(&self, cpu: &Cpu<H>, index: u64) -> Result<(), FaultError> {
        let Source::File(file) = &self.source else {
            let (page, made) = {
                let pin = cpu.pin();
                let page = self.page(&pin, index);
                let made = if page == Page::Absent { self.make_page(&pin, index).map(drop) } else { Ok(()) };
                (page, made)
            };
            if made == Err(FaultError::BeyondEnd) {
                self.cut_again(cpu);
            }
            made?;
            return if page == Page::Swapped { self.swap_in(cpu, index) } else { Ok(()) };
        };
        // Before the page has its slot: who cuts the object short after this look finds the page there, or is noticed below.
        // The count first: see the head of `object`.
        let cuts = self.cuts();
        let len = self.len();
        if index << PAGE_SHIFT >= len {
            return Err(FaultError::BeyondEnd);
        }
        let Some(frame) = self.begin_reading(cpu, index)? else { return Ok(()) };
        if mutant!("read_leaves_cut", self.cuts() != cuts, false) {
            self.give_up_reading(cpu, index, frame);
            return Ok(()); // who wants the page looks again
        }
        let bytes = self.machine().host().bytes(frame);
        // SAFETY: the frame is ours: its slot says that it is being read, so nobody maps it or looks inside.
        let buffer = unsafe { slice::from_raw_parts_mut(bytes.as_ptr(), PAGE_SIZE as usize) };
        let result = file.read_at(index << PAGE_SHIFT, buffer);
        if let Ok(got) = result {
            // What the file does not fill reads as zeros, and so does what lies behind the end of the object, whose file
            // the host may not have cut short yet.
            let inside = len.saturating_sub(index << PAGE_SHIFT).min(PAGE_SIZE) as usize;
            if let Some(rest) = buffer.get_mut(got.min(inside)..) {
                rest.fill(0);
            }
        }
        if result.is_err() {
            self.give_up_reading(cpu, index, frame);
            return Err(FaultError::Io);
        }
        let pin = cpu.pin();
        let ram = self.machine().ram(&pin);
        ram.count(Counter::PgPgIn);
        let before = ram.meta(frame).swap_flags(FrameFlags::CACHE | FrameFlags::UPTODATE);
        if before.contains(FrameFlags::WAITERS) {
            ram.host.wake_all(ram.meta(frame).flags_word());
        }
        Ok(())
    }

    /// Puts a frame that is being read into the slot of page `index`; `None` when the page is there already.
    fn begin_reading(&self, cpu: &Cpu<H>, index: u64) -> Result<Option<Frame>, OutOfMemory> {
        let pin = cpu.pin();
        if self.page(&pin, index) != Page::Absent {
            return Ok(None);
        }
        let ram = self.machine().ram(&pin);
        let slot = self.pages.make_slot(&pin, index)?;
        let frame = ram.allocate().ok_or(OutOfMemory)?;
        let meta = ram.frames.meta(frame);
        meta.set_owner(ptr::from_ref(self).cast_mut().cast());
        meta.set_index(index);
        meta.init_flags(FrameFlags::CACHE | FrameFlags::LOCKED);
        if slot.fill(frame).is_err() {
            // Nobody has seen the frame here; but who waits for an earlier page in it may have left a mark.
            if meta.swap_flags(FrameFlags::empty()).contains(FrameFlags::WAITERS) {
                ram.host.wake_all(meta.flags_word());
            }
            ram.free(frame);
            return Ok(None);
        }
        Ok(Some(frame))
    }

    /// Takes a page that is being read, `frame`, out of its slot again.
    fn give_up_reading(&self, cpu: &Cpu<H>, index: u64, frame: Frame) {
        let pin = cpu.pin();
        let ram = self.machine().ram(&pin);
        // Out of the cache first: whoever waits looks again, finds nothing, and tries for itself.
        if let Some(slot) = self.pages.slot(&pin, index) {
            slot.clear();
        }
        let meta = ram.frames.meta(frame);
        if meta.swap_flags(FrameFlags::empty()).contains(FrameFlags::WAITERS) {
            ram.host.wake_all(meta.flags_word());
        }
        let mut list = FrameList::new();
        list.push(ram.frames, frame);
        ram.defer(list, Grace { epoch: Some(pin.epoch().now()), ticket: Ticket::PASSED });
    }

    /// Waits until none of the pages from `first` on is being read that was when the object was cut short: under the lock for that, after
    /// the length has been set. Blocks; not while pinned.
    pub(crate) fn await_reading(&self, cpu: &Cpu<H>, first: u64) {
        loop {
            let mut reading = None;
            {
                let _stays = cpu.pin();
                self.pages.for_each_until(first, |_, slot| {
                    if let Place::Frame(frame) = slot.place()
                        && matches!(self.state(frame), Page::Reading(_))
                    {
                        reading = Some(frame);
                    }
                    reading.is_none()
                });
            }
            match reading {
                Some(frame) => self.wait_for(cpu, frame),
                None => return,
            }
        }
    }

    /// Waits while `frame` is being read. May return early. Not while pinned.
    pub fn wait_for(&self, cpu: &Cpu<H>, frame: Frame) {
        let meta = self.machine().frames().meta(frame);
        let flags = meta.flags();
        if !flags.contains(FrameFlags::LOCKED) {
            return;
        }
        // By compare-and-swap: the frame may have become another page's meanwhile.
        let waiting = flags | FrameFlags::WAITERS;
        if flags == waiting || meta.replace_flags(flags, waiting) {
            self.machine().host().wait(cpu.id(), meta.flags_word(), waiting.bits());
        }
    }

    /// Writes the dirty pages among `pages` to the file for a program that waits for it, and says whether the file has failed
    /// to take one, of these or of others, since the last such call: once, to whoever asks first. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NoMemory`]; pages that were not written stay dirty, and the next call tries them again.
    pub fn sync(&self, cpu: &Cpu<H>, pages: Range<u64>) -> Result<(), Error> {
        let result = self.write_back_pages(cpu, pages);
        if self.failed.swap(false, Ordering::AcqRel) { Err(Error::Io) } else { result }
    }

    /// Copies page `index` aside and writes the copy to the file. The caller has taken the dirty mark away and
    /// made the mappings read-only; on failure the mark is set again.
    ///
    /// # Errors
    /// [`Error::Io`] when the file does not take it, [`Error::NoMemory`] without a frame for the copy.
    pub(crate) fn write_page(&self, cpu: &Cpu<H>, index: u64, frame: Frame) -> Result<(), Error> {
        let Source::File(file) = &self.source else { return Ok(()) };
        let offset = index << PAGE_SHIFT;
        let count = self.len().saturating_sub(offset).min(PAGE_SIZE) as usize;
        let copy_aside = || {
            let pin = cpu.pin();
            let ram = self.machine().ram(&pin);
            ram.allocate().inspect(|&copy| ram.copy(frame, copy))
        };
        let copy = copy_aside().or_else(|| {
            // Only what waits to be freed: reclaim could come back here, and we hold the lock for writing.
            cpu.quiesce();
            copy_aside()
        });
        let Some(copy) = copy else {
            self.mark_dirty(frame);
            return Err(Error::NoMemory);
        };
        let bytes = self.machine().host().bytes(copy);
        // SAFETY: the copy is ours alone.
        let result = file.write_at(offset, unsafe { slice::from_raw_parts(bytes.as_ptr(), count) });
        let pin = cpu.pin();
        let ram = self.machine().ram(&pin);
        ram.free(copy);
        match result {
            Ok(()) => {
                ram.count(Counter::PgPgOut);
                Ok(())
            }
            Err(IoError) => {
                self.mark_dirty(frame);
                self.failed.store(true, Ordering::Release);
                ram.count(Counter::WriteBackError);
                Err(Error::Io)
            }
        }
    }

    /// Makes page `index` of the file zeros, as far as the object reaches; memory has no file.
    ///
    /// # Errors
    /// [`Error::Io`] when the file does not take them.
    pub(crate) fn write_zeros(&self, index: u64) -> Result<(), Error> {
        const ZEROS: [u8; PAGE_SIZE as usize] = [0; PAGE_SIZE as usize];
        let Source::File(file) = &self.source else { return Ok(()) };
        let offset = index << PAGE_SHIFT;
        let count = self.len().saturating_sub(offset).min(PAGE_SIZE) as usize;
        file.write_at(offset, &ZEROS[..count]).map_err(|IoError| Error::Io)
    }

    /// The first page at or behind `range.start` that is in memory and dirty: its number, and its frame with the
    /// dirty mark taken away.
    pub(crate) fn take_dirty(&self, pin: &Pin<'_>, range: Range<u64>) -> Option<(u64, Frame)> {
        let frames = self.machine().frames();
        let mut next = range.start;
        while next < range.end.min(self.pages()) {
            let Some(slots) = self.slots(pin, next) else {
                next = (next | 63) + 1;
                continue;
            };
            while next < range.end.min(slots.end()) {
                if let Some(frame) = slots.get(next)
                    && frames.meta(frame).flags().contains(FrameFlags::DIRTY)
                    && frames.meta(frame).clear_flags(FrameFlags::DIRTY).contains(FrameFlags::DIRTY)
                {
                    return Some((next, frame));
                }
                next += 1;
            }
        }
        None
    }
}

impl<H: Host> Object<H> {
    /// Takes up to 256 of `pages` out of the cache and puts their frames on `list`; for the protocol in
    /// the head of [`object`](super). Returns where to go on, or `None` at the end.
    pub(crate) fn take_out(&self, pin: &Pin<'_>, pages: Range<u64>, list: &mut FrameList) -> Option<u64> {
        let frames = self.machine().frames();
        let mut seen = 0;
        let mut gone = 0;
        let mut behind = None;
        self.pages.for_each_until(pages.start, |index, slot| {
            if index >= pages.end {
                return false;
            }
            if seen == 256 {
                behind = Some(index);
                return false;
            }
            seen += 1;
            // A page that is being read is left to its reader.
            match slot.place() {
                // Who has put it there may be taking it out as well, because the object has become too short.
                place @ Place::Frame(frame)
                    if frames.meta(frame).dismiss() && slot.replace(place, Place::None).is_ok() =>
                {
                    list.push(frames, frame);
                    gone += 1;
                }
                // By who reads it in at this moment, the slot is changed first: then it is left to that.
                place @ Place::Swap(number) if slot.replace(place, Place::None).is_ok() => {
                    self.machine().swap().release(&self.machine().ram(pin), number);
                    gone += 1;
                }
                _ => {}
            }
            true
        });
        self.charge_pages(pin, -gone);
        behind
    }

    /// Makes the bytes behind `len` in its page read as zeros.
    pub(crate) fn zero_tail(&self, cpu: &Cpu<H>, len: u64) {
        let pin = cpu.pin();
        let within = (len & (PAGE_SIZE - 1)) as usize;
        if within == 0 {
            return;
        }
        if let Page::Ready(frame) = self.page(&pin, len >> PAGE_SHIFT) {
            let bytes = self.machine().host().bytes(frame).as_ptr();
            for n in within..PAGE_SIZE as usize {
                // SAFETY: inside the frame. Programs may store there at the same time, hence the atomics.
                unsafe { AtomicU8::from_ptr(bytes.add(n)) }.store(0, Ordering::Relaxed);
            }
        }
    }
}

impl<H: Host> Drop for Object<H> {
    /// Writes what is dirty and gives the frames back. A page that cannot be written is counted as
    /// `nr_write_back_errors`: whoever must know calls
    /// [`AddressSpace::sync`](crate::space::AddressSpace::sync) or [`Object::write_back`] before.
    fn drop(&mut self) {
        let machine = self.machine().clone();
        self.forget_identity();
        let mut errors = 0;
        let mut written = 0;
        // The last owner is gone, so no mapping is left and no other CPU comes here: the pin only names whose
        // caches take the frames. Writing blocks, so the pages are walked outside of it first.
        let file = match &self.source {
            Source::File(file) => Some(file),
            Source::Memory | Source::Device(_) => None,
        };
        let pages = self.pages();
        let len = self.len();
        machine.epoch().pin_any(|pin| self.charge_len(pin, len, 0));
        let mut next = 0;
        while let (Some(file), true) = (file, next < pages) {
            let found = machine.epoch().pin_any(|pin| self.take_dirty(pin, next..pages));
            let Some((index, frame)) = found else { break };
            next = index + 1;
            let offset = index << PAGE_SHIFT;
            let count = len.saturating_sub(offset).min(PAGE_SIZE) as usize;
            let bytes = machine.host().bytes(frame);
            // SAFETY: nobody maps the page any more, and nobody else can reach the object.
            match file.write_at(offset, unsafe { slice::from_raw_parts(bytes.as_ptr(), count) }) {
                Ok(()) => written += 1,
                Err(IoError) => errors += 1,
            }
        }
        let mut next = 0;
        while next < u64::MAX {
            // In pieces: a pin is short.
            next = machine.epoch().pin_any(|pin| {
                let ram = machine.ram(pin);
                let mut freed = 0;
                let mut behind = u64::MAX;
                self.pages.for_each_until(next, |index, slot| {
                    if freed == 256 {
                        behind = index;
                        return false;
                    }
                    match slot.clear() {
                        Place::Frame(frame) => {
                            // Reclaim may be about to try to own the object, in vain.
                            ram.meta(frame).dismiss();
                            ram.free(frame);
                        }
                        Place::Swap(number) => machine.swap().release(&ram, number),
                        Place::None => {}
                    }
                    freed += 1;
                    true
                });
                self.charge_pages(pin, -freed);
                ram.stats.add(pin, Counter::PgPgOut, core::mem::take(&mut written));
                ram.stats.add(pin, Counter::WriteBackError, core::mem::take(&mut errors));
                behind
            });
        }
    }
}
