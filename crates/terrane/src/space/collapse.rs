//! Collapse: the pages of an aligned 2 MiB become one block, under the eyes of faults.
//!
//! # What it guarantees
//!
//! Every byte stays what it is; a store that runs at the same time lands before the copy, or in the block. A fault elsewhere
//! notices nothing; a fault in the 2 MiB starts over while its entry is taken, and after some rounds sleeps on the range lock.
//!
//! # How
//!
//! The call holds the 2 MiB exclusively, so no other call is at work there, and no fork. That leaves faults (and walks of the
//! reverse mapping, which only look).
//!
//! 1. **Look** at the entries: are there enough private pages, and nothing that cannot be moved? Allocate a block.
//! 2. **Take all 512 entries**, waiting for faults that own one. To wait while owning others is safe here, as it is in
//!    no fault: owners wait for nothing (see [`page_table::entry`](crate::page_table::entry)), and nobody else takes a second
//!    entry of this table while waiting. What was looked at is checked again; if it will not do, all are given back as they were.
//! 3. **Shoot down and await the accesses** that are under way through old translations. Pages whose entries are taken cannot be
//!    stored to any more, nor freed, nor copied by a fault.
//! 4. **Copy**, a few pages under each pin. Steps 3 and 4 take as long as they take: the entries stay taken, unpinned. That is
//!    right because a table with a taken entry cannot be closed, so it stays where it is.
//! 5. **Gather**: take the entry of level 2, close the table by tombstones, shoot down (processors keep the upper entry,
//!    too), publish the block ([`page_table::block`](crate::page_table::block)).
//! 6. **Give back** the old pages at once, for no access to them has been under way since step 3, and the table behind the
//!    shoot-down and the epoch.
//!
//! A fault that walked to the old table long ago finds entries that are taken, later empty or tombstones: none can be taken
//! any more, so it starts over and meets the block. A fault that had made its page ready for an entry throws it away.
//!
//! The VMA needs no bracket: its attributes do not change, and nobody but the holder of the range may change them. A bracket
//! would make the faults of a VMA of any size give up for 2 MiB of it; this is why the entries are held instead.
//!
//! # Whose page it is
//!
//! The block's frames are copies that only this space maps, so they are owned by the VMA's own anon_vma, whatever ancestors
//! the old pages named, and may be written where the VMA allows it. Pages shared with another space are copied too when
//! the program asks (`MADV_COLLAPSE`), as Linux does; the collapser leaves them alone, since it would use memory for nothing.
//!
//! # Who may break it
//!
//! Whoever changes entries of private memory without holding their range, taking them, or being ready to find them taken for long.
//!
//! Source: `khugepaged` (A. Arcangeli, Linux 2.6.38), which keeps everybody out by the lock of the space.

use super::AddressSpace;
use crate::addr::{AddrRange, Frame, TABLE_ENTRIES};
use crate::error::{Error, OutOfMemory};
use crate::frame::{FrameFlags, FrameList, Grace, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::rss::PageKind;
use crate::mm::{BLOCK_SIZE, Mm, SpareBlock, block_around};
use crate::page_table::{EMPTY, Level, Pte, PteFlags, Raw, Table};
use crate::stats::Counter;
use crate::sync::Pin;
use crate::sync::atomic::Ordering;
use crate::vma::{Access, Anon, Snapshot, VmFlags, Vma};
use alloc::vec::Vec;
use core::ops::ControlFlow;

/// Blocks that one look for a candidate passes at most.
const BLOCKS_A_LOOK: usize = 256;

/// What a step of the collapser has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CollapseProgress {
    /// VMAs and page tables looked at.
    pub scanned: usize,
    /// Huge pages made.
    pub collapsed: usize,
    /// The end of the space was reached: the next step begins from the start.
    pub wrapped: bool,
}

/// Why 2 MiB were not made a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    /// Nothing is mapped at the address.
    NotMapped,
    /// The VMA does not cover all of it, or is not for blocks.
    NotForBlocks,
    /// There are not enough private pages.
    TooFew,
    /// A page is shared.
    Shared,
    /// An entry is in a state that will pass.
    Busy,
    /// No block, or no memory for the bookkeeping.
    NoMemory,
}

impl From<OutOfMemory> for Refusal {
    fn from(_: OutOfMemory) -> Self {
        Refusal::NoMemory
    }
}

/// What a caller asks of the pages.
#[derive(Clone, Copy)]
struct Terms {
    /// Entries at most that hold nothing or the page of zeros.
    max_none: usize,
    /// Pages that another space maps too are copied.
    shared: bool,
    /// By the space's policy, not by a call of the program.
    background: bool,
}

/// A look at the entries of a table.
#[derive(Default)]
struct Census {
    none: usize,
    shared: usize,
    /// Something that is no page.
    other: bool,
    /// A guard.
    guard: bool,
}

impl Census {
    fn add<H: Host>(&mut self, ram: &Ram<'_, H>, raw: Raw) {
        match Pte::decode::<H::Format>(raw) {
            Pte::Empty => self.none += 1,
            Pte::Page { frame, .. } => {
                let meta = ram.frames.meta(frame);
                if !meta.flags().contains(FrameFlags::ANON) {
                    // Private memory shows nothing else but the page of zeros.
                    self.none += 1;
                } else if meta.references() > 1 {
                    self.shared += 1;
                }
            }
            Pte::Guard => self.guard = true,
            _ => self.other = true,
        }
    }

    fn check(&self, terms: Terms) -> Result<(), Refusal> {
        if self.guard {
            Err(Refusal::NotForBlocks)
        } else if self.other {
            Err(Refusal::Busy)
        } else if self.shared > 0 && !terms.shared {
            Err(Refusal::Shared)
        } else if self.none > terms.max_none {
            Err(Refusal::TooFew)
        } else {
            Ok(())
        }
    }
}

/// Takes all entries of `table`, if they meet `terms`, and puts what they were into `entries`, which has room.
fn take_all<H: Host>(
    ram: &Ram<'_, H>,
    table: &Table,
    terms: Terms,
    entries: &mut Vec<Raw>,
) -> Result<(), Refusal> {
    let mut census = Census::default();
    let mut result = Ok(());
    for slot in table {
        let Some(taken) = slot.take_any(ram) else {
            result = Err(Refusal::Busy);
            break;
        };
        entries.push(taken.keep());
    }
    // Only now: while the entries were not all taken, a page could be stored to and so be copied.
    entries.iter().for_each(|&raw| census.add(ram, raw));
    result = result.and_then(|()| census.check(terms));
    if result.is_err() {
        for (slot, raw) in table.iter().zip(entries.drain(..)) {
            slot.resume(raw).give_back();
        }
    }
    result
}

impl<H: Host> AddressSpace<H> {
    /// `MADV_COLLAPSE`: each aligned 2 MiB within `range`, one VMA after the other, and on behind holes. Ends with the first VMA
    /// that cannot have huge pages or of which some could not be made, as Linux does.
    pub(super) fn collapse(&self, cpu: &Cpu<H>, range: AddrRange) -> Result<(), Error> {
        let terms = Terms { max_none: TABLE_ENTRIES, shared: true, background: false };
        let mut next = range.start;
        let mut hole = false;
        while next < range.end {
            let (seen, fits) = {
                let _steady = self.mm().share(cpu, AddrRange::new(next, range.end));
                let pin = cpu.pin();
                let Some((vma, seen)) = self.mm().next_vma(&pin, next, range.end) else {
                    return Err(Error::NoMemory);
                };
                let last = seen.range.end & !(BLOCK_SIZE - 1);
                let has_room = last.checked_sub(BLOCK_SIZE).is_some_and(|first| first >= seen.range.start);
                let touched = !matches!(vma.anon(), Anon::None);
                (seen, has_room && touched && for_blocks(self.mm(), vma, &seen, terms))
            };
            if !fits {
                return Err(Error::Invalid);
            }
            let part = seen.range.intersection(AddrRange::new(next, range.end));
            self.collapse_part(cpu, part, terms)?;
            hole |= part.start > next;
            next = part.end;
        }
        if hole { Err(Error::NoMemory) } else { Ok(()) }
    }

    /// Each aligned 2 MiB within `range`.
    fn collapse_part(&self, cpu: &Cpu<H>, range: AddrRange, terms: Terms) -> Result<(), Error> {
        let mut result = Ok(());
        let mut at = range.start.next_multiple_of(BLOCK_SIZE);
        while at < range.end && range.end - at >= BLOCK_SIZE {
            if let Err(refusal) = self.collapse_block(cpu, at, terms) {
                result = Err(match refusal {
                    Refusal::NotMapped | Refusal::NoMemory => Error::NoMemory,
                    Refusal::NotForBlocks | Refusal::TooFew => Error::Invalid,
                    Refusal::Busy | Refusal::Shared => Error::Again,
                });
            }
            at += BLOCK_SIZE;
        }
        cpu.tidy();
        result
    }

    /// Goes on with the collapser's round through the space: looks at up to `budget` VMAs and page tables, and makes huge pages
    /// where the policy ([`SpaceConfig::huge_pages`](super::SpaceConfig::huge_pages), advice) allows them, at least
    /// 512 - [`collapse_max_none`](super::SpaceConfig::collapse_max_none) pages are there, and none is shared. The library has no
    /// threads: a host calls this now and then. Blocks on range locks; not while pinned. A huge page takes some 300 us.
    pub fn collapse_step(&self, cpu: &Cpu<H>, budget: usize) -> CollapseProgress {
        let max_none = self.config().collapse_max_none as usize;
        let terms = Terms { max_none, shared: false, background: true };
        let mut progress = CollapseProgress::default();
        let mut at = self.collapse_at.load(Ordering::Relaxed);
        while progress.scanned < budget && !progress.wrapped {
            progress.scanned += 1;
            match self.next_candidate(cpu, at, terms) {
                Candidate::None => (at, progress.wrapped) = (0, true),
                Candidate::NotBefore(next) => at = next,
                Candidate::Table(start) => {
                    if self.collapse_block(cpu, start, terms).is_ok() {
                        progress.collapsed += 1;
                    }
                    at = start + BLOCK_SIZE;
                }
            }
        }
        self.collapse_at.store(at, Ordering::Relaxed);
        cpu.tidy();
        progress
    }

    /// Looks from `at` on for a table that may become a block, past one VMA or one table at most.
    fn next_candidate(&self, cpu: &Cpu<H>, at: u64, terms: Terms) -> Candidate {
        let mm = self.mm();
        let pin = cpu.pin();
        let Some(vma) = mm.index.first_ending_after(&pin, at) else { return Candidate::None };
        // A hint: what is found is looked at again with the range held.
        let seen = vma.snapshot();
        let past = Candidate::NotBefore(seen.range.end.max(at + 1));
        let Some(start) = seen.range.start.max(at).checked_next_multiple_of(BLOCK_SIZE) else { return past };
        if !for_blocks(mm, vma, &seen, terms) || start >= seen.range.end {
            return past;
        }
        let ram = mm.ram(&pin);
        let mut found = None;
        // Blocks are passed quickly, but there may be many, and no pin is to last long.
        let (mut blocks, mut reached) = (0, None);
        let _ = mm.page_table.for_each_run(&ram, AddrRange::new(start, seen.range.end), |run| {
            if run.level == Level::PAGE && run.slots.len() == TABLE_ENTRIES {
                let mut census = Census::default();
                run.slots.iter().for_each(|slot| census.add(&ram, slot.load()));
                found = Some((run.addr, census.check(terms)));
                return ControlFlow::Break(());
            }
            blocks += 1;
            if blocks < BLOCKS_A_LOOK {
                return ControlFlow::Continue(());
            }
            reached = Some(run.addr);
            ControlFlow::Break(())
        });
        match found {
            None => reached.map_or(past, |block| Candidate::NotBefore(block + BLOCK_SIZE)),
            Some((table, Ok(()))) => Candidate::Table(table),
            Some((table, Err(refusal))) => {
                match refusal {
                    Refusal::TooFew => ram.count(Counter::ThpScanExceedNone),
                    Refusal::Shared => ram.count(Counter::ThpScanExceedShare),
                    _ => {}
                }
                Candidate::NotBefore(table + BLOCK_SIZE)
            }
        }
    }

    /// Makes the 2 MiB at `start` a block; fine if they are one.
    fn collapse_block(&self, cpu: &Cpu<H>, start: u64, terms: Terms) -> Result<(), Refusal> {
        let mm = self.mm();
        let range = block_around(start);
        if range.end > self.config().range.end {
            return Err(Refusal::NotMapped);
        }
        let mut entries: Vec<Raw> = Vec::new();
        entries.try_reserve_exact(TABLE_ENTRIES).map_err(|_| OutOfMemory)?;
        let hold = mm.exclude(cpu, range);
        // The layout stays as it is: a listing need not wait.
        hold.committed();
        mm.expect_blocks();
        let flags = {
            let pin = cpu.pin();
            let (seen, _) = self.vma_for_block(&pin, range, terms)?;
            let ram = mm.ram(&pin);
            let slot = mm.page_table.block_slot(&ram, start).ok_or(Refusal::TooFew)?;
            let raw = slot.wait_not_busy(&ram);
            if Pte::block::<H::Format>(raw).is_some() {
                return Ok(());
            }
            let table = mm.page_table.leaf_table(&ram, start);
            let table = table.ok_or(if raw == EMPTY { Refusal::TooFew } else { Refusal::Busy })?;
            let mut census = Census::default();
            table.iter().for_each(|slot| census.add(&ram, slot.wait_not_busy(&ram)));
            census.check(terms)?;
            seen.flags
        };
        let block = SpareBlock::try_new(cpu, mm, flags, start).or_else(|| {
            cpu.find_memory();
            SpareBlock::try_new(cpu, mm, flags, start)
        });
        let Some(block) = block else {
            let pin = cpu.pin();
            mm.ram(&pin).event(Counter::ThpCollapseAllocFailed, start);
            return Err(Refusal::NoMemory);
        };
        let ticket = {
            let pin = cpu.pin();
            let ram = mm.ram(&pin);
            let table = mm.page_table.leaf_table(&ram, start).ok_or(Refusal::Busy)?;
            take_all(&ram, table, terms, &mut entries)?;
            mm.shoot_down(&ram, range)
        };
        cpu.await_stores(ticket);
        block.for_each(|ram, n, frame| match old_page(ram, entries[n]) {
            Some(old) => ram.copy(old, frame),
            None => ram.zero(frame),
        });
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let ready = self.vma_for_block(&pin, range, terms).and_then(|(seen, owner)| {
            block.frames().own(&ram, owner, start);
            let mut flags = seen.flags.read_only_pte() | PteFlags::ACCESSED | PteFlags::DIRTY;
            flags.set(PteFlags::WRITE, seen.flags.allows(Access::Write));
            let new = Pte::Block { frame: block.frames().0, flags };
            let mut ticket = Ticket::PASSED;
            let gathered = mm.page_table.gather(&ram, start, new, || ticket = mm.shoot_down(&ram, range));
            gathered.map(|table| (table, ticket)).ok_or(Refusal::Busy)
        });
        let (table, ticket) = match ready {
            Ok(ready) => ready,
            Err(refusal) => {
                // The range is held, so the VMA and the table are what they were: this does not happen.
                debug_assert!(false, "{refusal:?} with all entries taken");
                if let Some(table) = mm.page_table.leaf_table(&ram, start) {
                    for (slot, raw) in table.iter().zip(entries) {
                        slot.resume(raw).give_back();
                    }
                }
                drop(pin);
                return Err(refusal);
            }
        };
        block.into_mapped();
        let mut pages = FrameList::new();
        let mut missing = TABLE_ENTRIES as u64;
        for old in entries.iter().filter_map(|&raw| old_page(&ram, raw)) {
            missing -= 1;
            if ram.frames.meta(old).dec_references() == 0 {
                pages.push(ram.frames, old);
            }
        }
        mm.count_pages(&pin, PageKind::Anon, missing);
        // Nobody has reached them since step 3.
        ram.free_all(pages);
        let mut tables = FrameList::new();
        tables.push(ram.frames, table);
        ram.defer(tables, Grace { epoch: Some(pin.epoch().now()), ticket });
        ram.event(Counter::ThpCollapseAlloc, start);
        Ok(())
    }

    /// The attributes of the VMA that covers `range`, which the caller holds, and the anon_vma that its pages name.
    fn vma_for_block(
        &self,
        pin: &Pin<'_>,
        range: AddrRange,
        terms: Terms,
    ) -> Result<(Snapshot, *const ()), Refusal> {
        let mm = self.mm();
        let mut rounds = 0;
        loop {
            let (vma, seen) = mm.vma_at(pin, range.start).ok_or(Refusal::NotMapped)?;
            if !seen.range.covers(range) || !for_blocks(mm, vma, &seen, terms) {
                return Err(Refusal::NotForBlocks);
            }
            match vma.anon() {
                Anon::Some(anon) => return Ok((seen, anon.page_owner().cast())),
                // No page has ever been stored to.
                Anon::None => return Err(Refusal::TooFew),
                // A call next door merges the record this very moment.
                Anon::Frozen | Anon::Closed => mm.ram(pin).relax(rounds),
            }
            rounds = rounds.saturating_add(1);
        }
    }
}

/// Where the collapser goes on.
enum Candidate {
    /// From the start: nothing is mapped from here on.
    None,
    /// From this address.
    NotBefore(u64),
    /// With this table.
    Table(u64),
}

/// The private page that `raw` maps; nothing for the page of zeros.
fn old_page<H: Host>(ram: &Ram<'_, H>, raw: Raw) -> Option<Frame> {
    let frame = Pte::decode::<H::Format>(raw).frame()?;
    ram.frames.meta(frame).flags().contains(FrameFlags::ANON).then_some(frame)
}

/// True when the VMA is one for blocks, as far as its attributes go.
fn for_blocks<H: Host>(mm: &Mm<H>, vma: &Vma<H>, seen: &Snapshot, terms: Terms) -> bool {
    let allowed = if terms.background {
        mm.huge_pages.allow(seen.flags)
    } else {
        !seen.flags.intersects(VmFlags::NOHUGEPAGE.union(VmFlags::UFFD_MODES))
    };
    let stays = !seen.flags.contains(VmFlags::DROPPABLE);
    allowed && stays && vma.object().is_none() && seen.flags.allows(Access::Read)
}
