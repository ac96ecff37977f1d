//! Going over the entries of a range: zap, protect, fork.
//!
//! # What it guarantees
//!
//! A sweep passes every table that exists in its range, in ascending order, and skips absent ones by whole spans: a
//! range of which nothing was ever touched costs one load for each upper entry that it covers. It waits out upper
//! entries that are busy, since a table may come into being there; when the sequence counters of the VMAs in the
//! range were made odd before, nothing is missed ([`entry`](super::entry)). Without that, it sees what it meets.

use super::entry::Slot;
use super::format::Format;
use super::pte::{BUSY, EMPTY, Pte, TOMBSTONE};
use super::table::{Level, PageTable, SlotError, child};
use super::{Raw, Table};
use crate::addr::{AddrRange, page_floor};
use crate::frame::Ram;
use crate::host::Host;
use core::ops::ControlFlow;

/// Neighbouring entries of one table: part of a leaf table, or a single upper entry that is no table.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// First address of the first entry, in bytes; for an upper entry perhaps below the range.
    pub addr: u64,
    /// The level of the entries: [`Level::PAGE`], or [`Level::BLOCK`] and above for a single entry.
    pub level: Level,
    /// The entries, one for each [`Level::span`] from `addr`.
    pub slots: &'a [Slot],
}

/// The same entries in the page tables of a parent and of its child in the making.
#[derive(Clone, Copy, Debug)]
pub struct Pair<'a> {
    /// First address of the first entry, in bytes.
    pub addr: u64,
    /// The level of the entries of both.
    pub level: Level,
    /// The parent's entries.
    pub parent: &'a [Slot],
    /// The child's entries, as many.
    pub child: &'a [Slot],
}

impl<F: Format> PageTable<F> {
    /// Calls `visit` for each run of entries in `range`, ascending: one for each leaf table, one for each block.
    /// `range` is rounded outwards to pages and cut at [`Format::USER_END`]. Waits out busy upper entries.
    #[inline]
    pub fn for_each_run<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        mut visit: impl FnMut(Run<'a>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let range = AddrRange::new(range.start, range.end.min(F::USER_END));
        // Small ranges are the common ones: one walk instead of a descent that looks for neighbours.
        if let Some(run) = self.single_run(ram, range) {
            return visit(run);
        }
        match self.root_table(ram) {
            Some(root) if !range.is_empty() => runs(ram, root, Level::root::<F>(), range, &mut visit),
            _ => ControlFlow::Continue(()),
        }
    }

    /// True when there is neither a table nor a block for any part of `range`, so that nothing was ever mapped there, or is being
    /// mapped. For a range inside of 2 MiB one load a level, and none below the first that says so.
    #[inline]
    pub fn is_untouched<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, range: AddrRange) -> bool {
        if range.is_empty() || (range.start ^ (range.end - 1)) >= Level::BLOCK.span() {
            return self.for_each_run(ram, range, |_| ControlFlow::Break(())).is_continue();
        }
        // A busy one is about to be something.
        let is_free = |raw| matches!(raw, EMPTY | TOMBSTONE);
        match self.descend(ram, range.start, Level::BLOCK) {
            Ok(slot) => is_free(slot.load()),
            Err(end) => end.is_none_or(|end| is_free(end.raw)),
        }
    }

    /// The entries of `range` if it lies in one leaf table and that exists.
    #[inline]
    fn single_run<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, range: AddrRange) -> Option<Run<'a>> {
        let last = range.end.wrapping_sub(1);
        if range.is_empty() || (range.start ^ last) >= Level::BLOCK.span() {
            return None;
        }
        let table = self.leaf_table(ram, range.start)?;
        Some(Run {
            addr: page_floor(range.start),
            level: Level::PAGE,
            slots: between(table, Level::PAGE, range),
        })
    }

    /// Calls `visit` for the entry of each page in `range` that is not empty, ascending, with the page's address. The
    /// entry may be busy: a sweep waits ([`Slot::wait_not_busy`]). Blocks are not visited
    /// (see [`for_each_run`](Self::for_each_run)).
    #[inline]
    pub fn for_each_slot<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        mut visit: impl FnMut(u64, &'a Slot) -> ControlFlow<()>,
    ) {
        // Broken off or not is known to `visit`.
        let _ = self.for_each_run(ram, range, |run| {
            if run.level != Level::PAGE {
                return ControlFlow::Continue(());
            }
            Slot::for_each_used(run.slots, |index, slot| visit(run.address_of(index), slot))
        });
    }

    /// Empties every entry in `range`, waiting out those that are busy, and calls `gone` with the address and the
    /// former content of each that held something. A block is emptied if it lies in the range as a whole; divide it
    /// before to zap a part.
    ///
    /// The processor may use the old translations until they are shot down.
    #[inline]
    pub fn zap<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        gone: &mut (impl FnMut(u64, Pte) + ?Sized),
    ) {
        self.zap_by(ram, range, Slot::clear, gone);
    }

    /// The same, but guards stay: what a range shows is forgotten, what the program has set up is not.
    #[inline]
    pub fn zap_but_guards<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        gone: &mut (impl FnMut(u64, Pte) + ?Sized),
    ) {
        self.zap_by(ram, range, Slot::clear_but_guard, gone);
    }

    #[inline]
    fn zap_by<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        clear: impl Fn(&Slot, &Ram<'a, H>) -> Raw + Copy,
        gone: &mut (impl FnMut(u64, Pte) + ?Sized),
    ) {
        let _ = self.for_each_run(ram, range, |run| {
            if run.level != Level::PAGE {
                let block = AddrRange::new(run.addr, run.addr + run.level.span());
                if let Some(slot) = run.slots.first().filter(|_| range.covers(block)) {
                    match slot.clear_block::<F, H>(ram) {
                        Ok(raw) => report(run.addr, raw, Pte::decode_block::<F>, gone),
                        // A fault has divided it this moment: page by page then.
                        Err(_) => self.zap_by(ram, block, clear, gone),
                    }
                }
                return ControlFlow::Continue(());
            }
            Slot::for_each_used(run.slots, |index, slot| {
                report(run.address_of(index), clear(slot, ram), Pte::decode::<F>, gone);
                ControlFlow::Continue(())
            })
        });
    }

    /// As [`zap`](Self::zap), but leaves [`Pte::UserWp`] where a handler of user faults has protected a page, or what will be there. For
    /// objects' mappings: blocks are left alone.
    pub fn zap_but_marks<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        range: AddrRange,
        gone: &mut (impl FnMut(u64, Pte) + ?Sized),
    ) {
        self.for_each_slot(ram, range, |addr, slot| {
            report(addr, slot.clear_but_mark::<F, H>(ram), Pte::decode::<F>, gone);
            ControlFlow::Continue(())
        });
    }

    /// Goes over the entries of `range` in `self` and, beside them, those of `child`, whose tables are made as needed.
    /// Runs in which the parent has nothing are left out, so the child gets no tables for them. For fork; the child
    /// must not be in use yet: write to it with [`Slot::fill`].
    ///
    /// # Errors
    /// [`SlotError`] when a table of the child cannot be made; what was visited before stays as `visit` left it.
    pub fn for_each_pair<'a, H: Host<Format = F>>(
        &'a self,
        child: &'a PageTable<F>,
        ram: &Ram<'a, H>,
        range: AddrRange,
        mut visit: impl FnMut(Pair<'a>) -> ControlFlow<()>,
    ) -> Result<(), SlotError> {
        let mut result = Ok(());
        let _ = self.for_each_run(ram, range, |run| {
            if Slot::all_empty(run.slots) {
                return ControlFlow::Continue(());
            }
            match child.beside(ram, run) {
                Ok(slots) => {
                    visit(Pair { addr: run.addr, level: run.level, parent: run.slots, child: slots })
                }
                Err(error) => {
                    result = Err(error);
                    ControlFlow::Break(())
                }
            }
        });
        result
    }

    /// The entries of this tree at the place of `run`, which is of another.
    fn beside<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        run: Run<'a>,
    ) -> Result<&'a [Slot], SlotError> {
        if run.level != Level::PAGE {
            return self.slot_at(ram, run.addr, run.level).map(core::slice::from_ref);
        }
        let first = Level::PAGE.index(run.addr);
        Ok(&self.make_leaf_table(ram, run.addr)?[first..][..run.slots.len()])
    }
}

impl Run<'_> {
    /// The address of the entry at `index`, in bytes.
    #[inline]
    pub fn address_of(&self, index: usize) -> u64 {
        self.addr + ((index as u64) << self.level.shift())
    }
}

#[inline]
fn report(addr: u64, raw: Raw, decode: fn(Raw) -> Pte, gone: &mut (impl FnMut(u64, Pte) + ?Sized)) {
    if raw != EMPTY {
        gone(addr, decode(raw));
    }
}

/// The entries of `table`, of `level`, that `range` leads through; it is not empty and lies in what the table covers.
#[inline]
pub(super) fn between(table: &Table, level: Level, range: AddrRange) -> &[Slot] {
    &table[level.index(range.start)..=level.index(range.end - 1)]
}

/// [`PageTable::for_each_run`] in one table; `range` is not empty and lies in what the table covers.
fn runs<'a, F: Format, H: Host<Format = F>>(
    ram: &Ram<'a, H>,
    table: &'a Table,
    level: Level,
    range: AddrRange,
    visit: &mut impl FnMut(Run<'a>) -> ControlFlow<()>,
) -> ControlFlow<()> {
    let slots = between(table, level, range);
    let base = range.start & !(level.span() - 1);
    if level == Level::PAGE {
        return visit(Run { addr: page_floor(range.start), level, slots });
    }
    for (index, slot) in slots.iter().enumerate() {
        let mut raw = slot.load();
        if raw == BUSY {
            raw = slot.wait_not_busy(ram);
        }
        if matches!(raw, EMPTY | TOMBSTONE) {
            continue;
        }
        let addr = base + ((index as u64) << level.shift());
        if let Some(below) = child::<F, H>(ram, raw) {
            let part = range.intersection(AddrRange::new(addr, addr + level.span()));
            runs(ram, below, level.below(), part, visit)?;
        } else {
            visit(Run { addr, level, slots: core::slice::from_ref(slot) })?;
        }
    }
    ControlFlow::Continue(())
}
