//! Punching a hole into an object: its bytes become zeros, for all who map or read it.
//!
//! # How
//!
//! The file's bytes first, then the pages of the cache, in the order that [`object`](crate::object) asks for: slot, mappings,
//! shoot-down, epoch. Whoever reads a page in after its slot was emptied reads zeros. A page that is being read meanwhile may hold
//! what the file held before; it is waited for and taken out too. Private copies stay: they are the object's no longer.
//!
//! Write-back, cutting short and punching exclude each other, per object.

use super::walk::{for_each_entry, for_each_range_of_object};

use crate::error::Error;
use crate::frame::{FrameList, Grace};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::rss::{PageKind, Removed};
use crate::object::{Object, Page};
use crate::page_table::{EMPTY, Pte, PteFlags};
use crate::vma::VmFlags;
use core::ops::Range;

impl<H: Host> Object<H> {
    /// Makes the bytes of whole pages read as zeros, in every mapping and in the file, as far as the object reaches. Its
    /// length stays. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`Error::Io`] when the file does not take zeros; what comes before is done.
    pub fn punch(&self, cpu: &Cpu<H>, pages: Range<u64>) -> Result<(), Error> {
        let _one_at_a_time = self.lock_io();
        let mut result = Ok(());
        let mut done = pages.start;
        while result.is_ok() && done < pages.end.min(self.pages()) {
            result = self.write_zeros(done);
            done += u64::from(result.is_ok());
        }
        let pages = pages.start..done;
        loop {
            // Looked for first: what is being read by now may be what the file held before. What is in use by now is dropped, and
            // who begins to read later reads zeros.
            let reading = {
                let pin = cpu.pin();
                pages.clone().find_map(|index| match self.page(&pin, index) {
                    Page::Reading(frame) => mutant!("punch_leaves_reading", Some(frame), None),
                    _ => None,
                })
            };
            self.drop_pages(cpu, pages.clone());
            match reading {
                Some(frame) => self.wait_for(cpu, frame),
                None => return result,
            }
        }
    }

    /// Takes `pages` out of the cache and out of every mapping, but for private copies and pages that are being read.
    fn drop_pages(&self, cpu: &Cpu<H>, pages: Range<u64>) {
        let mut list = FrameList::new();
        let mut next = pages.start;
        loop {
            let pin = cpu.pin();
            let Some(behind) = self.take_out(&pin, next..pages.end, &mut list) else { break };
            next = behind;
        }
        if list.is_empty() {
            return;
        }
        let mut last = Ticket::PASSED;
        for_each_range_of_object(cpu, self, pages, |mm, vma, range, _| {
            // The protection by a handler of user faults outlasts the page.
            let marks_stay = vma.flags().contains(VmFlags::UFFD_WP);
            let mut removed = Removed::default();
            for_each_entry(mm, cpu, range, |ram, _, slot| {
                let mut raw = slot.wait_not_busy(ram);
                while let Pte::Page { frame, flags } | Pte::NoAccess { frame, flags } =
                    Pte::decode::<H::Format>(raw)
                {
                    // The pin keeps the object's frames from being used anew, so the entry is what it seems.
                    let kind = PageKind::from_flags(ram.frames.meta(frame).flags());
                    if kind == Some(PageKind::Anon) {
                        break;
                    }
                    let stays = marks_stay && flags.contains(PteFlags::USER_WP);
                    let left = if stays { Pte::UserWp.encode::<H::Format>() } else { EMPTY };
                    match slot.replace(raw, left) {
                        Ok(()) => {
                            removed.add(kind, 1);
                            break;
                        }
                        Err(_) => raw = slot.wait_not_busy(ram),
                    }
                }
            });
            let pin = cpu.pin();
            mm.uncount(&pin, removed);
            let ticket = mm.shoot_down(&mm.ram(&pin), range);
            // They pass in order: the last one's ticket stands for all.
            if ticket != Ticket::PASSED {
                last = ticket;
            }
        });
        let pin = cpu.pin();
        let grace = Grace { epoch: Some(pin.epoch().now()), ticket: last };
        self.machine().ram(&pin).defer(list, grace);
    }
}
