//! The tree of tables: finding the entry of an address, and making the tables on the way to it.
//!
//! # What it guarantees
//!
//! A walk is one dependent load a level, takes no lock and writes nothing. What it returns stays memory of a page
//! table for as long as the pin lasts, whatever happens to the mapping: tables are freed behind the epoch.
//!
//! # Upper entries
//!
//! An entry of an upper level is empty, a table, a block (2 MiB, level 2), busy or a tombstone, and follows the
//! same protocol as one of a leaf ([`entry`](super::entry)). A missing table is made outside of any lock: zeroed
//! first, then its entry is taken, then the table is published. Who loses the race frees his table, which nobody
//! has seen, and walks on through the winner's. That needs no validation of a sequence counter, since an empty
//! table changes nothing for anybody: a table that an obsolete fault made stays, empty, until the range around it
//! is unmapped or the space ends.
//!
//! A fault that meets a busy entry, a tombstone or a block gets [`SlotError::Changed`] and starts from scratch.
//!
//! # The root
//!
//! The root is kept as an entry: a table, and a tombstone once the tree has been destroyed. It is never freed before,
//! and a host may use its part above [`Format::USER_END`] for the kernel: nothing here looks at it.
//!
//! Source: the levels are made by compare-and-swap instead of under `page_table_lock`; source B gives up on a fault
//! that finds one missing.

use super::entry::{Slot, Table};
use super::format::Format;
use super::pte::{EMPTY, Raw, TOMBSTONE, is_table};
use crate::addr::{Frame, PAGE_SHIFT, TABLE_ENTRIES};
use crate::error::OutOfMemory;
use crate::frame::{FrameFlags, Ram};
use crate::host::Host;
use crate::stats::Counter;
use crate::sync::Tally;
use core::fmt;
use core::marker::PhantomData;

/// Address bits that one level translates.
const LEVEL_BITS: u32 = TABLE_ENTRIES.trailing_zeros();

/// A level of the tree, counted from the leaves: the entries of level 1 map pages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Level(u32);

impl Level {
    /// Entries that map pages.
    pub const PAGE: Level = Level(1);
    /// Entries that map blocks of 2 MiB, or point to leaf tables.
    pub const BLOCK: Level = Level(2);

    /// The level of a format's root.
    #[inline]
    pub(super) const fn root<F: Format>() -> Level {
        Level(F::LEVELS)
    }

    /// The level below; level 1 has none.
    #[inline]
    pub(super) const fn below(self) -> Level {
        Level(self.0 - 1)
    }

    /// Bits of an address below those that this level translates.
    #[inline]
    pub const fn shift(self) -> u32 {
        PAGE_SHIFT + LEVEL_BITS * (self.0 - 1)
    }

    /// Bytes that one entry of this level covers.
    #[inline]
    pub const fn span(self) -> u64 {
        1 << self.shift()
    }

    /// Which entry of its table `addr` uses at this level.
    #[inline]
    pub const fn index(self, addr: u64) -> usize {
        (addr >> self.shift()) as usize % TABLE_ENTRIES
    }
}

/// Where the walk of a processor ends.
#[derive(Clone, Copy, Debug)]
pub struct Walk<'a> {
    /// The entry.
    pub slot: &'a Slot,
    /// What it was when the walk passed.
    pub raw: Raw,
    /// Its level: [`Level::PAGE`], or above it for anything but a table.
    pub level: Level,
}

/// Why there is no entry for an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotError {
    /// A table was missing, and there is no frame for it.
    OutOfMemory,
    /// An upper entry is a block, is changing right now, or the address is none of a program: start from scratch.
    Changed,
}

impl fmt::Display for SlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SlotError::OutOfMemory => "no memory for a page table",
            SlotError::Changed => "the page tables changed meanwhile",
        })
    }
}

impl core::error::Error for SlotError {}

impl From<OutOfMemory> for SlotError {
    fn from(_: OutOfMemory) -> Self {
        SlotError::OutOfMemory
    }
}

/// The page tables of one address space.
///
/// Every call takes the [`Ram`] of the machine that the tables were made in, and no other. Addresses at and above
/// [`Format::USER_END`] have no entries.
///
/// Dropping it does not free the tables (that takes a pin): [`destroy`](Self::destroy) does.
pub struct PageTable<F: Format> {
    /// An entry: the root table, or a tombstone after `destroy`.
    root: Raw,
    /// Tables in use. Faults make tables, so each CPU counts its own.
    tables: Tally,
    format: PhantomData<F>,
}

impl<F: Format> PageTable<F> {
    /// An empty tree: one table, the root.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn try_new<H: Host<Format = F>>(ram: &Ram<'_, H>) -> Result<Self, OutOfMemory> {
        // Before the frame, which would have to be given back.
        let tables = Tally::try_new()?;
        let root = F::table(new_table(ram).ok_or(OutOfMemory)?);
        ram.count(Counter::PgTableAlloc);
        tables.add(ram.pin.cpu(), 1);
        Ok(Self { root, tables, format: PhantomData })
    }

    /// The frame of the root table: what the processor's register gets.
    #[inline]
    pub fn root(&self) -> Frame {
        F::frame(self.root)
    }

    /// Tables in use, the root included; exact while nothing changes. The count is written when a table is made or
    /// freed, and only then.
    pub fn tables(&self) -> usize {
        usize::try_from(self.tables.sum()).unwrap_or(0)
    }

    /// The entry of the page at `addr`, if the tables for it exist and no block is in the way. Writes nothing.
    #[inline]
    pub fn lookup<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, addr: u64) -> Option<&'a Slot> {
        self.descend(ram, addr, Level::PAGE).ok()
    }

    /// The entry of the page at `addr`. Makes the tables that are missing.
    ///
    /// # Errors
    /// [`SlotError`]. Tables made before the memory ran out stay.
    #[inline]
    pub fn slot<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        addr: u64,
    ) -> Result<&'a Slot, SlotError> {
        self.slot_at(ram, addr, Level::PAGE)
    }

    /// The entry of `level` for `addr`: with [`Level::BLOCK`] the one that holds a block or a leaf table. Makes the
    /// tables that are missing above it.
    ///
    /// # Errors
    /// [`SlotError`]. Tables made before the memory ran out stay.
    #[inline]
    pub fn slot_at<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        addr: u64,
        level: Level,
    ) -> Result<&'a Slot, SlotError> {
        match self.descend(ram, addr, level) {
            Ok(slot) => Ok(slot),
            Err(_) => self.grow(ram, addr, level),
        }
    }

    /// The leaf table that covers `addr`, if it exists: the entries of the aligned 2 MiB around it.
    #[inline]
    pub fn leaf_table<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, addr: u64) -> Option<&'a Table> {
        let slot = self.descend(ram, addr, Level::BLOCK).ok()?;
        child::<F, H>(ram, slot.load())
    }

    /// The leaf table that covers `addr`, made if it does not exist.
    ///
    /// # Errors
    /// [`SlotError`]. Tables made before the memory ran out stay.
    pub fn make_leaf_table<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        addr: u64,
    ) -> Result<&'a Table, SlotError> {
        let slot = self.slot_at(ram, addr, Level::BLOCK)?;
        let mut raw = slot.load();
        if raw == EMPTY {
            raw = self.install(ram, slot)?;
        }
        child::<F, H>(ram, raw).ok_or(SlotError::Changed)
    }

    /// Walks as a processor does, to the entry that decides about `addr`: that of the page, or one above that is no
    /// table. `None` when the address is none of a program.
    #[inline]
    pub fn walk<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, addr: u64) -> Option<Walk<'a>> {
        match self.descend(ram, addr, Level::PAGE) {
            Ok(slot) => Some(Walk { slot, raw: slot.load(), level: Level::PAGE }),
            Err(end) => end,
        }
    }

    /// Walks down to `level`, or ends at the entry that is no table.
    #[inline(always)]
    pub(super) fn descend<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        addr: u64,
        to: Level,
    ) -> Result<&'a Slot, Option<Walk<'a>>> {
        let mut level = Level::root::<F>();
        let mut table = self.top(ram, addr).ok_or(None)?;
        while level > to {
            let slot = &table[level.index(addr)];
            let raw = slot.load();
            table = child::<F, H>(ram, raw).ok_or(Some(Walk { slot, raw, level }))?;
            level = level.below();
        }
        Ok(&table[level.index(addr)])
    }

    /// The root table, if `addr` is an address of a program.
    #[inline(always)]
    fn top<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, addr: u64) -> Option<&'a Table> {
        if addr >= F::USER_END {
            return None;
        }
        child::<F, H>(ram, self.root)
    }

    /// [`descend`](Self::descend) that makes what is missing.
    #[cold]
    fn grow<'a, H: Host<Format = F>>(
        &'a self,
        ram: &Ram<'a, H>,
        addr: u64,
        to: Level,
    ) -> Result<&'a Slot, SlotError> {
        let mut level = Level::root::<F>();
        let mut table = self.top(ram, addr).ok_or(SlotError::Changed)?;
        while level > to {
            let slot = &table[level.index(addr)];
            let mut raw = slot.load();
            if raw == EMPTY {
                raw = self.install(ram, slot)?;
            }
            table = child::<F, H>(ram, raw).ok_or(SlotError::Changed)?;
            level = level.below();
        }
        Ok(&table[level.index(addr)])
    }

    /// Makes a table and links it into the upper entry `slot`, which was empty. Returns what the entry is then: the
    /// new table, or what another CPU made of it.
    fn install<H: Host<Format = F>>(&self, ram: &Ram<'_, H>, slot: &Slot) -> Result<Raw, SlotError> {
        let frame = new_table(ram).ok_or(SlotError::OutOfMemory)?;
        let Some(taken) = slot.take(EMPTY) else {
            ram.free(frame);
            return Ok(slot.load());
        };
        let raw = F::table(frame);
        taken.publish(raw);
        self.count_made(ram);
        Ok(raw)
    }

    /// The entries of a frame that is a table, or becomes one, and that the upper entries do not lead to.
    pub(super) fn unlinked<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>, frame: Frame) -> &'a Table {
        // SAFETY: `Ram::table` gives the whole of a frame, aligned to the page size.
        unsafe { Slot::of_table(ram.table(frame)) }
    }

    /// Counts a table that has been linked.
    pub(super) fn count_made<H: Host<Format = F>>(&self, ram: &Ram<'_, H>) {
        self.tables.add(ram.pin.cpu(), 1);
        ram.count(Counter::PgTableAlloc);
    }

    /// The table that the root entry points to; `None` after `destroy`.
    pub(super) fn root_table<'a, H: Host<Format = F>>(&'a self, ram: &Ram<'a, H>) -> Option<&'a Table> {
        child::<F, H>(ram, self.root)
    }

    /// Counts a table that has been unlinked.
    pub(super) fn count_freed<H: Host<Format = F>>(&self, ram: &Ram<'_, H>) {
        self.tables.add(ram.pin.cpu(), -1);
        ram.count(Counter::PgTableFree);
    }

    /// Frees all tables at once. Afterwards no address has an entry.
    ///
    /// Everything must have been zapped; a page that is still mapped is forgotten, and its frame lost. No processor may
    /// be able to walk the tables any more, not even speculatively.
    pub fn destroy<H: Host<Format = F>>(&mut self, ram: &Ram<'_, H>) {
        let Some(root) = self.root_table(ram) else { return };
        // Behind the last entry of a program come, perhaps, those of the host.
        let level = Level::root::<F>();
        let used = level.index(F::USER_END - 1) + 1;
        self.free_below(ram, &root[..used], level);
        let frame = self.root();
        self.root = TOMBSTONE;
        ram.free(frame);
        self.count_freed(ram);
    }

    fn free_below<H: Host<Format = F>>(&self, ram: &Ram<'_, H>, slots: &[Slot], level: Level) {
        for slot in slots {
            let raw = slot.load();
            let Some(table) = child::<F, H>(ram, raw) else { continue };
            if level.below() > Level::PAGE {
                self.free_below(ram, table, level.below());
            } else {
                debug_assert!(Slot::all_empty(table), "destroyed with pages mapped");
            }
            ram.free(F::frame(raw));
            self.count_freed(ram);
        }
    }
}

impl<F: Format> fmt::Debug for PageTable<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageTable<{}>({:?}, {} tables)", F::NAME, self.root(), self.tables())
    }
}

/// A zeroed frame marked as a table, linked nowhere.
fn new_table<H: Host>(ram: &Ram<'_, H>) -> Option<Frame> {
    let frame = ram.allocate_zeroed()?;
    ram.frames.meta(frame).init_flags(FrameFlags::TABLE);
    Some(frame)
}

/// The table that the upper entry `raw` points to, if it points to one.
#[inline(always)]
pub(super) fn child<'a, F: Format, H: Host<Format = F>>(ram: &Ram<'a, H>, raw: Raw) -> Option<&'a Table> {
    if !is_table::<F>(raw) {
        return None;
    }
    // SAFETY: `Ram::table` gives the whole of a frame, aligned to the page size.
    Some(unsafe { Slot::of_table(ram.table(F::frame(raw))) })
}

#[cfg(terrane_watch)]
impl<F: Format> PageTable<F> {
    /// The names of all tables there are, for the cache-line audit.
    pub fn describe<H: Host<Format = F>>(&self, ram: &Ram<'_, H>, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("tables", &self.tables);
        if let Some(root) = self.root_table(ram) {
            describe_table::<F, H>(ram, root, Level::root::<F>(), 0, names);
        }
    }
}

#[cfg(terrane_watch)]
fn describe_table<F: Format, H: Host<Format = F>>(
    ram: &Ram<'_, H>,
    table: &Table,
    level: Level,
    base: u64,
    names: &mut crate::names::Names,
) {
    names.under(format_args!("table of level {} at {base:#x}", level.0), |names| {
        let range = table.as_ptr_range();
        let item = |index| alloc::format!(", entry {index}");
        names.array(range.start.addr()..range.end.addr(), size_of::<Slot>(), item, &[]);
    });
    for (index, slot) in table.iter().enumerate() {
        if level > Level::PAGE
            && let Some(below) = child::<F, H>(ram, slot.load())
        {
            describe_table::<F, H>(
                ram,
                below,
                level.below(),
                base + ((index as u64) << level.shift()),
                names,
            );
        }
    }
}
