//! Carrying the entries of the page table from one range to another: what `mremap` does to pages.
//!
//! # What it guarantees
//!
//! No byte changes, no store is lost, no frame is used anew while a processor may reach it through an old translation, and a walk of
//! the reverse mapping finds every page throughout, at the old address or the new.
//!
//! # How
//!
//! The call holds both ranges. The VMA of the old addresses is dead and out of the index, that of the new ones is not yet in it, so
//! every fault at either end gives up speculation, and waits for the range. What is left are faults that were
//! under way, sweeps of objects and walks of the reverse mapping, and processors with old translations. A table's worth at a time:
//!
//! 1. Lock the mappings of the object, and the anon_vma tree: no walk, no truncation, no write-back is at work on these pages.
//! 2. Take an entry in each table at the new place, so that no call next door closes it for being empty.
//! 3. Take the old entries, waiting for faults that own one. Such a fault has validated before the VMA was killed, and publishes, or
//!    will not validate, and gives back.
//! 4. Shoot the old translations down, and wait until accesses through them have ended. Nobody can make new ones.
//! 5. Publish what the entries were at the new place, and nothing at the old. A private page that only this space maps gets the number of its new address;
//!    for others the relocation is marked ([`relocations`](crate::rmap::relocations)).
//!
//! Linux publishes before it shoots down, and keeps the locks of both tables until it has (since the fix of CVE-2018-18281), so that
//! nobody takes a page away at the new place while it is in use through an old translation. Without locks of tables, the order here says the same:
//! whoever meets a page at the new place knows that nobody reaches it through the old one.
//!
//! Where all of an aligned 2 MiB goes to an aligned place, the entry of level 2 is carried, be it a table or a block. A fault that stands in
//! the table takes an entry of it, does not validate, and gives it back: wherever the table is by then.
//!
//! # Memory
//!
//! Tables that the new place may need, and those for blocks that must be divided, are set aside before the call's first change. Faults that were
//! under way may have made more tables since; should there be no memory for what these need, the call waits for some, as
//! layout changes do ([`change`](super::change)).
//!
//! # Who may break it
//!
//! Whoever waits for an entry while holding a lock of an object's mappings or of a tree other than the one that is locked here.

use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE, TABLE_ENTRIES};
use crate::error::OutOfMemory;
use crate::frame::{FrameFlags, FrameList, Ram};
use crate::host::{Host, Ticket};
use crate::machine::Cpu;
use crate::mm::{BLOCK_SIZE, BlockFrames, Mm};
use crate::object::{MappingList, Object};
use crate::page_table::{EMPTY, Level, Pte, Raw, Slot, SlotError};
use crate::rmap::AnonVma;
use crate::rmap::anon_vma::Tree;
use crate::rmap::relocations::Moving;
use crate::stats::Counter;
use crate::sync::Shared;
use alloc::vec::Vec;
use core::ops::ControlFlow;

/// What a move of entries has set aside.
pub(super) struct Luggage<'a, H: Host> {
    mm: &'a Mm<H>,
    cpu: &'a Cpu<H>,
    /// Frames for tables.
    tables: FrameList,
    /// Room for the entries of a table.
    entries: Vec<(u64, Raw)>,
}

impl<'a, H: Host> Luggage<'a, H> {
    /// What carrying `from` to `to` takes. Not while pinned. O(tables there are).
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(super) fn pack(
        mm: &'a Mm<H>,
        cpu: &'a Cpu<H>,
        from: AddrRange,
        to: u64,
    ) -> Result<Self, OutOfMemory> {
        let mut luggage = Self { mm, cpu, tables: FrameList::new(), entries: Vec::new() };
        luggage.entries.try_reserve_exact(TABLE_ENTRIES).map_err(|_| OutOfMemory)?;
        let mut needs = 0;
        // Behind the last table that was counted, of each level.
        let mut counted = [0; 3];
        mm.for_each_part(cpu, from, |ram, part| {
            let _ = mm.page_table.for_each_run(ram, part, |run| {
                if run.level == Level::PAGE && Slot::all_empty(run.slots) {
                    return ControlFlow::Continue(());
                }
                let new = at_new_place(part, from, to);
                let whole = is_whole(part, new.start);
                needs += usize::from(run.level == Level::BLOCK && !whole);
                for (level, counted) in counted.iter_mut().enumerate() {
                    // Tables of pages, of tables, and of tables of tables.
                    let shift = PAGE_SHIFT + 9 * (level as u32 + 1);
                    if level == 0 && whole {
                        continue;
                    }
                    let behind = ((new.end - 1) >> shift) + 1;
                    needs += behind.saturating_sub((new.start >> shift).max(*counted)) as usize;
                    *counted = (*counted).max(behind);
                }
                ControlFlow::Continue(())
            });
        });
        for _ in 0..needs {
            let frame = super::retry_with_memory(cpu, || {
                let pin = cpu.pin();
                mm.machine.frames().allocate(&pin).ok_or(OutOfMemory)
            })?;
            luggage.tables.push(mm.machine.frames(), frame);
        }
        Ok(luggage)
    }

    /// A frame that was set aside.
    fn frame(&mut self) -> Option<Frame> {
        self.tables.pop(self.mm.machine.frames())
    }

    /// Lets the CPU have a frame that was set aside for it. False when there is none.
    fn unpack(&mut self, ram: &Ram<'_, H>) -> bool {
        let frame = self.frame();
        if let Some(frame) = frame {
            ram.free(frame);
        }
        frame.is_some()
    }
}

impl<H: Host> Drop for Luggage<'_, H> {
    fn drop(&mut self) {
        while let Some(frame) = self.frame() {
            let pin = self.cpu.pin();
            self.mm.machine.frames().free(&pin, frame);
        }
    }
}

/// Where `part` of `from` comes to be.
fn at_new_place(part: AddrRange, from: AddrRange, to: u64) -> AddrRange {
    AddrRange::new(to + (part.start - from.start), to + (part.end - from.start))
}

/// True when `part` is what an entry of level 2 maps, and is to be at `to`.
fn is_whole(part: AddrRange, to: u64) -> bool {
    part.len() == BLOCK_SIZE && part.start.is_multiple_of(BLOCK_SIZE) && to.is_multiple_of(BLOCK_SIZE)
}

/// Entries being carried.
pub(super) struct Carrier<'a, H: Host> {
    pub(super) mm: &'a Mm<H>,
    pub(super) cpu: &'a Cpu<H>,
    pub(super) from: AddrRange,
    pub(super) to: u64,
    /// What is mapped there.
    pub(super) object: Option<&'a Shared<Object<H>>>,
    /// Where its private pages are found.
    pub(super) anon: Option<&'a AnonVma<H>>,
    /// For mappings with private pages.
    pub(super) moving: Option<&'a Moving>,
}

/// What keeps others from the pages.
struct Locks<'a, H: Host> {
    _mappings: Option<lock_api::MutexGuard<'a, H::Mutex, MappingList>>,
    _tree: Option<Tree<'a, H>>,
}

/// The entries that keep the tables at the new place.
type Anchors = [Option<u64>; 2];

impl<'a, H: Host> Carrier<'a, H> {
    /// Carries all entries. Blocks; not while pinned.
    pub(super) fn carry(&self, luggage: &mut Luggage<'_, H>) {
        let mut at = self.from.start;
        while let Some(part) = self.next(at) {
            let new = at_new_place(part, self.from, self.to);
            if !(is_whole(part, new.start) && self.carry_upper(part, new.start, luggage)) {
                self.divide(part, luggage);
                self.carry_entries(part, new, luggage);
            }
            at = part.end;
        }
    }

    /// The next table or block with something in it, as far as it lies in the range.
    fn next(&self, at: u64) -> Option<AddrRange> {
        let pin = self.cpu.pin();
        let mut found = None;
        let _ =
            self.mm.page_table.for_each_run(&self.mm.ram(&pin), AddrRange::new(at, self.from.end), |run| {
                if run.level == Level::PAGE && Slot::all_empty(run.slots) {
                    return ControlFlow::Continue(());
                }
                let span = AddrRange::new(run.addr, run.address_of(run.slots.len()));
                found = Some(span.intersection(self.from));
                ControlFlow::Break(())
            });
        found
    }

    fn lock(&self) -> Locks<'a, H> {
        let locks = u64::from(self.object.is_some()) + u64::from(self.anon.is_some());
        {
            let pin = self.cpu.pin();
            self.mm.machine.stats().add(&pin, Counter::RmapLock, locks);
        }
        // In this order: see `mm`.
        let mappings = self.object.map(|object| object.lock_mappings());
        Locks {
            _mappings: mappings,
            _tree: mutant!("carry_without_tree", self.anon, None).map(AnonVma::lock_tree),
        }
    }

    /// Waits for memory, in the midst of a change.
    #[cold]
    fn wait_for_memory(&self, rounds: &mut u32) {
        self.cpu.quiesce();
        self.mm.machine.host().relax(self.cpu.id(), *rounds);
        *rounds = rounds.saturating_add(1);
    }

    /// Makes the block at `part` a table.
    fn divide(&self, part: AddrRange, luggage: &mut Luggage<'_, H>) {
        let mut rounds = 0;
        loop {
            let pin = self.cpu.pin();
            let ram = self.mm.ram(&pin);
            let slot = self.mm.page_table.block_slot(&ram, part.start);
            if slot.is_none_or(|slot| Pte::block::<H::Format>(slot.wait_not_busy(&ram)).is_none()) {
                return;
            }
            let mut table = luggage.frame().or_else(|| ram.allocate());
            let done = self.mm.divide_block(&ram, part.start, &mut table);
            if let Some(unused) = table {
                ram.free(unused);
            }
            drop(pin);
            if done.is_ok() {
                return;
            }
            self.wait_for_memory(&mut rounds);
        }
    }

    /// Carries the entry of level 2 at `part`. False when there is a table at the new place.
    fn carry_upper(&self, part: AddrRange, to: u64, luggage: &mut Luggage<'_, H>) -> bool {
        let page_table = &self.mm.page_table;
        let mut rounds = 0;
        loop {
            let locks = self.lock();
            let pin = self.cpu.pin();
            let ram = self.mm.ram(&pin);
            let new = match page_table.slot_at(&ram, to, Level::BLOCK) {
                Ok(new) => new,
                Err(SlotError::OutOfMemory) if luggage.unpack(&ram) => continue,
                Err(_) => {
                    drop((pin, locks));
                    self.wait_for_memory(&mut rounds);
                    continue;
                }
            };
            if new.wait_not_busy(&ram) != EMPTY {
                // A table, or one that is about to be unlinked.
                return false;
            }
            let Some(old) = page_table.block_slot(&ram, part.start) else { return true };
            let raw = old.wait_not_busy(&ram);
            if raw == EMPTY {
                return true;
            }
            let table = page_table.leaf_table(&ram, part.start);
            let (Some(new), Some(old)) = (new.take(EMPTY), old.take(raw)) else { continue };
            if let Some((first, _)) = Pte::block::<H::Format>(raw) {
                for (frame, addr) in BlockFrames(first).iter().zip((to..).step_by(PAGE_SIZE as usize)) {
                    self.renumber(&ram, frame, addr);
                }
            } else if let Some(table) = table {
                for (slot, addr) in table.iter().zip((to..).step_by(PAGE_SIZE as usize)) {
                    // Faults that were under way are waited for: they publish a page of the old address, or nothing.
                    self.renumber_entry(&ram, slot.wait_not_busy(&ram), addr);
                }
            }
            let ticket = self.mm.shoot_down(&ram, part);
            new.keep();
            old.keep();
            drop(pin);
            self.cpu.await_stores(ticket);
            let pin = self.cpu.pin();
            let ram = self.mm.ram(&pin);
            // Taken, so they are where they were.
            let at = |addr| page_table.block_slot(&ram, addr);
            if let (Some(new), Some(old)) = (at(to), at(part.start)) {
                new.resume(EMPTY).publish(raw);
                old.resume(raw).publish(EMPTY);
            }
            return true;
        }
    }

    /// Carries the entries of one table.
    fn carry_entries(&self, part: AddrRange, new: AddrRange, luggage: &mut Luggage<'_, H>) {
        let page_table = &self.mm.page_table;
        let mut rounds = 0;
        let (locks, anchors) = loop {
            let locks = self.lock();
            let pin = self.cpu.pin();
            let ram = self.mm.ram(&pin);
            match self.anchor(&ram, new) {
                Ok(anchors) => break (locks, anchors),
                Err(SlotError::OutOfMemory) if luggage.unpack(&ram) => {}
                Err(_) => {
                    drop((pin, locks));
                    self.wait_for_memory(&mut rounds);
                }
            }
        };
        let mut ticket = Ticket::PASSED;
        {
            let pin = self.cpu.pin();
            let ram = self.mm.ram(&pin);
            luggage.entries.clear();
            let mut pages = false;
            page_table.for_each_slot(&ram, part, |addr, slot| {
                if let Some(taken) = slot.take_any(&ram) {
                    if taken.previous() == EMPTY {
                        taken.give_back();
                    } else {
                        pages |= matches!(Pte::decode::<H::Format>(taken.previous()), Pte::Page { .. });
                        luggage.entries.push((addr, taken.keep()));
                    }
                }
                ControlFlow::Continue(())
            });
            if pages {
                ticket = self.mm.shoot_down(&ram, part);
            }
        }
        mutant!("carry_not_awaited", self.cpu.await_stores(ticket), ());
        let pin = self.cpu.pin();
        let ram = self.mm.ram(&pin);
        for &(addr, raw) in &luggage.entries {
            let to = new.start + (addr - part.start);
            self.renumber_entry(&ram, raw, to);
            if let Some(slot) = page_table.lookup(&ram, to) {
                if anchors.contains(&Some(to)) {
                    slot.resume(EMPTY).publish(raw);
                } else {
                    fill(&ram, slot, raw);
                }
            }
            if let Some(slot) = page_table.lookup(&ram, addr) {
                slot.resume(raw).publish(EMPTY);
            }
        }
        for at in anchors.into_iter().flatten() {
            let used = luggage.entries.iter().any(|&(addr, _)| new.start + (addr - part.start) == at);
            if let Some(slot) = page_table.lookup(&ram, at).filter(|_| !used) {
                slot.resume(EMPTY).give_back();
            }
        }
        drop(locks);
    }

    /// Takes an entry in each table at the new place of a part, making those that are missing.
    fn anchor(&self, ram: &Ram<'_, H>, new: AddrRange) -> Result<Anchors, SlotError> {
        let second = (new.start & !(BLOCK_SIZE - 1)) + BLOCK_SIZE;
        let firsts = [Some(new.start), Some(second).filter(|&at| at < new.end)];
        let mut anchors = [None; 2];
        for (n, addr) in firsts.into_iter().flatten().enumerate() {
            let taken = loop {
                match self.mm.page_table.slot(ram, addr) {
                    // What was there is unmapped and swept, so that it is empty, or will be.
                    Ok(slot) => match slot.take(EMPTY) {
                        Some(taken) => break Ok(taken),
                        None => ram.relax(0),
                    },
                    Err(SlotError::Changed) => ram.relax(0),
                    Err(error) => break Err(error),
                }
            };
            match taken {
                Ok(taken) => {
                    taken.keep();
                    anchors[n] = Some(addr);
                }
                Err(error) => {
                    for slot in anchors.iter().flatten().filter_map(|&at| self.mm.page_table.lookup(ram, at))
                    {
                        slot.resume(EMPTY).give_back();
                    }
                    return Err(error);
                }
            }
        }
        Ok(anchors)
    }

    /// What there is to do about the number of a page that comes to be at `addr`. Under the locks, by who owns the entry.
    fn renumber_entry(&self, ram: &Ram<'_, H>, raw: Raw, addr: u64) {
        match Pte::decode::<H::Format>(raw) {
            Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => self.renumber(ram, frame, addr),
            Pte::Swap(_) | Pte::Migration(_) => {
                if let Some(moving) = self.moving {
                    self.mm.relocations.carry_unknown(moving, addr);
                }
            }
            _ => {}
        }
    }

    fn renumber(&self, ram: &Ram<'_, H>, frame: Frame, addr: u64) {
        if !ram.frames.contains(frame) {
            return; // a device's
        }
        let meta = ram.frames.meta(frame);
        if !meta.flags().contains(FrameFlags::ANON) {
            return;
        }
        // Forks are kept away, so nobody joins. Should the only other owner leave now, the relocation is one too many.
        if meta.references() == 1 {
            meta.set_index(addr >> PAGE_SHIFT);
        } else if let Some(moving) = self.moving {
            self.mm.relocations.carry(moving, meta.index(), addr);
        }
    }
}

/// Publishes `raw` in an entry of a table that is kept by an anchor, as soon as faults that are too late let go of it.
fn fill<H: Host>(ram: &Ram<'_, H>, slot: &Slot, raw: Raw) {
    let mut rounds = 0;
    loop {
        if let Some(taken) = slot.take(EMPTY) {
            return taken.publish(raw);
        }
        ram.relax(rounds);
        rounds = rounds.saturating_add(1);
    }
}
