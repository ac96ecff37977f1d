//! Giving up tables that have become empty, under the eyes of faults.
//!
//! # What it guarantees
//!
//! A table leaves the tree only when it holds nothing, and holds nothing ever after. Nothing is lost, whatever
//! runs at the same time: faults in the range, faults beside it, other calls that free tables.
//!
//! # How
//!
//! 1. **Close.** A tombstone goes into the first entry of every cache line, and the rest is checked: if all of it is
//!    empty, no entry of the table can be taken any more ([`entry`](super::entry), "Tombstones"). If not, the
//!    tombstones are taken back and the table stays.
//! 2. **Unlink.** The upper entry that points to the table becomes empty. Walks that pass from now on make a new
//!    table.
//! 3. **Sink.** The frame goes to the caller's list. Processors may keep the upper entry in their caches, and
//!    faults may stand in the table: the caller shoots down, and frees the frame when the shoot-down and the
//!    epoch have passed.
//!
//! Then the same one level up.
//!
//! # Why it is right
//!
//! An entry becomes something only by [`Slot::take`] and [`Taken::publish`]. After closing, every take in the
//! table fails or gives back without publishing: it meets the tombstone in the head itself, or sees it after its
//! exchange. Before closing, it was seen, and the table was not closed. So what is unlinked is empty and stays it.
//! For an upper table the same words say that no table is lost below it, because tables are linked by the same
//! protocol.
//!
//! A processor that walks through a closed table finds nothing valid in it, which is what the tree says as well.
//!
//! While a table is closed and not yet unlinked, faults that need it are sent back (nanoseconds, unless the
//! closing CPU is interrupted). They hold nothing, so they keep nobody up; and they abort, in most cases, as the
//! VMA has changed.
//!
//! Unlinking waits for the upper entry when it is busy. Its owner wants to put a block there and would have to
//! close this table first; it finds it closed and gives up. It waits for nobody.
//!
//! # What it costs
//!
//! The simple version, a tombstone by compare-and-swap in every entry, takes 1.3 µs for a table (2 CPUs, AMD EPYC).
//! The check in [`Slot::take`] allows 64 tombstones instead: 0.3 µs in all. A table that is not empty costs reading
//! it up to the first entry in use, 0.08 µs at most.
//!
//! # Who may break it
//!
//! Whoever publishes into a slot after its pin has ended; whoever reuses the frame before shoot-down and epoch have
//! passed.
//!
//! [`Taken::publish`]: super::Taken::publish

use super::entry::{Slot, Table};
use super::format::Format;
use super::sweep::between;
use super::table::{Level, PageTable, child};
use crate::addr::AddrRange;
use crate::frame::{FrameList, Ram};
use crate::host::Host;

impl<F: Format> PageTable<F> {
    /// Unlinks the tables that `range` leads through, that lie in `floor..ceiling` (bytes) as a whole and that hold
    /// nothing, and puts their frames on `sink`. As a rule `floor` is the end of the mapping before `range`, and
    /// `ceiling` the start of the one behind it, or [`Format::USER_END`]. The root stays.
    ///
    /// Wrong bounds lose nothing: at worst a table is made anew. The caller shoots down the range before
    /// it frees the frames, and defers them until the epoch has passed.
    pub fn free_tables<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        floor: u64,
        ceiling: u64,
        range: AddrRange,
        sink: &mut FrameList,
    ) {
        // Nothing of a program lies between the last address and the end of the last table.
        let ceiling = if ceiling >= F::USER_END { u64::MAX } else { ceiling };
        let bounds = AddrRange::new(floor, ceiling);
        let range = AddrRange::new(range.start, range.end.min(F::USER_END));
        if range.is_empty() {
            return;
        }
        // The common unmap is small and has neighbours in its 2 MiB: no walk at all.
        let first = range.start & !(Level::BLOCK.span() - 1);
        if range.end <= first + Level::BLOCK.span() && !bounds.covers(span_of(first, Level::BLOCK)) {
            return;
        }
        if let Some(root) = self.root_table(ram) {
            self.prune(ram, root, Level::root::<F>(), bounds, range, sink);
        }
    }

    /// [`free_tables`](Self::free_tables) below `table`; `range` is not empty and lies in what the table covers.
    fn prune<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        table: &'a Table,
        level: Level,
        bounds: AddrRange,
        range: AddrRange,
        sink: &mut FrameList,
    ) {
        let slots = between(table, level, range);
        let base = range.start & !(level.span() - 1);
        for (index, slot) in slots.iter().enumerate() {
            // Busy: a table is being made, by a fault that will find it superfluous. It stays.
            let raw = slot.load();
            let Some(below) = child::<F, H>(ram, raw) else { continue };
            let span = span_of(base + ((index as u64) << level.shift()), level);
            if level > Level::BLOCK {
                self.prune(ram, below, level.below(), bounds, range.intersection(span), sink);
            }
            if bounds.covers(span) && Slot::close(below) {
                slot.unlink(ram, raw);
                sink.push(ram.frames, F::frame(raw));
                self.count_freed(ram);
            }
        }
    }
}

/// What an entry of `level` at `addr` covers.
#[inline]
fn span_of(addr: u64, level: Level) -> AddrRange {
    AddrRange::new(addr, addr + level.span())
}
