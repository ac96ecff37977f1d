//! Blocks of 2 MiB: an entry of level 2 that maps memory, and how it changes into a table of pages and back.
//!
//! # What it guarantees
//!
//! Dividing a block changes no translation: its pages stay where they are, and allow what the block allowed. A table whose
//! pages have been gathered into a block is closed before the block is there: whoever stands in it finds nothing to
//! take, and walks anew.
//!
//! # How
//!
//! The entry of level 2 follows the protocol of all entries ([`entry`](super::entry)): a block comes into being by
//! taking it empty, and division by taking the block. The new table is filled before that, for exactly the block that
//! is then taken: flags that the processor sets meanwhile make the taking fail, and the table is filled anew.
//!
//! Between block and table (either way) the entry is busy while the translation is shot down: *break before make*. Both
//! say the same, so no access could go wrong; but a processor must not hold translations of two sizes for one address.
//! AArch64 demands the order (Architecture Reference Manual, D8.16, "TLB maintenance, break-before-make": a conflict may
//! raise an abort), and some x86 processors check for machine errors there (AMD family 10h, erratum 383; Intel's "machine
//! check on page size change"). A processor that needs the address meanwhile takes a fault that starts over.
//!
//! # Who may break it
//!
//! Whoever divides into a table that somebody can reach already; whoever makes a block of a table without owning all
//! of its entries.

use super::entry::Slot;
use super::format::{Format, PteFlags};
use super::pte::{Pte, Raw, is_table};
use super::table::{Level, PageTable};
use crate::addr::Frame;
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;

impl<F: Format> PageTable<F> {
    /// The entry of level 2 for `addr`, if the tables above it exist.
    #[inline]
    pub fn block_slot<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, addr: u64) -> Option<&'a Slot> {
        self.descend(ram, addr, Level::BLOCK).ok()
    }

    /// Divides the block `raw` that `slot`, an entry of level 2, maps: `table`, a frame of the caller's, becomes the table
    /// of its pages. `shoot_down` makes processors forget the block while the entry is owned. False, and the frame
    /// still the caller's, when the entry has changed.
    pub fn divide<H: Host<Format = F>>(
        &self,
        ram: &Ram<'_, H>,
        slot: &Slot,
        raw: Raw,
        table: Frame,
        shoot_down: impl FnOnce(),
    ) -> bool {
        let Some((first, flags)) = Pte::block::<F>(raw) else { return false };
        let hidden = !flags.contains(PteFlags::READ);
        for (entry, number) in self.unlinked(ram, table).iter().zip(first.0..) {
            let frame = Frame(number);
            let page = if hidden { Pte::NoAccess { frame, flags } } else { Pte::Page { frame, flags } };
            entry.init(page.encode::<F>());
        }
        ram.meta(table).init_flags(FrameFlags::TABLE);
        let Some(taken) = slot.take(raw) else { return false };
        shoot_down();
        taken.publish(F::table(table));
        self.count_made(ram);
        true
    }

    /// Makes the entry of level 2 for `addr`, which points to a leaf table all of whose entries the caller owns, map the
    /// block `new`. Returns the table, closed and unlinked: the caller frees it behind shoot-down and epoch.
    pub fn gather<H: Host<Format = F>>(
        &self,
        ram: &Ram<'_, H>,
        addr: u64,
        new: Pte,
        shoot_down: impl FnOnce(),
    ) -> Option<Frame> {
        let slot = self.block_slot(ram, addr)?;
        let taken = loop {
            let raw = slot.wait_not_busy(ram);
            if !is_table::<F>(raw) {
                return None;
            }
            if let Some(taken) = slot.take(raw) {
                break taken;
            }
        };
        let frame = F::frame(taken.previous());
        Slot::bury(self.unlinked(ram, frame));
        shoot_down();
        taken.publish(new.encode::<F>());
        self.count_freed(ram);
        Some(frame)
    }
}
