//! Writing an object's dirty pages, and cutting an object short.
//!
//! # Writing back
//!
//! Dirty pages are written in batches of neighbours. For each batch: take the marks away, make every mapping of the pages
//! read-only and clean, shoot the translations down, once for each mapping that had any, wait once until stores under way
//! have landed, then copy each page aside and write the copy. A store after that faults and marks the page again. The
//! fault sets the mark while it owns the entry: if it took the entry before our sweep reached it, the sweep waits, and the
//! copy is made after the store could begin; if after, the mark is set after we took it away: all marks of a batch are
//! taken before the first mapping is touched, and all mappings are through before the first copy.
//!
//! An unmap, a protect or a `DONTNEED` may have taken an entry away just before, and still wait for stores through it. It
//! says so in [`Mm::ending`](crate::mm::Mm::ending), raised before its first entry changes; then the write-back shoots down
//! the mapping itself and waits too. It looks after it has gone over the entries of the mapping, under the lock of the
//! object's mappings, which the VMA leaves only when its shoot-down has passed.
//!
//! # Cutting short
//!
//! The length first, so that new faults fail; then pages that are being read are waited for, since they may hold what the file held before; then the slots
//! of the cache, then the mappings, then the frames, through the epoch: the order that [`object`](crate::object) asks for. Each mapping is shot down once, also where its entries
//! are empty by now: they were perhaps in use a moment ago, and an access through one may be under way still.
//!
//! Both exclude each other, per object, by a lock of their own.

use super::walk::{for_each_entry, for_each_range_of_object};
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::Error;
use crate::frame::{FrameList, Grace, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::Parting;
use crate::mm::rss::{PageKind, Removed};
use crate::object::Object;
use crate::page_table::{BUSY, Pte, PteFlags, Slot, swap_slot};
use crate::sync::Pin;
use crate::sync::atomic::Ordering;
use crate::vma::VmFlags;
use core::ops::{ControlFlow, Range};

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
            let batch = {
                let pin = cpu.pin();
                Batch::take(self, &pin, next..pages.end)
            };
            let Some(span) = batch.span() else { return result };
            next = span.end;
            let mut passing = Passing::default();
            for_each_range_of_object(cpu, self, span, |mm, vma, range, first| {
                if vma.flags().is_private() {
                    return;
                }
                let mut stored = AddrRange::new(0, 0);
                for_each_entry(mm, cpu, range, |ram, addr, slot| {
                    let index = first + ((addr - range.start) >> PAGE_SHIFT);
                    if batch.contains(index) && clean::<H>(ram, slot) {
                        let start = if stored.is_empty() { addr } else { stored.start };
                        stored = AddrRange::new(start, addr + PAGE_SIZE);
                    }
                });
                if mutant!("write_back_ignores_ending", mm.ending.load(Ordering::SeqCst) > 0, false) {
                    // An entry is empty or read-only, but a store that came before that may be under way still.
                    stored = range;
                }
                if !stored.is_empty() {
                    let pin = cpu.pin();
                    passing.add(mm.shoot_down(&mm.ram(&pin), stored));
                }
            });
            // A store that is still under way leaves no new mark: it must arrive before the copies are made.
            mutant!("write_back_not_awaited", cpu.await_stores(passing.ticket), ());
            for &(index, frame) in batch.pages() {
                if let Err(error) = self.write_page(cpu, index, frame) {
                    result = Err(error);
                }
            }
        }
    }

    /// Sets the length, in bytes. Pages beyond it vanish from every mapping, private copies included, and touching
    /// them is a bus error; the rest of the last page reads as zeros. The host changes the length of its file
    /// itself, after a cut and before a growth. A cut waits for pages that are being read: the file's reading must not wait for it.
    /// Blocks; not while pinned.
    pub fn set_len(&self, cpu: &Cpu<H>, len: u64) {
        if self.is_device() {
            return; // it is as long as it is
        }
        let _one_at_a_time = self.lock_io();
        let before = self.len();
        self.store_len(len);
        self.charge_len(&cpu.pin(), before, len);
        if len < before {
            self.cut(cpu, len);
        } else if len == before {
            // As in Linux: what was stored to the last page behind the end is gone.
            self.zero_tail(cpu, len);
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
        // The last page too, when it loses its end.
        mutant!("cut_leaves_reading", self.await_reading(cpu, len >> PAGE_SHIFT), ());
        let mut list = FrameList::new();
        let mut next = first;
        loop {
            let pin = cpu.pin();
            let Some(behind) = self.take_out(&pin, next..u64::MAX, &mut list) else { break };
            next = behind;
        }
        let mut passing = Passing::default();
        for_each_range_of_object(cpu, self, first..u64::MAX >> PAGE_SHIFT, |mm, vma, range, _| {
            // The protection by a handler of user faults outlasts the page.
            let marks_stay = vma.flags().contains(VmFlags::UFFD_WP);
            let mut copies = FrameList::new();
            let mut removed = Removed::default();
            let mut clear = |ram: &Ram<'_, H>, slot: &Slot, parting: Option<&mut Parting>| {
                let before = if marks_stay {
                    slot.clear_but_mark::<H::Format, H>(ram)
                } else {
                    slot.clear_but_guard(ram)
                };
                let pte = Pte::decode::<H::Format>(before);
                match pte {
                    Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => {
                        let meta = ram.frames.meta(frame);
                        let kind = PageKind::from_flags(meta.flags());
                        removed.add(kind, 1);
                        if kind != Some(PageKind::Anon)
                            || parting.is_some_and(|parting| parting.keep(ram, pte))
                        {
                            return;
                        }
                        if meta.dec_references() == 0 {
                            copies.push(ram.frames, frame);
                        }
                    }
                    Pte::Swap(number) => {
                        removed.add(Some(PageKind::Swap), 1);
                        // Shot down below in any case.
                        mm.machine.swap().drop_entry(ram, swap_slot(number), &mut copies);
                    }
                    _ => {}
                }
            };
            if mm.may_share_pages() {
                mm.for_each_part_with_sharers(cpu, range, |ram, part, parting| {
                    mm.page_table.for_each_slot(ram, part, |_, slot| {
                        clear(ram, slot, Some(&mut *parting));
                        ControlFlow::Continue(())
                    });
                });
            } else {
                for_each_entry(mm, cpu, range, |ram, _, slot| clear(ram, slot, None));
            }
            let pin = cpu.pin();
            let ram = mm.ram(&pin);
            mm.uncount(&pin, removed);
            let ticket = mm.shoot_down(&ram, range);
            passing.add(ticket);
            ram.defer(copies, Grace { epoch: None, ticket });
        });
        self.zero_tail(cpu, len);
        let pin = cpu.pin();
        let grace = Grace { epoch: Some(pin.epoch().now()), ticket: passing.ticket };
        let ram = self.machine().ram(&pin);
        ram.defer(list, grace);
    }
}

/// Takes the permission to store and the mark of having been stored to out of an entry; true when it had the permission,
/// and so stores may be under way.
fn clean<H: Host>(ram: &Ram<'_, H>, slot: &Slot) -> bool {
    let before = loop {
        let before = slot.clear_flags::<H::Format>(PteFlags::WRITE | PteFlags::DIRTY);
        if before != BUSY {
            break before;
        }
        slot.wait_not_busy(ram);
    };
    matches!(Pte::decode::<H::Format>(before), Pte::Page { flags, .. } if flags.contains(PteFlags::WRITE))
}

/// Several shoot-downs of one CPU. They pass in order: the last one's ticket stands for all.
#[derive(Default)]
struct Passing {
    ticket: Ticket,
}

impl Passing {
    fn add(&mut self, ticket: Ticket) {
        if ticket != Ticket::PASSED {
            self.ticket = ticket;
        }
    }
}

/// Pages in a batch at most: their numbers and frames take a kilobyte of stack.
const BATCH: usize = 64;
/// Pages between the first and the last of a batch at most: the entries between dirty pages are looked at too.
const SPAN: u64 = 512;

/// Dirty pages that are written together, their marks taken away. Ascending.
struct Batch {
    pages: [(u64, Frame); BATCH],
    len: usize,
}

impl Batch {
    /// Takes the first dirty pages of `range`.
    fn take<H: Host>(object: &Object<H>, pin: &Pin<'_>, range: Range<u64>) -> Self {
        let mut batch = Self { pages: [(0, Frame(0)); BATCH], len: 0 };
        let mut rest = range;
        while batch.len < BATCH
            && let Some((index, frame)) = object.take_dirty(pin, rest.clone())
        {
            if batch.len == 0 {
                rest.end = rest.end.min(index.saturating_add(SPAN));
            }
            batch.pages[batch.len] = (index, frame);
            batch.len += 1;
            rest.start = index + 1;
        }
        batch
    }

    fn pages(&self) -> &[(u64, Frame)] {
        &self.pages[..self.len]
    }

    /// From the first page to behind the last; `None` when there are none.
    fn span(&self) -> Option<Range<u64>> {
        let (first, last) = (self.pages().first()?, self.pages().last()?);
        Some(first.0..last.0 + 1)
    }

    fn contains(&self, index: u64) -> bool {
        self.pages().binary_search_by_key(&index, |&(index, _)| index).is_ok()
    }
}
