//! Writing an object's dirty pages, and cutting an object short.
//!
//! # Writing back
//!
//! For each dirty page: take the mark away, make every mapping of the page read-only and clean, shoot the
//! translations down, wait until stores under way have landed, copy the page aside, write the copy. A store after that
//! faults and marks the page again. The fault sets the mark while it owns the entry: if it took the entry before our
//! sweep reached it, the sweep waits, and the copy is made after the store could begin; if after, the mark is set after
//! we took it away.
//!
//! An unmap, a protect or a `DONTNEED` may have taken an entry away just before, and still wait for stores through it. It
//! says so in [`Mm::ending`](crate::mm::Mm::ending), raised before its first entry changes; then the write-back shoots down
//! the mapping itself and waits too.
//!
//! # Cutting short
//!
//! The length first, so that new faults fail; then the slots of the cache, then the mappings, then the frames, through
//! the epoch: the order that [`object`](crate::object) asks for.
//!
//! Both exclude each other, per object, by a lock of their own.

use super::walk::{for_each_mapping_of_object, for_each_space_of_object};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::frame::{FrameFlags, FrameList, Grace};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::object::Object;
use crate::page_table::{BUSY, Pte, PteFlags};
use crate::sync::atomic::Ordering;
use core::ops::Range;

impl<H: Host> Object<H> {
    /// Writes all dirty pages to the file. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`Error::Io`] when the file did not take a page, [`Error::NoMemory`]; the page stays dirty, and the others are
    /// tried all the same.
    pub fn write_back(&self, cpu: &Cpu<H>) -> Result<(), Error> {
        self.write_back_pages(cpu, 0..u64::MAX)
    }

    /// The same for the pages of a range.
    ///
    /// # Errors
    /// As [`write_back`](Self::write_back).
    pub fn write_back_pages(&self, cpu: &Cpu<H>, pages: Range<u64>) -> Result<(), Error> {
        if !self.is_file() {
            return Ok(());
        }
        let _one_at_a_time = self.lock_io();
        let mut result = Ok(());
        let mut next = pages.start;
        loop {
            let found = {
                let pin = cpu.pin();
                self.take_dirty(&pin, next..pages.end)
            };
            let Some((index, frame)) = found else { return result };
            next = index + 1;
            let mut ticket = Ticket::PASSED;
            for_each_mapping_of_object(cpu, self, index..index + 1, |mm, vma, ram, addr, slot| {
                if vma.flags().is_private() {
                    return;
                }
                let before = loop {
                    let before = slot.clear_flags::<H::Format>(PteFlags::WRITE | PteFlags::DIRTY);
                    if before != BUSY {
                        break before;
                    }
                    slot.wait_not_busy(ram);
                };
                if matches!(Pte::decode::<H::Format>(before), Pte::Page { flags, .. } if flags.contains(PteFlags::WRITE))
                {
                    let passed = mm.shoot_down(ram, AddrRange::new(addr, addr + PAGE_SIZE));
                    // A CPU's shoot-downs pass in order: the last one's ticket stands for all.
                    if passed != Ticket::PASSED {
                        ticket = passed;
                    }
                }
            });
            for_each_space_of_object(cpu, self, |mm, vma, ram| {
                if !vma.flags().is_private() && mm.ending.load(Ordering::SeqCst) > 0 {
                    // The entry is empty or read-only, but a store that came before that may be under way still.
                    let passed = mm.shoot_down(ram, vma.range());
                    if passed != Ticket::PASSED {
                        ticket = passed;
                    }
                }
            });
            // A store that is still under way leaves no new mark: it must arrive before the copy is made.
            cpu.await_stores(ticket);
            if let Err(error) = self.write_page(cpu, index, frame) {
                result = Err(error);
            }
        }
    }

    /// Sets the length, in bytes. Pages beyond it vanish from every mapping, private copies included, and touching
    /// them is a bus error; the rest of the last page reads as zeros. The host changes the length of its file
    /// itself, after a cut and before a growth. Blocks; not while pinned.
    pub fn set_len(&self, cpu: &Cpu<H>, len: u64) {
        let _one_at_a_time = self.lock_io();
        let before = self.len();
        self.store_len(len);
        if len < before {
            self.cut(cpu, len);
        }
    }

    /// Cuts the object short to the length it has by now: for whoever has read a page meanwhile. Blocks; not while
    /// pinned.
    pub(crate) fn cut_again(&self, cpu: &Cpu<H>) {
        let _one_at_a_time = self.lock_io();
        self.cut(cpu, self.len());
    }

    /// Takes all pages beyond `len`, which the object's length is, out of the cache and out of every mapping. Under the
    /// lock for that.
    fn cut(&self, cpu: &Cpu<H>, len: u64) {
        let first = (len >> PAGE_SHIFT) + u64::from(len & (PAGE_SIZE - 1) != 0);
        let mut list = FrameList::new();
        let mut next = first;
        loop {
            let pin = cpu.pin();
            let Some(behind) = self.take_out(&pin, next, &mut list) else { break };
            next = behind;
        }
        let mut ticket = Ticket::PASSED;
        for_each_mapping_of_object(cpu, self, first..u64::MAX >> PAGE_SHIFT, |mm, _, ram, addr, slot| {
            match Pte::decode::<H::Format>(slot.clear(ram)) {
                Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => {
                    let passed = mm.shoot_down(ram, AddrRange::new(addr, addr + PAGE_SIZE));
                    // A CPU's shoot-downs pass in order: the last one's ticket stands for all.
                    if passed != Ticket::PASSED {
                        ticket = passed;
                    }
                    if ram.frames.meta(frame).flags().contains(FrameFlags::ANON) {
                        ram.drop_reference(frame, passed);
                    }
                }
                _ => {}
            }
        });
        // An entry that is empty by now was perhaps in use a moment ago, and an access through it may be under way still.
        for_each_space_of_object(cpu, self, |mm, vma, ram| {
            let passed = mm.shoot_down(ram, vma.range());
            if passed != Ticket::PASSED {
                ticket = passed;
            }
        });
        self.zero_tail(cpu, len);
        let pin = cpu.pin();
        let grace = Grace { epoch: Some(pin.epoch().now()), ticket };
        let ram = self.machine().ram(&pin);
        ram.defer(list, grace);
    }
}
