//! Finding free addresses (requirement C2).
//!
//! One search of the index serves all: this module only says what to ask it, in the order of Linux: a fixed address, a
//! hint, then from above below `map_top`, and when that has no room, from below above it. With
//! [`Placement::PerCpu`](super::Placement) small mappings go to the CPU's own stretch first ([`stretch`](super::stretch)).
//!
//! # Beside other calls
//!
//! A search holds nothing: what it finds is a candidate. The call takes hold of the range and looks whether it still is free;
//! if not it searches again. When that fails too often, or nothing is found, it takes hold of the whole space and
//! searches once more: then the answer is exact, and no call is refused for want of addresses that are there.

use super::change::Change;
use super::map::MapRequest;
use super::{AddressSpace, SpaceConfig};
use crate::addr::{AddrRange, PAGE_SIZE, page_floor};
use crate::error::Error;
use crate::host::Host;
use crate::index::{Direction, Entry, GapRequest};
use crate::machine::Cpu;
use crate::mm::{Exclusive, Locking, Mm, STACK_GUARD_GAP};
use crate::stats::Counter;
use crate::sync::Pin;
use crate::sync::atomic::Ordering;
use crate::vma::{MapFlags, Vma};

/// Where `MAP_32BIT` looks, as in Linux.
const LOW: AddrRange = AddrRange { start: 0x4000_0000, end: 0x8000_0000 };

/// Candidates that are tried before the whole space is held for an exact search: each was free when it was found, and taken
/// by another call a moment later.
const TRIES: usize = 8;

/// Addresses that a call has taken hold of.
pub(super) struct Claim<'a, H: Host> {
    pub(super) range: AddrRange,
    pub(super) change: Change<'a, H>,
    /// What they continue; `None` where nobody has looked.
    pub(super) fits: Option<Fits>,
    pub(super) pin: Pin<'a>,
}

/// Both ends of a move.
pub(super) struct Site<'a, H: Host> {
    /// Where to.
    pub(super) range: AddrRange,
    pub(super) old: Change<'a, H>,
    pub(super) new: Change<'a, H>,
}

/// The VMAs below and above a range, with their ranges.
pub(super) type Beside<'p, H> = [Option<(AddrRange, &'p Vma<H>)>; 2];

/// Which of the VMAs beside it a new mapping continues: a first look.
#[derive(Clone, Copy)]
pub(super) struct Fits {
    pub(super) up: bool,
    pub(super) down: bool,
}

impl<H: Host> AddressSpace<H> {
    /// Finds the addresses for `request`, whose length is `len` (whole pages, not 0), and takes hold of them. They are free,
    /// but for a fixed address, where what is mapped is still there. `fits` says which of the VMAs beside them they
    /// continue. `seen` are addresses that an earlier search for it has found, if there was one.
    pub(super) fn claim<'a>(
        &'a self,
        cpu: &'a Cpu<H>,
        request: &MapRequest<H>,
        len: u64,
        mut seen: Option<u64>,
        fits: impl Fn(AddrRange, Beside<'_, H>) -> Fits,
    ) -> Result<Claim<'a, H>, Error> {
        let (mm, config) = (self.mm(), self.config());
        if len > config.range.len() {
            return Err(Error::NoMemory);
        }
        let stack = request.flags.contains(MapFlags::GROWSDOWN);
        // A stack takes hold of its guard gap too, so that what is mapped there at the same time sees it, or is seen.
        let reach = |range: AddrRange| match stack {
            true => AddrRange::new(range.start.saturating_sub(STACK_GUARD_GAP), range.end),
            false => range,
        };
        if request.flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            let range = fixed(config, request.addr, len)?;
            let change = Change::begin_within(mm, cpu, reach(range), range);
            if request.flags.contains(MapFlags::FIXED_NOREPLACE) && !change.is_free(&cpu.pin(), range) {
                return Err(Error::Exists);
            }
            return Ok(Claim { range, change, fits: None, pin: cpu.pin() });
        }
        if config.locking == Locking::Speculative {
            for _ in 0..TRIES {
                let found = seen.take().or_else(|| self.candidate(cpu, request, len));
                let Some(addr) = found else { break };
                let range = AddrRange::new(addr, addr + len);
                let change = Change::begin_within(mm, cpu, reach(range), range);
                let pin = cpu.pin();
                // One look for everything: is it free, does what lies above keep its guard gap, what does it continue.
                let within = AddrRange::new(range.start, range.end.saturating_add(STACK_GUARD_GAP));
                let beside = mm.index.neighbours(&pin, range.start, within);
                let [below, above] = &beside;
                let is_free = below.is_none_or(|(below, _)| below.end <= range.start)
                    && above.is_none_or(|(above, vma)| {
                        range.end <= above.start.saturating_sub(vma.guard_below())
                    });
                if is_free {
                    let fits = Some(fits(range, beside));
                    return Ok(Claim { range, change, fits, pin });
                }
            }
        }
        let change = Change::begin(mm, cpu, config.range);
        let pin = cpu.pin();
        let addr = place(mm, &pin, config, request, len).ok_or(Error::NoMemory)?;
        Ok(Claim { range: AddrRange::new(addr, addr + len), change, fits: None, pin })
    }

    /// Addresses that look free, for the short way of `map`; or the fixed ones, whatever is there.
    #[inline]
    pub(super) fn candidate_at_once(
        &self,
        cpu: &Cpu<H>,
        pin: &Pin<'_>,
        request: &MapRequest<H>,
        len: u64,
    ) -> Option<u64> {
        let (mm, config) = (self.mm(), self.config());
        if request.flags.intersects(MapFlags::FIXED | MapFlags::FIXED_NOREPLACE) {
            return fixed(config, request.addr, len).ok().map(|range| range.start);
        }
        match &self.stretches {
            Some(stretches) if is_anywhere(request) => stretches.find_in_own(cpu.id(), len, |range| {
                search(mm, pin, config, ask(config, request, len, range, Direction::TopDown))
            }),
            _ => place(mm, pin, config, request, len),
        }
    }

    /// Finds the addresses for `request`, which is for no fixed address, beside `held`, and takes hold of both: for a move.
    pub(super) fn claim_beside<'a>(
        &'a self,
        cpu: &'a Cpu<H>,
        request: &MapRequest<H>,
        held: AddrRange,
    ) -> Result<Site<'a, H>, Error> {
        let (mm, config, len) = (self.mm(), self.config(), request.len);
        if len > config.range.len() {
            return Err(Error::NoMemory);
        }
        if config.locking == Locking::Speculative {
            for _ in 0..TRIES {
                let Some(addr) = self.candidate(cpu, request, len) else { break };
                let range = AddrRange::new(addr, addr + len);
                if range.overlaps(held) {
                    break; // nothing is mapped there any more
                }
                let [hold, other] = mm.exclude_both(cpu, [held, range]);
                mm.enter(cpu, &[&hold, &other]);
                let old = Change::holding(mm, cpu, hold, held);
                let new = Change::holding(mm, cpu, other, range);
                if new.is_roomy(&cpu.pin(), range) {
                    return Ok(Site { range, old, new });
                }
            }
        }
        let hold = mm.exclude(cpu, config.range);
        mm.enter(cpu, &[&hold]);
        let addr = place(mm, &cpu.pin(), config, request, len).ok_or(Error::NoMemory)?;
        let range = AddrRange::new(addr, addr + len);
        if range.overlaps(held) {
            return Err(Error::BadAddress); // as above
        }
        let old = Change::holding(mm, cpu, hold, held);
        Ok(Site { range, old, new: Change::holding(mm, cpu, Exclusive::Covered, range) })
    }

    /// Addresses that look free.
    pub(super) fn candidate(&self, cpu: &Cpu<H>, request: &MapRequest<H>, len: u64) -> Option<u64> {
        if let (Some(stretches), true) = (&self.stretches, is_anywhere(request)) {
            let (mm, config) = (self.mm(), self.config());
            let ask = |range: AddrRange| ask(config, request, len, range, Direction::TopDown);
            if let Some(addr) = stretches.find(mm, cpu, len, |pin, range| search(mm, pin, config, ask(range)))
            {
                return Some(addr);
            }
        }
        place(self.mm(), &cpu.pin(), self.config(), request, len)
    }
}

impl<H: Host> Change<'_, H> {
    /// True when nothing is mapped in `range`, which is held, and what lies above keeps its guard gap.
    fn is_roomy(&self, pin: &Pin<'_>, range: AddrRange) -> bool {
        let within = AddrRange::new(range.start, range.end.saturating_add(STACK_GUARD_GAP));
        let [below, above] = self.mm.index.neighbours(pin, range.start, within);
        below.is_none_or(|(below, _)| below.end <= range.start)
            && above.is_none_or(|(above, vma)| range.end <= above.start.saturating_sub(vma.guard_below()))
    }
}

/// True when nothing is asked of the address.
fn is_anywhere<H: Host>(request: &MapRequest<H>) -> bool {
    request.addr == 0 && !request.flags.contains(MapFlags::LOW_2GIB)
}

/// The range of a fixed address.
pub(super) fn fixed(config: &SpaceConfig, addr: u64, len: u64) -> Result<AddrRange, Error> {
    // In this order, as in Linux.
    let range = AddrRange::of_len(addr, len).filter(|range| range.end <= config.range.end);
    let range = range.ok_or(Error::NoMemory)?;
    if !addr.is_multiple_of(PAGE_SIZE) {
        return Err(Error::Invalid);
    }
    // As below `mmap_min_addr`.
    if addr < config.range.start { Err(Error::NotPermitted) } else { Ok(range) }
}

/// What to ask the index for a place in `range`.
fn ask<H: Host>(
    config: &SpaceConfig,
    request: &MapRequest<H>,
    length: u64,
    range: AddrRange,
    direction: Direction,
) -> GapRequest {
    let (align_mask, align_offset) = if request.align > PAGE_SIZE {
        (request.align - PAGE_SIZE, 0)
    } else if request.object.is_some() && request.flags.contains(MapFlags::SHARED) {
        (config.colour_mask, request.offset & config.colour_mask)
    } else {
        (0, 0)
    };
    let (low, high) = (range.start.max(config.range.start), range.end.min(config.range.end));
    GapRequest { length, low, high, direction, align_mask, align_offset }
}

/// The address where Linux would map: at the hint, or from above below `map_top`, or from below above it. Exact when
/// the whole space is held, else a candidate.
fn place<H: Host>(
    mm: &Mm<H>,
    pin: &Pin<'_>,
    config: &SpaceConfig,
    request: &MapRequest<H>,
    len: u64,
) -> Option<u64> {
    let limits = config.range;
    let low_2gib = request.flags.contains(MapFlags::LOW_2GIB);
    if request.addr != 0
        && request.align <= PAGE_SIZE
        && let Some(addr) =
            hint(mm, pin, limits, request.addr, len).filter(|addr| !low_2gib || addr + len <= LOW.end)
    {
        return Some(addr);
    }
    let find = |range, direction| search(mm, pin, config, ask(config, request, len, range, direction));
    if low_2gib {
        return find(LOW, Direction::BottomUp);
    }
    if config.bottom_up {
        return find(limits, Direction::BottomUp);
    }
    find(AddrRange::new(limits.start, config.map_top), Direction::TopDown).or_else(|| {
        let above = AddrRange::new(config.map_top, limits.end);
        if above.is_empty() { None } else { find(above, Direction::BottomUp) }
    })
}

/// The hint, rounded down to a page, if the range there is free and keeps the guard gap of a stack above.
fn hint<H: Host>(mm: &Mm<H>, pin: &Pin<'_>, limits: AddrRange, addr: u64, len: u64) -> Option<u64> {
    let addr = page_floor(addr).max(limits.start);
    let range = AddrRange::of_len(addr, len).filter(|range| range.end <= limits.end)?;
    let free = mm
        .index
        .first_ending_after(pin, addr)
        .is_none_or(|vma| range.end <= vma.start().saturating_sub(vma.guard_below()) && vma.start() >= addr);
    free.then_some(addr)
}

fn search<H: Host>(mm: &Mm<H>, pin: &Pin<'_>, config: &SpaceConfig, ask: GapRequest) -> Option<u64> {
    if config.linear_search {
        let found = mm.index.search_linear(pin, &ask, mm.search_from.load(Ordering::Relaxed));
        mm.search_from.store(found.unwrap_or(0), Ordering::Relaxed);
        return found;
    }
    let mut leaves = 0;
    let found = mm.index.search_counting(pin, &ask, &mut leaves);
    mm.machine.stats().add(pin, Counter::GapLeaves, leaves as u64);
    found
}
