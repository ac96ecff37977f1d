//! Moving pages to where a handler wants them, without copying: `UFFDIO_MOVE`.
//!
//! # How
//!
//! The call holds both ranges (shared), so neither mapping changes under it; faults in them go on. Some pages at a time:
//!
//! 1. lock the tree of the source's anon_vma: walks of the reverse mapping wait, so none looks for a page in flight;
//! 2. take the source's entry and the destination's, for each page: faults there start over;
//! 3. shoot the source down and wait for the stores under way, or one could land after the page shows up elsewhere;
//! 4. give each page its new place in the reverse mapping, publish the destination's entries, empty the source's.
//!
//! A page in swap moves by its entry: the slot learns its new place, and so does the frame, if it is in memory still.
//!
//! Only pages that nobody else maps are moved: while the entry is taken no fork can share the page, for it must pass the entry.
//!
//! # Why nobody waits in a circle
//!
//! The tree comes before the entries, as everywhere. An entry is never waited for while another is owned: if the destination's
//! is busy, the source's is given back and the call waits with nothing taken. What step 3 waits for are accesses, which wait for nothing.
//!
//! # What a walk of the reverse mapping must do
//!
//! It reads a page's owner and index before it has the tree; they may change until then. So it reads them once more when it has it
//! ([`rmap`](crate::rmap)).

use super::super::Course;
use super::super::private;
use super::is_clean;
use super::protect::divide;
use crate::addr::{AddrRange, Frame, PAGE_SHIFT, PAGE_SIZE};
use crate::error::{Error, FaultError};
use crate::frame::FrameFlags;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::{Locking, Mm, Steady};
use crate::page_table::{
    BUSY, EMPTY, Format, Level, Pte, PteFlags, Raw, Slot, SlotError, TOMBSTONE, Walk, swap_slot,
};
use crate::range_lock::Mode;
use crate::rmap::AnonVma;
use crate::vma::{Snapshot, VmFlags, Vma};
use core::ptr::NonNull;

/// Pages whose entries are taken together.
const BATCH: usize = 32;

/// A page in flight: both entries are taken.
#[derive(Clone, Copy)]
struct Flight {
    from: u64,
    to: u64,
    /// What the source's entry was.
    raw: Raw,
    /// `None` for a page in swap, whose slot moves by its entry.
    frame: Option<Frame>,
}

/// Both ranges, held.
enum Hold<'a, H: Host> {
    One(#[allow(dead_code, reason = "held for its drop")] Steady<'a, H>),
    Two(#[allow(dead_code, reason = "held for its drop")] [crate::range_lock::Held<'a, H>; 2]),
}

/// Which mapping the destination must be registered with, and what to make of the source's holes.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    pub(crate) number: u16,
    /// Pages that are not there count as moved.
    pub(crate) holes: bool,
}

/// Moves the pages of `from` to `to`, which is as long, from the start on, as far as it goes: returns the bytes moved (holes
/// included), and why no more. Blocks; not while pinned.
pub(crate) fn move_pages<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    to: AddrRange,
    from: AddrRange,
    terms: Terms,
) -> (u64, Result<(), Error>) {
    let _hold = loop {
        if let Err(error) = prepare(mm, cpu, to, from, terms) {
            return (0, Err(error));
        }
        let hold = hold(mm, cpu, to, from);
        // The destination's anon_vma is there, unless the mapping is another by now.
        let pin = cpu.pin();
        match check(mm, &pin, to, from, terms) {
            Err(error) => return (0, Err(error)),
            Ok((_, vma)) if vma.anon_vma().is_some() => break hold,
            Ok(_) => {}
        }
    };
    let mut done = 0;
    let mut rounds = 0;
    while done < from.len() {
        let rest = (AddrRange::new(from.start + done, from.end), AddrRange::new(to.start + done, to.end));
        match batch(mm, cpu, rest, terms) {
            Ok(Passed::Bytes(bytes)) => {
                done += bytes;
                rounds = 0;
            }
            Ok(Passed::Nothing) => {
                mm.machine.host().relax(cpu.id(), rounds);
                rounds = rounds.saturating_add(1);
            }
            Ok(Passed::Block(addr)) => {
                if divide(mm, cpu, addr).is_err() {
                    return (done, Err(Error::NoMemory));
                }
            }
            Err((bytes, error)) => return (done + bytes, Err(error)),
        }
    }
    (done, Ok(()))
}

fn hold<'a, H: Host>(mm: &'a Mm<H>, cpu: &'a Cpu<H>, to: AddrRange, from: AddrRange) -> Hold<'a, H> {
    if mm.locking == Locking::Classic || to.overlaps(from) {
        return Hold::One(mm.share(cpu, AddrRange::new(to.start.min(from.start), to.end.max(from.end))));
    }
    Hold::Two(cpu.lock_ranges(&mm.ranges, [from, to], Mode::Shared))
}

/// Checks the mappings, in Linux's order, and returns the source's and the destination's.
fn check<'p, H: Host>(
    mm: &'p Mm<H>,
    pin: &'p crate::sync::Pin<'_>,
    to: AddrRange,
    from: AddrRange,
    terms: Terms,
) -> Result<(&'p Vma<H>, &'p Vma<H>), Error> {
    const UNMOVABLE: VmFlags = VmFlags::PFNMAP.union(VmFlags::IO);
    let at = |addr: u64| mm.index.find(pin, addr).and_then(|vma| Some((vma, vma.read()?)));
    let at =
        |addr: u64| at(addr).filter(|(_, seen)| seen.range.contains(addr)).or_else(|| mm.vma_at(pin, addr));
    let (dst, dst_seen) = at(to.start).ok_or(Error::NotFound)?;
    let (src, src_seen) = at(from.start).ok_or(Error::NotFound)?;
    let fits = |seen: &Snapshot, range: AddrRange| seen.flags.is_private() && range.end <= seen.range.end;
    let differ = src_seen.flags.symmetric_difference(dst_seen.flags);
    let unmovable = src_seen.flags.union(dst_seen.flags).intersects(UNMOVABLE);
    if !fits(&src_seen, from)
        || !fits(&dst_seen, to)
        || differ.intersects(VmFlags::PROT.union(VmFlags::LOCKED))
        || !src_seen.flags.contains(VmFlags::WRITE)
        || unmovable
        || dst_seen.flags.user_context() != terms.number
        || src.object().is_some()
        || dst.object().is_some()
    {
        return Err(Error::Invalid);
    }
    Ok((src, dst))
}

/// Checks, and sees to it that the destination has an anon_vma, with nothing held.
fn prepare<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    to: AddrRange,
    from: AddrRange,
    terms: Terms,
) -> Result<(), Error> {
    let mut course = Course::quiet(mm, to.start, to.start + PAGE_SIZE);
    loop {
        let made = course.attempt(cpu, |attempt| {
            if let Err(error) = check(attempt.mm, attempt.ram.pin, to, from, terms) {
                // An address without a mapping is only sure when the range is held: below.
                let error = if error == Error::NotFound { None } else { Some(error) };
                return Ok(error);
            }
            private::prepare_anon(attempt)?;
            Ok(None)
        });
        match made {
            Ok(None) => return Ok(()),
            Ok(Some(error)) => return Err(error),
            Err(stop) => course.recover(cpu, stop).map_err(|error| match error {
                FaultError::OutOfMemory => Error::NoMemory,
                _ => Error::NotFound,
            })?,
        }
    }
}

/// What a batch came to.
enum Passed {
    /// So many bytes.
    Bytes(u64),
    /// An entry is busy.
    Nothing,
    /// A block is in the way: of the source, to be divided.
    Block(u64),
}

/// Why a page is not taken.
enum Obstacle {
    Busy,
    Block(u64),
    Error(Error),
}

fn batch<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    (from, to): (AddrRange, AddrRange),
    terms: Terms,
) -> Result<Passed, (u64, Error)> {
    // The tree of the source's private pages; without one there are none.
    let anon = {
        let pin = cpu.pin();
        let vma = mm.vma_at(&pin, from.start).map(|(vma, _)| vma);
        vma.and_then(Vma::anon_vma).filter(|anon| anon.visit()).map(NonNull::from)
    };
    // SAFETY: visited: it stays until `leave`.
    let tree = anon.map(|anon| unsafe { anon.as_ref() }.lock_tree());
    let result = batch_locked(mm, cpu, from, to, terms);
    drop(tree);
    if let Some(anon) = anon {
        // SAFETY: ends the visit above.
        unsafe { anon.as_ref().leave(&cpu.participant()) };
    }
    result
}

fn batch_locked<H: Host>(
    mm: &Mm<H>,
    cpu: &Cpu<H>,
    from: AddrRange,
    to: AddrRange,
    terms: Terms,
) -> Result<Passed, (u64, Error)> {
    let mut flights = [Flight { from: 0, to: 0, raw: EMPTY, frame: None }; BATCH];
    let mut count = 0;
    let mut passed = 0;
    let mut obstacle = None;
    {
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        while passed < from.len() && count < BATCH {
            let taken = take_pair(mm, &ram, from.start + passed, to.start + passed, terms);
            match taken {
                Ok(Some(flight)) => {
                    flights[count] = flight;
                    count += 1;
                }
                Ok(None) => {}
                Err(stopped) => {
                    obstacle = Some(stopped);
                    break;
                }
            }
            passed += PAGE_SIZE;
        }
    }
    if count > 0 {
        let flights = &flights[..count];
        let ticket = {
            let pin = cpu.pin();
            let range = AddrRange::new(flights[0].from, flights[count - 1].from + PAGE_SIZE);
            mm.shoot_down(&mm.ram(&pin), range)
        };
        cpu.await_stores(ticket);
        let pin = cpu.pin();
        let ram = mm.ram(&pin);
        let anon = mm.vma_at(&pin, to.start).and_then(|(vma, seen)| Some((vma.anon_vma()?, seen)));
        for flight in flights {
            land(mm, &ram, flight, anon.as_ref().map(|(anon, seen)| (*anon, seen)));
        }
    }
    match obstacle {
        Some(Obstacle::Error(error)) => Err((passed, error)),
        _ if passed > 0 => Ok(Passed::Bytes(passed)),
        Some(Obstacle::Block(addr)) => Ok(Passed::Block(addr)),
        _ => Ok(Passed::Nothing),
    }
}

/// Takes both entries of one page; nothing where there is no page and holes are allowed.
fn take_pair<H: Host>(
    mm: &Mm<H>,
    ram: &crate::frame::Ram<'_, H>,
    from: u64,
    to: u64,
    terms: Terms,
) -> Result<Option<Flight>, Obstacle> {
    let vacant = if terms.holes { Ok(None) } else { Err(Obstacle::Error(Error::NotFound)) };
    // Looked at before the source, as in Linux.
    let target = match mm.page_table.slot(ram, to) {
        Ok(slot) => slot,
        Err(SlotError::OutOfMemory) => return Err(Obstacle::Error(Error::NoMemory)),
        Err(SlotError::Changed) => {
            let is_block = mm.page_table.block_slot(ram, to).is_some();
            return Err(if is_block { Obstacle::Error(Error::Exists) } else { Obstacle::Busy });
        }
    };
    let source = match mm.page_table.walk(ram, from) {
        None => return vacant,
        Some(Walk { level: Level::BLOCK, raw, .. }) if Pte::block::<H::Format>(raw).is_some() => {
            return Err(Obstacle::Block(from));
        }
        Some(Walk { raw: EMPTY, .. }) => return vacant,
        Some(Walk { slot, level: Level::PAGE, .. }) => slot,
        Some(_) => return Err(Obstacle::Busy),
    };
    let there = target.load();
    if there == BUSY || there == TOMBSTONE {
        return Err(Obstacle::Busy);
    }
    if !is_clean(there) {
        return Err(Obstacle::Error(Error::Exists));
    }
    let raw = source.load();
    let pte = Pte::decode::<H::Format>(raw);
    let frame = match pte {
        Pte::Empty | Pte::UserWp => return vacant,
        Pte::Page { frame, .. } | Pte::NoAccess { frame, .. } => Some(frame),
        Pte::Busy | Pte::Tombstone | Pte::Migration(_) => return Err(Obstacle::Busy),
        Pte::Swap(_) => None,
        _ => return Err(Obstacle::Error(Error::BadAddress)),
    };
    let owned = source.take(raw).ok_or(Obstacle::Busy)?;
    let alone = match (frame, pte) {
        (Some(frame), _) => {
            let meta = ram.frames.meta(frame);
            let alone = meta.flags().contains(FrameFlags::ANON) && meta.references() == 1;
            alone || frame == mm.machine.zero_frame()
        }
        (None, Pte::Swap(payload)) => {
            mm.machine.swap().is_alone(ram, swap_slot(payload)).ok_or(Obstacle::Busy)?
        }
        _ => false,
    };
    if !alone {
        return Err(Obstacle::Error(Error::Busy));
    }
    let Some(place) = target.take(EMPTY) else { return Err(Obstacle::Busy) };
    let _ = place.keep();
    Ok(Some(Flight { from, to, raw: owned.keep(), frame }))
}

/// Gives a page in flight its new place.
fn land<H: Host>(
    mm: &Mm<H>,
    ram: &crate::frame::Ram<'_, H>,
    flight: &Flight,
    anon: Option<(&AnonVma<H>, &Snapshot)>,
) {
    let slot = |addr: u64| -> Option<&Slot> { mm.page_table.lookup(ram, addr) };
    let (Some(source), Some(target)) = (slot(flight.from), slot(flight.to)) else {
        debug_assert!(false, "a table with entries that are taken is gone");
        return;
    };
    let (source, target) = (source.resume(flight.raw), target.resume(EMPTY));
    let Some((anon, seen)) = anon else {
        debug_assert!(false, "the destination has lost its anon_vma");
        return;
    };
    let (owner, index) = (anon.page_owner().cast_mut().cast(), flight.to >> PAGE_SHIFT);
    let landed = match (flight.frame, Pte::decode::<H::Format>(flight.raw)) {
        (Some(frame), _) if frame == mm.machine.zero_frame() => {
            H::Format::page(frame, seen.flags.read_only_pte().union(PteFlags::ACCESSED))
        }
        (Some(frame), _) => {
            let meta = ram.frames.meta(frame);
            // The index first: who sees the new owner sees the new index.
            meta.set_index(index);
            meta.set_owner(owner);
            H::Format::page(frame, private::writable_pte(seen.flags))
        }
        (None, Pte::Swap(payload)) => {
            let number = swap_slot(payload);
            mm.machine.swap().renumber(ram, number, owner, index);
            Pte::Swap(number).encode::<H::Format>()
        }
        (None, _) => EMPTY,
    };
    target.publish(landed);
    source.publish(EMPTY);
}
