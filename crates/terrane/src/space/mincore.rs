//! `mincore`: which pages are in memory.

use super::AddressSpace;
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES, is_page_aligned};
use crate::error::Error;
use crate::frame::Ram;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::object::{Object, Page};
use crate::page_table::{Format, Level, Pte, Slot};
use crate::sync::Pin;
use crate::vma::{Snapshot, VmFlags};
use core::ops::ControlFlow;

/// Pages looked at under one pin: some microseconds.
const PAGES_A_PIN: u64 = TABLE_ENTRIES as u64;

impl<H: Host> AddressSpace<H> {
    /// Says for each page of `len` bytes at `addr` whether touching it would find it in memory: 1 in `resident` if it would, 0
    /// if not. A page counts that is mapped, whatever may be done with it, or that is in the cache of the object shown. O(pages).
    ///
    /// # Errors
    /// In this order: [`Error::Invalid`] for an unaligned address; [`Error::NoMemory`] for a range beyond the addresses of programs;
    /// [`Error::BadAddress`] when `resident` is too short; [`Error::NoMemory`] for a hole (before it, `resident` is filled in).
    pub fn mincore(&self, cpu: &Cpu<H>, addr: u64, len: u64, resident: &mut [u8]) -> Result<(), Error> {
        if !is_page_aligned(addr) {
            return Err(Error::Invalid);
        }
        let end = addr.checked_add(len).filter(|&end| end <= H::Format::USER_END);
        let range = AddrRange::new(addr, end.ok_or(Error::NoMemory)?.next_multiple_of(PAGE_SIZE));
        let resident = resident.get_mut(..range.pages() as usize).ok_or(Error::BadAddress)?;
        let mut at = range.start;
        for chunk in resident.chunks_mut(PAGES_A_PIN as usize) {
            let part = AddrRange::new(at, at + ((chunk.len() as u64) << PAGE_SHIFT));
            self.residency(cpu, part, chunk)?;
            at = part.end;
        }
        Ok(())
    }

    fn residency(&self, cpu: &Cpu<H>, range: AddrRange, resident: &mut [u8]) -> Result<(), Error> {
        let mm = self.mm();
        let _steady = mm.share(cpu, range);
        let pin = cpu.pin();
        let mut at = range.start;
        while at < range.end {
            let (vma, seen) = mm.vma_at(&pin, at).ok_or(Error::NoMemory)?;
            let part = AddrRange::new(at, seen.range.end.min(range.end));
            let first = ((at - range.start) >> PAGE_SHIFT) as usize;
            let resident = &mut resident[first..][..part.pages() as usize];
            let object = vma.object().filter(|_| !seen.flags.contains(VmFlags::PFNMAP));
            cached(&pin, &seen, object.map(|object| &**object), part, resident);
            if !seen.flags.contains(VmFlags::PFNMAP) {
                mapped(mm, &mm.ram(&pin), part, resident);
            }
            at = part.end;
        }
        Ok(())
    }
}

/// Which pages are in the cache of the object.
fn cached<H: Host>(
    pin: &Pin<'_>,
    seen: &Snapshot,
    object: Option<&Object<H>>,
    part: AddrRange,
    resident: &mut [u8],
) {
    let Some(object) = object else { return resident.fill(0) };
    for (place, index) in resident.iter_mut().zip(seen.index_of(part.start)..) {
        *place = u8::from(matches!(object.page(pin, index), Page::Ready(_)));
    }
}

/// Marks the pages that are mapped, or on their way.
fn mapped<H: Host>(mm: &Mm<H>, ram: &Ram<'_, H>, part: AddrRange, resident: &mut [u8]) {
    let _ = mm.page_table.for_each_run(ram, part, |run| {
        if run.level == Level::BLOCK {
            let block = AddrRange::new(run.addr, run.addr + run.level.span()).intersection(part);
            let is_block = run
                .slots
                .first()
                .is_some_and(|slot| Pte::block::<H::Format>(slot.wait_not_busy(ram)).is_some());
            if is_block {
                let first = ((block.start - part.start) >> PAGE_SHIFT) as usize;
                resident[first..][..block.pages() as usize].fill(1);
            }
            return ControlFlow::Continue(());
        }
        Slot::for_each_used(run.slots, |index, slot| {
            let there = matches!(
                Pte::decode::<H::Format>(slot.wait_not_busy(ram)),
                Pte::Page { .. } | Pte::NoAccess { .. } | Pte::Migration(_)
            );
            if there {
                resident[((run.address_of(index) - part.start) >> PAGE_SHIFT) as usize] = 1;
            }
            ControlFlow::Continue(())
        })
    });
}
