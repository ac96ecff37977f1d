//! Faults that concern 2 MiB at once: first touches that make a block, and stores to a block that is mapped read-only.
//!
//! # First touch
//!
//! A store to private memory whose entry of level 2 is empty makes a block when the VMA covers all of it and wants it. To
//! zero 2 MiB takes 100 us, too long for a pin and much too long for an entry, so the attempt ends ([`Stop::Block`]), the block is
//! allocated and zeroed with nothing held, and a second attempt installs it: takes the entry while it is still empty,
//! looks at the VMA's counter, makes the 512 frames private pages (a microsecond, the longest that a fault owns
//! an entry), publishes. Whatever speaks against it then, another fault being first as well as a VMA that has been cut, the block
//! is given back and the fault goes on with a small page. So a fault tries at most once.
//!
//! A load maps the page of zeros by a small entry, and with it a table, which keeps blocks away until the collapser comes: who
//! reads memory before it is written is as a rule looking at how much of it is in use. Linux has a huge page of zeros
//! for this, which saves the table and costs a block when the first store comes.
//!
//! A block's frames come from the pool of the machine, whose lock all CPUs share: once in 512 pages, while the caches of
//! single frames go there once in 64.
//!
//! # A fault on the locked path
//!
//! holds one page steady, not 2 MiB, so it makes no blocks (under [`Locking::Classic`] it holds the whole space, and does).
//!
//! # Stores to a block that may not be written
//!
//! If nobody else maps any of its frames, all of it becomes writable in place. A call that takes the permission away from a part
//! of it at the same moment has yet to divide the block, and will meet it as this fault left it. Else the block is divided, and the
//! fault starts over and copies the one page, as Linux has done since 5.8.

use super::{Attempt, Course, Stop, Translation, private};
use crate::addr::{Frame, PAGE_SHIFT, TABLE_ENTRIES};
use crate::error::FaultError;
use crate::frame::BLOCK_FRAMES;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::policy::NUMBER;
use crate::mm::rss::PageKind;
use crate::mm::{BlockFrames, Locking, SpareBlock, block_around};
use crate::page_table::{EMPTY, Level, Pte, PteFlags, Slot, SlotError, Walk};
use crate::stats::Counter;
use crate::vma::{Access, VmFlags};

/// What there is instead of a missing entry for a page.
pub(super) enum Above<'a> {
    /// The entry: tables have been made.
    Slot(&'a Slot),
    /// A block, which serves.
    Block(Translation),
}

/// There is no entry for the page at `addr`: a table is missing, or a block is in its place.
#[cold]
pub(super) fn above<'a, H: Host>(
    attempt: &Attempt<'a, H>,
    addr: u64,
    access: Access,
) -> Result<Above<'a>, Stop<H>> {
    let (ram, page_table) = (&attempt.ram, &attempt.mm.page_table);
    if attempt.blocks && access == Access::Write && may_be_block(attempt, addr) {
        let slot = page_table.slot_at(ram, addr, Level::BLOCK).map_err(|error| missing(attempt, error))?;
        if slot.load() == EMPTY {
            private::prepare_anon(attempt)?;
            return Err(Stop::Block(attempt.seen.flags));
        }
    }
    match page_table.slot(ram, addr) {
        Ok(slot) => return Ok(Above::Slot(slot)),
        Err(SlotError::OutOfMemory) => return Err(Stop::Fail(FaultError::OutOfMemory)),
        Err(SlotError::Changed) => {}
    }
    match page_table.walk(ram, addr) {
        Some(Walk { slot, raw, level: Level::BLOCK }) if Pte::block::<H::Format>(raw).is_some() => {
            on_block(attempt, addr, access, slot, raw).map(Above::Block)
        }
        Some(Walk { level: Level::PAGE, .. }) => Err(Stop::Again),
        _ => Err(missing(attempt, SlotError::Changed)),
    }
}

fn missing<H: Host>(attempt: &Attempt<'_, H>, error: SlotError) -> Stop<H> {
    match error {
        SlotError::OutOfMemory => Stop::Fail(FaultError::OutOfMemory),
        SlotError::Changed if attempt.seq.is_some() => Stop::GiveUp(Counter::SpfPmdChanged),
        SlotError::Changed => Stop::Again,
    }
}

/// True when a block may be made around `addr`, as far as the VMA goes.
fn may_be_block<H: Host>(attempt: &Attempt<'_, H>, addr: u64) -> bool {
    let (mm, seen) = (attempt.mm, &attempt.seen);
    mm.huge_pages.allow(seen.flags)
        && !seen.flags.contains(VmFlags::DROPPABLE)
        && seen.range.covers(block_around(addr))
        && attempt.vma.object().is_none()
        && (attempt.seq.is_some() || mm.locking == Locking::Classic)
}

/// The page at `addr` is part of a block.
fn on_block<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    access: Access,
    slot: &Slot,
    raw: u64,
) -> Result<Translation, Stop<H>> {
    let Some((first, flags)) = Pte::block::<H::Format>(raw) else { return Err(Stop::Again) };
    let translation = |flags| Translation { frame: frame_at(first, addr), flags };
    if access == Access::Write && flags.contains(PteFlags::READ) && !flags.contains(PteFlags::WRITE) {
        return make_writable(attempt, addr, slot, raw, first).map(translation);
    }
    let needs = if access == Access::Execute { PteFlags::EXEC } else { PteFlags::READ };
    if !flags.contains(needs) {
        // The VMA allows it and the entry does not: a change of protection is under way.
        return Err(super::handler::changing(attempt));
    }
    Ok(translation(flags))
}

/// The frame of the page at `addr` in the block that starts with `first`.
#[inline]
fn frame_at(first: Frame, addr: u64) -> Frame {
    Frame(first.0 + ((addr >> PAGE_SHIFT) as usize % TABLE_ENTRIES) as u32)
}

/// A store to a block that is mapped read-only: makes all of it writable, or divides it.
fn make_writable<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    slot: &Slot,
    raw: u64,
    first: Frame,
) -> Result<PteFlags, Stop<H>> {
    let ram = &attempt.ram;
    let frames = BlockFrames(first);
    if attempt.seen.range.covers(block_around(addr)) && frames.have_one_owner(ram) {
        let taken = slot.take(raw).ok_or(Stop::Again)?;
        if !attempt.still_valid() {
            return Err(Stop::GiveUp(Counter::SpfVmaChanged));
        }
        // Once more: nobody can join while the entry is taken, for whoever forks must pass it; and before, the frames
        // may have been freed, and be other pages now.
        if frames.have_one_owner(ram) {
            let flags = private::writable_pte(attempt.seen.flags);
            taken.publish(Pte::Block { frame: first, flags }.encode::<H::Format>());
            ram.count(Counter::PgReuse);
            return Ok(flags);
        }
        return Err(Stop::Again);
    }
    let mut table = ram.allocate();
    let divided = attempt.mm.divide_block(ram, addr, &mut table);
    if let Some(unused) = table {
        ram.free(unused);
    }
    divided.map_err(|_| Stop::Fail(FaultError::OutOfMemory))?;
    Err(Stop::Again)
}

/// Maps the block whose frames are `frames`, zeroed, around `addr`, where a VMA with the attributes `wanted` was.
fn install<H: Host>(
    attempt: &Attempt<'_, H>,
    addr: u64,
    frames: BlockFrames,
    wanted: VmFlags,
) -> Result<(), Stop<H>> {
    // By another policy it would be elsewhere.
    if attempt.seen.flags.intersection(NUMBER) != wanted.intersection(NUMBER) {
        return Err(Stop::Again);
    }
    if !attempt.seen.flags.allows(Access::Write) || !may_be_block(attempt, addr) {
        return Err(Stop::Again);
    }
    let ram = &attempt.ram;
    let anon = private::prepare_anon(attempt)?;
    let slot = attempt.mm.page_table.slot_at(ram, addr, Level::BLOCK);
    let slot = slot.map_err(|error| missing(attempt, error))?;
    let taken = slot.take(EMPTY).ok_or(Stop::Again)?;
    if !attempt.still_valid() {
        return Err(Stop::GiveUp(Counter::SpfVmaChanged));
    }
    frames.own(ram, anon.page_owner().cast(), block_around(addr).start);
    let flags = private::writable_pte(attempt.seen.flags);
    taken.publish(Pte::Block { frame: frames.0, flags }.encode::<H::Format>());
    attempt.mm.count_pages(ram.pin, PageKind::Anon, BLOCK_FRAMES as u64);
    Ok(())
}

impl<H: Host> Course<'_, H> {
    /// Makes a block for a VMA with attributes `flags` and maps it, if it is still wanted then, and there; the next attempt finds it, or makes do without.
    ///
    /// # Errors
    /// As [`recover`](Self::recover).
    pub(super) fn map_block(&mut self, cpu: &Cpu<H>, flags: VmFlags) -> Result<(), FaultError> {
        self.blocks = false;
        let addr = self.addr;
        let Some(block) = SpareBlock::try_new(cpu, self.mm, flags, addr) else {
            event(cpu, Counter::ThpFaultFallback, addr);
            return Ok(());
        };
        block.for_each(|ram, _, frame| ram.zero(frame));
        // The fault is counted by the attempt that ends it.
        let counted = core::mem::replace(&mut self.counted, false);
        let installed = self.attempt(cpu, |attempt| install(attempt, addr, block.frames(), flags));
        self.counted = counted;
        match installed {
            Ok(()) => {
                block.into_mapped();
                event(cpu, Counter::ThpFaultAlloc, addr);
                if !counted {
                    let pin = cpu.pin();
                    cpu.machine().stats().add(&pin, Counter::PgPopulate, BLOCK_FRAMES as u64);
                }
                Ok(())
            }
            Err(stop) => {
                drop(block);
                self.recover(cpu, stop)
            }
        }
    }
}

fn event<H: Host>(cpu: &Cpu<H>, kind: Counter, addr: u64) {
    let pin = cpu.pin();
    cpu.machine().ram(&pin).event(kind, addr);
}
