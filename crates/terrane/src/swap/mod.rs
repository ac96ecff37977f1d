//! Swap: pages that are elsewhere than in memory.
//!
//! # What it guarantees
//!
//! A page is in memory or in its slot, and nobody ever sees anything else for it; to swap it out stops no space, and a fault that
//! needs it meanwhile waits for no writing. A device that fails loses nothing that it had not taken before: a page that cannot be
//! written stays in memory, and one that cannot be read is a bus error for whoever touches it, each time until it can be read.
//!
//! # How a private page is swapped out
//!
//! By [`reclaim`](crate::reclaim), in the order of these steps:
//!
//! 1. A slot is taken. Under the lock of the reverse mapping, every entry that maps the page is taken, found to map it still, and
//!    published as `Swap(slot)`. Its reference to the frame goes, its count in the slot comes. With the first of them the slot comes to
//!    *know* the frame, with a reference of its own, and reclaim takes one too and the frame's `LOCKED`.
//! 2. The translations are shot down, and the stores under way awaited. Until then the frame is `UNSETTLED`, and no fault maps it: mapped
//!    read-only, it would be copied by the next store, or shared by a fork that sees nothing to wait for, without a store that is
//!    under way through the old translation. From here on the frame stands still: a fault may map it again, but read-only, because its references
//!    are more than one.
//! 3. The page is written to the device, with nothing held.
//! 4. If nothing maps it by then, and the device took it, the slot forgets the frame, which is free. Else it stays what it is, a page
//!    that is in memory, and known to the slot for those entries that still say `Swap`.
//!
//! An entry that says `Migration` for the time of step 3, as some systems have it, is not needed: between entry and page there is the
//! slot, and a fault finds the page through it at any time. To put a page back is to leave it there.
//!
//! # How it comes back
//!
//! A fault that meets `Swap(slot)` takes the entry and looks whether the slot knows a frame. If so it maps that, writable at once when
//! nobody else counts on slot or frame; while the frame is unsettled it gives the entry back and starts over. If not, it becomes a helper of the slot, gives the entry back, and reads the page
//! holding nothing else; the first who has read it makes its frame known, and all start over. Pages that were shared after
//! a fork are shared again: all of their entries lead to one slot.
//!
//! # What everybody else has to do about it
//!
//! | who | does |
//! |---|---|
//! | unmap, `DONTNEED`, truncation | `Swap::drop_entry` for each `Swap` it took out |
//! | fork | takes the entry, `Swap::add_entry` for the child |
//! | protect | nothing but a shoot-down if the slot knows a frame (`Swap::is_in_memory`): step 2 may not be through |
//! | collapse | leaves the table alone |
//! | a move within a space | moves the entry as any other |
//!
//! # Pages that are moved
//!
//! A page moves to another frame ([`reclaim::migrate`](crate::reclaim::migrate)) by steps 1 and 2, with a slot that has no device. When nothing maps the
//! page, its bytes are copied and the slot knows the new frame instead. Then the entries are made to map it, those that can be had;
//! the others do so at their next fault, as if the page had been swapped out and were still in memory.
//!
//! Shared memory without a file swaps its pages too: the slot of the page cache says so instead of an entry
//! ([`object`](crate::object)). There a fault waits for the writing, since the page is taken out of use first.
//!
//! # Devices
//!
//! The number of a slot says which device it is on. A device that goes out of use is closed first, so that it takes no more pages; then its slots are
//! gone over, and each page is read ([`reclaim::swap_off`](crate::reclaim)): the entries of a private one are made to map it, as far as
//! they may be had, and a slot that is left knows its page in memory. So at the end the device has nothing that is not elsewhere, and is asked for
//! nothing. Who takes a slot looks at the device after, and who closes a device looks at the slots after: Dekker's pattern.
//!
//! # Who may break it
//!
//! Whoever looks at what is behind a `Page` entry without owning it: it may be swapped out and free the next moment.

#[cfg(terrane_loom)]
pub mod bare;
mod slots;

use crate::addr::{Frame, PAGE_SIZE};
use crate::error::{Error, FaultError, OutOfMemory};
use crate::frame::{FrameFlags, FrameList, Ram};
use crate::host::{Host, IoError};
use crate::machine::{Cpu, Machine};
use crate::stats::Counter;
use crate::sync::Pin;
use crate::sync::atomic::{AtomicBool, Ordering, fence};
use crate::sync::once::SetOnce;
use alloc::boxed::Box;
use core::slice;
use slots::{Locked, Slots};

/// Where swapped pages go: a file, a partition, memory elsewhere. Slots are of [`PAGE_SIZE`] bytes.
pub trait SwapDevice: Send + Sync + 'static {
    /// How many slots it has, from number 0 on. Asked once.
    fn slots(&self) -> u32;

    /// Fills `page` with what was written to `slot` last. May block.
    ///
    /// # Errors
    /// [`IoError`]: a bus error for who needs the page.
    fn read(&self, slot: u32, page: &mut [u8]) -> Result<(), IoError>;

    /// Writes `page` to `slot`. May block.
    ///
    /// # Errors
    /// [`IoError`]: the page stays in memory.
    fn write(&self, slot: u32, page: &[u8]) -> Result<(), IoError>;
}

/// The swap of a machine: nothing at first, then up to eight devices in its life, each until it is taken out of use. The first that has a free
/// slot takes a page.
pub struct Swap {
    /// In the order in which they came.
    areas: [SetOnce<Area>; AREAS],
    /// Slots without a device, for pages that are moved.
    transit: Slots,
}

/// Devices at most.
const AREAS: usize = 8;
/// Slots of a device at most, as a power of two: a device's number is in the bits above.
const AREA_SHIFT: u32 = 29;
/// The number of the first slot without a device: behind all that devices have.
const TRANSIT: u64 = 1 << 32;
/// Pages that can be on the move at a time; slots of pages that nobody has touched since are among them.
const TRANSIT_SLOTS: usize = if cfg!(terrane_loom) { 4 } else { 1024 };

struct Area {
    device: Box<dyn SwapDevice>,
    slots: Slots,
    /// Takes no more pages.
    off: AtomicBool,
}

/// What is to be done for a slot of a device that goes out of use.
pub(crate) enum Emptying {
    /// Nothing: it is free.
    Free,
    /// Somebody is at work on it.
    Busy,
    /// The page is in memory.
    Known(Frame),
    /// It must be read; the caller has become a helper and goes to [`Swap::read_in`].
    Away,
    /// It is this page of the object at this address, if that is not at its end.
    Object(*mut (), u64),
}

/// What a fault finds behind an entry that says `Swap`.
pub(crate) enum Found {
    /// The page is in memory: an entry may map it, and counts for one of its references, no longer for the slot.
    Page {
        /// Its frame.
        frame: Frame,
        /// Nobody else has it: it may be written.
        alone: bool,
    },
    /// It is in memory, and stores to it may be under way: nothing has been done, and in a moment it can be had.
    Unsettled,
    /// It must be read; the caller has become a helper and goes to [`Swap::read_in`].
    Away,
}

/// A slot in which a page is being swapped out, with its frame.
pub(crate) struct Leaving {
    slot: u64,
    frame: Frame,
}

impl Leaving {
    /// The slot.
    pub(crate) fn slot(&self) -> u64 {
        self.slot
    }
}

/// How a try to free the frame of a page that is being swapped out ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Left {
    /// The frame is free.
    Freed,
    /// The page stays in memory.
    Stayed,
}

impl Swap {
    pub(crate) fn try_new(cpus: usize) -> Result<Self, OutOfMemory> {
        let transit = Slots::try_new(TRANSIT, TRANSIT_SLOTS, cpus)?;
        Ok(Self { areas: core::array::from_fn(|_| SetOnce::new()), transit })
    }

    /// The devices there are, in use or not.
    fn areas(&self) -> impl Iterator<Item = &Area> {
        self.areas.iter().map_while(SetOnce::get)
    }

    /// The device of slot `number`.
    #[inline]
    fn area_of(&self, number: u64) -> Option<&Area> {
        self.areas.get(usize::try_from(number >> AREA_SHIFT).ok()?)?.get()
    }

    /// True when pages can be swapped out.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.areas().any(Area::is_on)
    }

    /// Slots of the devices in use, and how many of them are taken; exact at rest. Of a device that is out of use those count that name
    /// pages in memory.
    pub fn usage(&self) -> (usize, usize) {
        self.areas().fold((0, 0), |(total, used), area| {
            let slots = if area.is_on() { area.slots.total() } else { area.slots.used() };
            (total + slots, used + area.slots.used())
        })
    }

    /// The slots of which `number` is one.
    fn slots(&self, number: u64) -> Option<&Slots> {
        if number >= TRANSIT { Some(&self.transit) } else { self.area_of(number).map(|area| &area.slots) }
    }

    fn lock(&self, number: u64, pin: &Pin<'_>) -> Option<Locked<'_>> {
        self.slots(number)?.lock(number, pin.cpu())
    }

    /// True when the page behind an entry that says `Swap(number)` is in memory, so that translations of it may be in use
    /// still. For a caller that holds the address and found the entry this moment; a hint when the entry changes meanwhile.
    pub(crate) fn is_in_memory<H: Host>(&self, ram: &Ram<'_, H>, number: u64) -> bool {
        let frame = self.slots(number).and_then(|slots| slots.peek(number, ram.pin.cpu()));
        mutant!("swap_protected_without_shoot_down", frame.is_some(), false)
    }

    /// One more entry says `Swap(number)`: a fork's, made while the parent's entry is owned. Returns whether translations may be
    /// in use still ([`is_in_memory`](Self::is_in_memory)).
    ///
    /// # Errors
    /// [`OutOfMemory`] when there are four billion.
    pub(crate) fn add_entry<H: Host>(&self, ram: &Ram<'_, H>, number: u64) -> Result<bool, OutOfMemory> {
        let Some(slot) = self.lock(number, ram.pin) else { return Ok(false) };
        if slot.add_entry() { Ok(slot.frame().is_some()) } else { Err(OutOfMemory) }
    }

    /// An entry that said `Swap(number)` says it no more. A frame that is free with it goes to `list`. Returns whether
    /// translations may be in use still: then the caller shoots down, and frees the list behind that.
    pub(crate) fn drop_entry<H: Host>(&self, ram: &Ram<'_, H>, number: u64, list: &mut FrameList) -> bool {
        let Some(slot) = self.lock(number, ram.pin) else { return false };
        let in_memory = slot.frame().is_some();
        let frame = slot.remove_entry(ram.frames);
        drop(slot);
        if let Some(frame) = frame
            && ram.meta(frame).dec_references() == 0
        {
            list.push(ram.frames, frame);
        }
        mutant!("swap_dropped_without_shoot_down", in_memory, false)
    }

    /// Entries that say `Swap(number)`, at least 1; a hint, for a caller that has seen one.
    pub(crate) fn sharers<H: Host>(&self, ram: &Ram<'_, H>, number: u64) -> u32 {
        self.slots(number).and_then(|slots| slots.count(number, ram.pin.cpu())).unwrap_or(1).max(1)
    }

    /// Whether the entry of the caller, which owns it and says `Swap(number)`, is all that has the page. It stays so while the entry
    /// is owned: who forks must pass it. `None` while the page is on its way out.
    pub(crate) fn is_alone<H: Host>(&self, ram: &Ram<'_, H>, number: u64) -> Option<bool> {
        let Some(slot) = self.lock(number, ram.pin) else { return Some(false) };
        let Some(frame) = slot.frame() else { return Some(slot.entries() == 1) };
        let meta = ram.meta(frame);
        // The slot has one reference, and who writes it out another.
        if meta.flags().contains(FrameFlags::LOCKED) {
            return None;
        }
        Some(slot.entries() == 1 && meta.references() == 1)
    }

    /// Says that the page of slot `number` belongs to another anon_vma, and has another number there. By who has found that it
    /// [`is_alone`](Self::is_alone), with the lock of the page's tree: as for a page in memory, who looks for its entries looks again under that.
    pub(crate) fn renumber<H: Host>(&self, ram: &Ram<'_, H>, number: u64, owner: *mut (), index: u64) {
        let Some(slot) = self.lock(number, ram.pin) else { return };
        if let Some(frame) = slot.frame() {
            let meta = ram.meta(frame);
            // The index first: who sees the new owner sees the new index.
            meta.set_index(index);
            meta.set_owner(owner);
        }
        slot.set_identity(owner, index);
    }

    /// What a fault that owns an entry which says `Swap(number)` finds there.
    pub(crate) fn find<H: Host>(&self, ram: &Ram<'_, H>, number: u64) -> Option<Found> {
        let slot = self.lock(number, ram.pin)?;
        let Some(frame) = slot.frame() else {
            slot.add_helper();
            return Some(Found::Away);
        };
        let meta = ram.meta(frame);
        let unsettled = meta.flags().contains(FrameFlags::UNSETTLED);
        if mutant!("swap_maps_unsettled", unsettled, false) {
            return Some(Found::Unsettled);
        }
        // The slot has one, and keeps it while it is locked.
        meta.inc_references();
        if slot.remove_entry(ram.frames).is_some() {
            let left = meta.dec_references();
            return Some(Found::Page { frame, alone: mutant!("swap_alone_too_soon", left == 1, true) });
        }
        Some(Found::Page { frame, alone: false })
    }

    /// Reads the page of slot `number` into memory, unless it is there by now, and ends the help that
    /// [`find`](Self::find) began. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`FaultError::Io`], [`FaultError::OutOfMemory`].
    pub(crate) fn read_in<H: Host>(&self, cpu: &Cpu<H>, number: u64) -> Result<(), FaultError> {
        let machine = &**cpu.machine();
        let Some(area) = self.area_of(number) else { return Err(FaultError::Io) };
        let begun = {
            let pin = cpu.pin();
            let needed = |slot: &Locked<'_>| slot.frame().is_none() && slot.entries() > 0;
            match self.lock(number, &pin) {
                Some(slot) if needed(&slot) => {
                    drop(slot);
                    let frame = machine.ram(&pin).allocate();
                    if frame.is_none()
                        && let Some(slot) = self.lock(number, &pin)
                    {
                        slot.remove_helper();
                    }
                    frame.ok_or(FaultError::OutOfMemory).map(Some)
                }
                Some(slot) => {
                    slot.remove_helper();
                    Ok(None)
                }
                None => Ok(None),
            }
        };
        let Some(frame) = begun? else { return Ok(()) };
        let result = area.read(machine, number, frame);
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        let mut unused = Some(frame);
        if let Some(slot) = self.lock(number, &pin) {
            let absent = mutant!("swap_reads_over", slot.frame().is_none(), true);
            if result.is_ok() && absent && slot.entries() > 0 {
                slot.know_fresh_frame(ram.frames, frame, FrameFlags::empty());
                unused = None;
            }
            slot.remove_helper();
        }
        if let Some(frame) = unused {
            ram.free(frame);
        }
        ram.count(if result.is_ok() { Counter::PswpIn } else { Counter::SwapReadError });
        result.map_err(|IoError| FaultError::Io)
    }

    /// Takes a slot for a private page; `None` when all are in use, or there is no device.
    pub(crate) fn begin<H: Host>(&self, ram: &Ram<'_, H>) -> Option<u64> {
        self.areas().filter(|area| area.is_on()).find_map(|area| {
            let number = area.slots.allocate(ram.pin.cpu())?;
            // Dekker's pattern: slot taken, fence, device looked at; device marked, fence, slots looked at.
            fence(Ordering::SeqCst);
            if area.is_on() {
                return Some(number);
            }
            self.cancel(ram, number);
            None
        })
    }

    /// Takes a slot without a device, for a page that is to be moved; `None` when all are in use.
    pub(crate) fn begin_move<H: Host>(&self, ram: &Ram<'_, H>) -> Option<u64> {
        self.transit.allocate(ram.pin.cpu())
    }

    /// Gives the page the frame `to`, fresh from the allocator, if nothing maps it: its bytes are copied, and the old frame is freed. All
    /// its translations have been shot down and their stores awaited. Ends what [`leave`](Self::leave) began. False when the
    /// page stays where it is; then `to` is still the caller's.
    pub(crate) fn move_to<H: Host>(&self, ram: &Ram<'_, H>, leaving: Leaving, to: Frame) -> bool {
        let Leaving { slot: number, frame } = leaving;
        let meta = ram.meta(frame);
        let mut moved = false;
        if let Some(slot) = self.lock(number, ram.pin) {
            // The slot's reference and ours. Nobody maps it, and nobody can while the slot is locked.
            let unmapped = slot.frame() == Some(frame) && meta.references() == 2;
            if mutant!("swap_moves_mapped", unmapped, true) {
                ram.copy(frame, to);
                slot.forget_frame(ram.frames);
                meta.dec_references();
                let passing = FrameFlags::LOCKED | FrameFlags::WAITERS;
                slot.know_fresh_frame(ram.frames, to, meta.flags() - passing);
                moved = true;
            }
            slot.remove_helper();
        }
        meta.unlock();
        if meta.dec_references() == 0 {
            ram.free(frame);
        }
        moved
    }

    /// Gives back the slot of [`begin`](Self::begin), unused.
    pub(crate) fn cancel<H: Host>(&self, ram: &Ram<'_, H>, number: u64) {
        if let Some(slot) = self.lock(number, ram.pin) {
            slot.remove_helper();
        }
    }

    /// Makes the slot of [`begin`](Self::begin) know `frame`, a private page of which the caller owns an entry, that is
    /// going to say `Swap(number)` and gives its reference for it. The caller gets a reference of its own, and holds
    /// [`LOCKED`](crate::frame::FrameFlags::LOCKED); nobody maps the page until [`settle`](Self::settle). `None`, and nothing done, when
    /// somebody else is at work on the page.
    pub(crate) fn leave<H: Host>(&self, ram: &Ram<'_, H>, number: u64, frame: Frame) -> Option<Leaving> {
        let meta = ram.meta(frame);
        // A page that another slot knows leaves through that one.
        if meta.spare() != 0 || !meta.try_lock() {
            return None;
        }
        let Some(slot) = self.lock(number, ram.pin) else {
            meta.unlock();
            return None;
        };
        meta.inc_references();
        meta.set_flags(FrameFlags::UNSETTLED);
        slot.set_identity(meta.owner(), meta.index());
        slot.add_entry();
        slot.know_frame(ram.frames, frame);
        Some(Leaving { slot: number, frame })
    }

    /// The same for a page that a slot knows already: for who found it by its number. The page may be mapped or not. It stays settled: what a
    /// slot knows is mapped read-only, if at all.
    pub(crate) fn leave_again<H: Host>(&self, ram: &Ram<'_, H>, frame: Frame) -> Option<Leaving> {
        let number = ram.meta(frame).spare().checked_sub(1).filter(|&number| number < TRANSIT)?;
        let slot = self.area_of(number)?.slots.lock_of(ram.frames, frame, ram.pin.cpu())?;
        // The slot has a reference, and keeps it while it is locked.
        let meta = ram.meta(frame);
        if !meta.try_lock() {
            return None;
        }
        meta.inc_references();
        slot.add_helper();
        Some(Leaving { slot: slot.number(), frame })
    }

    /// Says that no store to the page is under way any more.
    pub(crate) fn settle<H: Host>(&self, machine: &Machine<H>, leaving: &Leaving) {
        machine.frames().meta(leaving.frame).clear_flags(FrameFlags::UNSETTLED);
    }

    /// One more entry of the page, which the caller owns, is going to say `Swap`, and gives its reference. False when that
    /// cannot be.
    pub(crate) fn leave_entry<H: Host>(&self, ram: &Ram<'_, H>, leaving: &Leaving) -> bool {
        let Some(slot) = self.lock(leaving.slot, ram.pin) else { return false };
        // The others may have gone meanwhile, and the frame with them: then the slot knows nothing of the page.
        if slot.frame() != Some(leaving.frame) || !mutant!("swap_sharer_uncounted", slot.add_entry(), true) {
            return false;
        }
        drop(slot);
        let left = ram.meta(leaving.frame).dec_references();
        debug_assert!(left > 0, "the caller of `leave` has a reference");
        true
    }

    /// Writes the page if nothing maps it, and frees its frame if nothing does so then. All its translations have been shot
    /// down and their stores awaited. Ends what [`leave`](Self::leave) began. Blocks; not while pinned.
    pub(crate) fn write_out<H: Host>(&self, cpu: &Cpu<H>, leaving: Leaving, write: bool) -> Left {
        let machine = &**cpu.machine();
        let Leaving { slot: number, frame } = leaving;
        let meta = machine.frames().meta(frame);
        // The slot's reference and ours; who maps it holds one more.
        let device = self.area_of(number).filter(|area| area.is_on() && write && meta.references() <= 2);
        let result = device.map(|area| area.write(machine, number, frame));
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        if let Some(slot) = self.lock(number, &pin) {
            let taken = mutant!("swap_frees_unwritten", result == Some(Ok(())), result.is_some());
            let unmapped = slot.frame() == Some(frame) && meta.references() == 2;
            if taken && mutant!("swap_frees_mapped", unmapped, true) {
                slot.forget_frame(ram.frames);
                meta.dec_references();
            }
            slot.remove_helper();
        }
        match result {
            Some(Ok(())) => ram.count(Counter::PswpOut),
            Some(Err(IoError)) => ram.count(Counter::SwapWriteError),
            None => {}
        }
        // Before our reference goes: then the frame may be somebody else's.
        meta.unlock();
        if meta.dec_references() == 0 {
            ram.free(frame);
            return Left::Freed;
        }
        Left::Stayed
    }

    /// Writes `frame`, a page that nothing maps and that stands still, to a new slot with one entry: a page cache's. Blocks; not while
    /// pinned.
    ///
    /// # Errors
    /// [`Error::NoMemory`] without a free slot, [`Error::Io`].
    pub(crate) fn store<H: Host>(&self, cpu: &Cpu<H>, frame: Frame) -> Result<u32, Error> {
        let machine = &**cpu.machine();
        let number = {
            let pin = cpu.pin();
            let number = self.begin(&machine.ram(&pin)).ok_or(Error::NoMemory)?;
            if let Some(slot) = self.lock(number, &pin) {
                let meta = machine.frames().meta(frame);
                slot.add_entry();
                slot.set_object(meta.owner(), meta.index());
            }
            number
        };
        let area = self.area_of(number).ok_or(Error::NoMemory)?;
        let result = area.write(machine, number, frame);
        let pin = cpu.pin();
        let ram = machine.ram(&pin);
        self.cancel(&ram, number);
        ram.count(if result.is_ok() { Counter::PswpOut } else { Counter::SwapWriteError });
        if result.is_err() {
            self.release(&ram, number as u32);
        }
        // A device has no more than 32 bits of them.
        result.map(|()| number as u32).map_err(|IoError| Error::Io)
    }

    /// Reads what [`store`](Self::store) wrote into `frame`, which is the caller's; the slot stays. Blocks; not while pinned.
    ///
    /// # Errors
    /// [`FaultError::Io`].
    pub(crate) fn load<H: Host>(&self, cpu: &Cpu<H>, number: u32, frame: Frame) -> Result<(), FaultError> {
        let machine = &**cpu.machine();
        let area = self.area_of(number.into()).ok_or(FaultError::Io)?;
        let result = area.read(machine, number.into(), frame);
        let pin = cpu.pin();
        machine.stats().count(&pin, if result.is_ok() { Counter::PswpIn } else { Counter::SwapReadError });
        result.map_err(|IoError| FaultError::Io)
    }

    /// Gives a slot of [`store`](Self::store) back.
    pub(crate) fn release<H: Host>(&self, ram: &Ram<'_, H>, number: u32) {
        if let Some(slot) = self.lock(number.into(), ram.pin) {
            let none = slot.remove_entry(ram.frames);
            debug_assert!(none.is_none(), "a page cache's slot knows no frame");
        }
    }
}

impl Swap {
    /// Lets device `device` take no more pages; returns the number of its first slot, and how many there are.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is none with this number, or it is out of use already.
    pub(crate) fn close(&self, device: u32) -> Result<(u64, u64), Error> {
        let area = self.areas.get(device as usize).and_then(SetOnce::get).ok_or(Error::Invalid)?;
        if area.off.swap(true, Ordering::SeqCst) {
            return Err(Error::Invalid);
        }
        fence(Ordering::SeqCst);
        Ok((u64::from(device) << AREA_SHIFT, area.slots.total() as u64))
    }

    /// Lets a device that was just [closed](Self::close) take pages again.
    pub(crate) fn reopen(&self, device: u32) {
        if let Some(area) = self.areas.get(device as usize).and_then(SetOnce::get) {
            area.off.store(false, Ordering::SeqCst);
        }
    }

    /// What is to be done for slot `number` of a closed device. `own` is called with the slot locked, and so while an object that it names
    /// has not gone.
    pub(crate) fn empty<H: Host, R>(
        &self,
        ram: &Ram<'_, H>,
        number: u64,
        own: impl FnOnce(Emptying) -> R,
    ) -> R {
        let Some(slot) = self.slots(number).and_then(|slots| slots.lock_if_used(number, ram.pin.cpu()))
        else {
            return own(Emptying::Free);
        };
        // Who writes may forget the frame when that is done.
        let found = if slot.has_helpers() {
            Emptying::Busy
        } else if let Some((object, index)) = slot.object() {
            Emptying::Object(object, index)
        } else if let Some(frame) = slot.frame() {
            Emptying::Known(frame)
        } else {
            slot.add_helper();
            Emptying::Away
        };
        own(found)
    }
}

impl Area {
    fn is_on(&self) -> bool {
        !self.off.load(Ordering::SeqCst)
    }

    fn read<H: Host>(&self, machine: &Machine<H>, number: u64, frame: Frame) -> Result<(), IoError> {
        let bytes = machine.host().bytes(frame);
        // SAFETY: a page of memory; the frame is the caller's, and nobody looks inside before it is read.
        self.device
            .read(slot_of(number), unsafe { slice::from_raw_parts_mut(bytes.as_ptr(), PAGE_SIZE as usize) })
    }

    fn write<H: Host>(&self, machine: &Machine<H>, number: u64, frame: Frame) -> Result<(), IoError> {
        let bytes = machine.host().bytes(frame);
        // SAFETY: a page of memory that stands still: nothing maps it writable, and nothing will while the caller has a
        // reference or keeps the page out of use.
        self.device
            .write(slot_of(number), unsafe { slice::from_raw_parts(bytes.as_ptr(), PAGE_SIZE as usize) })
    }
}

/// The number of a slot on its device.
fn slot_of(number: u64) -> u32 {
    (number & ((1 << AREA_SHIFT) - 1)) as u32
}

#[cfg(terrane_watch)]
impl crate::names::Describe for Swap {
    fn describe(&self, names: &mut crate::names::Names) {
        names.leaf(self);
        names.field("transit", &self.transit);
        for area in self.areas() {
            names.field("slots", &area.slots);
        }
    }
}

impl<H: Host> Machine<H> {
    /// Swaps to `device` from now on, until [`swap_off`](Self::swap_off); returns its number. Takes 32 bytes a slot from the allocator, and touches
    /// almost none of them. Of more than 2^29 slots the rest is not used.
    ///
    /// # Errors
    /// [`Error::NoMemory`]; [`Error::Exists`] when there have been eight devices.
    pub fn swap_on(&self, device: Box<dyn SwapDevice>) -> Result<u32, Error> {
        let count = device.slots().min(1 << AREA_SHIFT) as usize;
        let mut device = Some(device);
        for (number, place) in (0..).zip(&self.swap().areas) {
            if place.get().is_some() {
                continue;
            }
            let slots = Slots::try_new(u64::from(number) << AREA_SHIFT, count, self.epoch().capacity())?;
            let Some(taken) = device.take() else { break };
            let area = Area { device: taken, slots, off: AtomicBool::new(false) };
            match place.set_or_return(area) {
                Ok(()) => return Ok(number),
                // Another was faster here.
                Err((Error::Exists, area)) => device = Some(area.device),
                Err((error, _)) => return Err(error),
            }
        }
        Err(Error::Exists)
    }
}
