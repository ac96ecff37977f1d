//! Parting with shared pages: when a space stops counting on a page that others map too.
//!
//! # What it guarantees
//!
//! No processor reads, through a translation that a space has given up, what another space stores afterwards, nor what the frame holds
//! when that space has freed it. The last space that maps a private page may store to it in place ([`fault`](crate::fault)), or free it at
//! once; so a space that empties its entry counts as an owner until its translations are shot down and the accesses through them
//! have ended.
//!
//! # How
//!
//! A frame that nobody else maps goes to the sweep's list, which is freed behind one shoot-down for all. A shared frame can be
//! on no list, since each of its owners may part with it at the same time. So shared frames are noted here, for the span of one leaf table at
//! a time, and let go of when that span has been shot down. Only spaces that have forked, or come from a fork, can have any
//! ([`Mm::may_share_pages`]): others do nothing of this.
//!
//! # Who may break it
//!
//! Whoever lets go of a shared page's reference before the shoot-down of its entry has passed. A copy-on-write, which cannot wait for that, has its
//! own way ([`Ram::drop_reference`]).
//!
//! Source: Linux keeps the page's reference until the batch of its unmapping (`mmu_gather`) has been flushed.

use super::{BlockFrames, Mm};
use crate::addr::{AddrRange, Frame, TABLE_ENTRIES};
use crate::frame::{FrameList, Ram};
use crate::host::Host;
use crate::machine::Cpu;
use crate::page_table::Pte;
use crate::sync::atomic::Ordering;
use core::ops::ControlFlow;

/// Shared pages of one leaf table's span, or of one block, whose entries are gone.
pub(crate) struct Parting {
    frames: [Frame; TABLE_ENTRIES],
    count: usize,
    /// The first frame of a block.
    block: Option<Frame>,
}

impl Parting {
    pub(crate) const fn new() -> Self {
        Self { frames: [Frame(0); TABLE_ENTRIES], count: 0, block: None }
    }

    /// Keeps the reference of the private page or block that an entry said, `pte`, if others map it too. False, and nothing done,
    /// when the caller is its only owner, or there is no room.
    pub(crate) fn keep<H: Host>(&mut self, ram: &Ram<'_, H>, pte: Pte) -> bool {
        match pte {
            Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => {
                if ram.meta(frame).references() == 1 || self.count == self.frames.len() {
                    return false;
                }
                self.frames[self.count] = frame;
                self.count += 1;
            }
            Pte::Block { frame, .. } => {
                if self.block.is_some() || BlockFrames(frame).have_one_owner(ram) {
                    return false;
                }
                self.block = Some(frame);
            }
            _ => return false,
        }
        true
    }

    /// Shoots `range` down, in which all entries lay, and lets go of what was kept. Not while pinned.
    pub(crate) fn part<H: Host>(&mut self, mm: &Mm<H>, cpu: &Cpu<H>, range: AddrRange) {
        if self.count == 0 && self.block.is_none() {
            return;
        }
        let ticket = {
            let pin = cpu.pin();
            mm.shoot_down(&mm.ram(&pin), range)
        };
        mutant!("parting_not_awaited", cpu.await_stores(ticket), ());
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let mut list = FrameList::new();
        for &frame in &self.frames[..core::mem::take(&mut self.count)] {
            if ram.meta(frame).dec_references() == 0 {
                list.push(ram.frames, frame);
            }
        }
        if let Some(frame) = self.block.take() {
            BlockFrames(frame).drop_references(&ram, &mut list);
        }
        ram.free_all(list);
    }
}

impl<H: Host> Mm<H> {
    /// False when no other space can map a private page of this one.
    #[inline]
    pub(crate) fn may_share_pages(&self) -> bool {
        mutant!("parting_at_once", self.sharers.load(Ordering::Relaxed), false)
    }

    /// Says that pages will be shared. By a fork, which holds the whole space, or before the space is in use: a call that holds a
    /// range later sees it.
    pub(crate) fn expect_sharers(&self) {
        if !self.sharers.load(Ordering::Relaxed) {
            self.sharers.store(true, Ordering::Relaxed);
        }
    }

    /// As [`for_each_part`](Self::for_each_part), and lets go after each part of the shared pages that `visit` has kept.
    #[cold]
    pub(crate) fn for_each_part_with_sharers(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        mut visit: impl FnMut(&Ram<'_, H>, AddrRange, &mut Parting),
    ) {
        let mut parting = Parting::new();
        let mut at = range.start;
        while at < range.end {
            let mut done = None;
            {
                let pin = cpu.pin();
                let ram = self.ram(&pin);
                let _ = self.page_table.for_each_run(&ram, AddrRange::new(at, range.end), |run| {
                    let part = AddrRange::new(run.addr, run.address_of(run.slots.len()));
                    visit(&ram, part.intersection(range), &mut parting);
                    done = Some(part.intersection(range));
                    ControlFlow::Break(())
                });
            }
            let Some(part) = done else { return };
            parting.part(self, cpu, part);
            at = part.end;
        }
    }
}
