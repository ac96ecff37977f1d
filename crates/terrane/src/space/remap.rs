//! Moving, growing and shrinking mappings: `mremap`.
//!
//! # How a mapping moves
//!
//! The call holds the old range and the new one together, so whatever it does in between, faults and calls at either end wait for it;
//! all others go on. When all that can fail is behind it (records, index nodes, page tables, blocks to divide, relocations):
//!
//! 1. What is mapped at the new place is unmapped (`FIXED`).
//! 2. The VMA of the old range, or the part of it, is killed and leaves the index. Faults that are under way will not validate.
//! 3. A VMA for the new range is made, and joins the object's list, but not the index: the addresses look unmapped, and faults
//!    there wait for the range. It uses the same anon_vma.
//! 4. The entries are carried ([`carry`](super::carry)).
//! 5. The old VMA is swept, which frees its page tables, and ends.
//! 6. The new VMA joins the index, and merges with its neighbours where the two are one mapping.
//!
//! Between 2 and 6 nothing is in the index that a call next door could merge with, and no counter is odd: a neighbour that looks at
//! what lies beside its own range never waits for a move.
//!
//! `DONTUNMAP` maps the old range again before step 6, empty.
//!
//! # Where the pages of memory belong
//!
//! As in Linux, memory that has private pages keeps its `pgoff` when it moves, so that it is one mapping again with its former neighbours when it
//! comes back, and memory that has none gets that of its new place, so that it is one mapping with the new ones. Nothing but merging and the listing
//! looks at it: how a walk finds the pages is said in [`rmap::relocations`](crate::rmap::relocations).
//!
//! # Several mappings
//!
//! With `FIXED` and equal lengths the range may hold several mappings and holes between them (Linux 6.17): they move one after the other, and what lies
//! behind the first that cannot be moved stays where it is.

mod transfer;

use super::AddressSpace;
use super::change::Change;
use super::map::MapRequest;
use super::place::Site;
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, is_page_aligned};
use crate::error::Error;
use crate::fault::user::events::{Moved, Remapping};
use crate::host::Host;
use crate::machine::Cpu;
use crate::object::Object;
use crate::sync::Shared;
use crate::vma::{MapFlags, Prot, RemapFlags, Snapshot, VmFlags, Vma, merge};

/// Mappings that a call which moves one keeps below the limit.
const SPARE_MAPPINGS: usize = 3;

/// What is asked of a mapping, in whole pages.
#[derive(Clone, Copy)]
struct Wish {
    addr: u64,
    old_len: u64,
    new_len: u64,
    flags: RemapFlags,
    new_addr: u64,
}

/// The mapping at an address that a call holds.
struct Source<H: Host> {
    seen: Snapshot,
    object: Option<Shared<Object<H>>>,
}

impl<H: Host> Source<H> {
    fn is_shared(&self) -> bool {
        self.seen.flags.contains(VmFlags::SHARED)
    }
}

fn up_to_page(len: u64) -> u64 {
    // As in Linux a length that wraps becomes 0.
    len.wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1)
}

impl<H: Host> AddressSpace<H> {
    /// Makes the mapping of `old_len` bytes at `addr` one of `new_len` bytes: shrinks or grows it where it is, or
    /// moves it, if `flags` let it; returns where it is then. Lengths are rounded up to pages. An `old_len` of 0 maps what a
    /// shared mapping shows a second time. Pages move by their entries in the page table: O(log n), and the entries that are there.
    ///
    /// With `FIXED` and equal lengths several mappings move together, and the holes between them with them.
    ///
    /// # Errors
    /// As `mremap` of Linux 6.18: [`Error::Invalid`] for flags, addresses and lengths that make no sense;
    /// [`Error::BadAddress`] where nothing is mapped, the range is not one mapping, or the mapping may not grow; [`Error::NotPermitted`] for a
    /// sealed mapping; [`Error::Again`] beyond the limit of locked memory; [`Error::NoMemory`] without room, memory or
    /// within the limits. Nothing has changed then, but for mappings of several that were moved before one that could not be,
    /// and what `FIXED` has unmapped at the new place before it found nothing at the old one.
    pub fn remap(
        &self,
        cpu: &Cpu<H>,
        addr: u64,
        old_len: u64,
        new_len: u64,
        flags: RemapFlags,
        new_addr: u64,
    ) -> Result<u64, Error> {
        let wish = Wish { addr, old_len: up_to_page(old_len), new_len: up_to_page(new_len), flags, new_addr };
        self.check_wish(&wish)?;
        let told = self.announce_move(cpu, &wish)?;
        let result = if flags.contains(RemapFlags::FIXED) {
            self.remap_fixed(cpu, wish)
        } else if flags.contains(RemapFlags::DONTUNMAP) {
            self.move_anywhere(cpu, wish)
        } else {
            match self.resize(cpu, wish) {
                Ok(Some(addr)) => Ok(addr),
                Ok(None) => self.move_anywhere(cpu, wish),
                Err(error) => Err(error),
            }
        };
        cpu.tidy();
        let moved = result?;
        if wish.new_len > wish.old_len {
            // As in Linux: what cannot be filled in is left to faults.
            let gained = AddrRange::new(moved + wish.old_len, moved + wish.new_len);
            let _ = self.fill_locked(cpu, gained, true);
        }
        if let Some(told) = told {
            told.done(cpu, &wish.came_to(moved));
        }
        Ok(moved)
    }

    /// Announces what is asked to handlers of user faults.
    fn announce_move(&self, cpu: &Cpu<H>, wish: &Wish) -> Result<Option<Remapping<H>>, Error> {
        let end = self.config().range.end;
        let clip = |addr: u64, len: u64| {
            let start = addr.min(end);
            AddrRange::new(start, start.saturating_add(len).min(end))
        };
        let target = match wish.flags.contains(RemapFlags::FIXED) {
            true => clip(wish.new_addr, wish.new_len),
            false => AddrRange::new(0, 0),
        };
        Ok(Remapping::announce(self.mm(), cpu, clip(wish.addr, wish.old_len.max(PAGE_SIZE)), target)?)
    }

    fn check_wish(&self, wish: &Wish) -> Result<(), Error> {
        let Wish { addr, old_len, new_len, flags, new_addr } = *wish;
        let end = self.config().range.end;
        if !RemapFlags::all().contains(flags) || !is_page_aligned(addr) || new_len == 0 || new_len > end {
            return Err(Error::Invalid);
        }
        if !wish.has_place() {
            return Ok(());
        }
        let overlap = addr.wrapping_add(old_len) > new_addr && new_addr.wrapping_add(new_len) > addr;
        if new_addr > end - new_len
            || !is_page_aligned(new_addr)
            || !flags.contains(RemapFlags::MAYMOVE)
            || (flags.contains(RemapFlags::DONTUNMAP) && old_len != new_len)
            || overlap
        {
            return Err(Error::Invalid);
        }
        let limit = self.config().map_limit;
        if limit.is_some_and(|limit| self.mm().index.len() + 2 + SPARE_MAPPINGS >= limit) {
            return Err(Error::NoMemory);
        }
        Ok(())
    }

    /// What is mapped at `addr`, which the caller holds, if `wish` can be had of it.
    fn source(&self, cpu: &Cpu<H>, wish: &Wish) -> Result<Source<H>, Error> {
        let source = {
            let pin = cpu.pin();
            let (vma, seen) = self.mm().vma_at(&pin, wish.addr).ok_or(Error::BadAddress)?;
            Source { seen, object: vma.object().cloned() }
        };
        let flags = source.seen.flags;
        if flags.contains(VmFlags::SEALED) {
            return Err(Error::NotPermitted);
        }
        if !wish.has_place() && wish.new_len <= wish.old_len {
            return Ok(source);
        }
        if wish.old_len == 0 && !source.is_shared() {
            return Err(Error::Invalid);
        }
        let is_fixed_size = flags.intersects(VmFlags::DONTEXPAND | VmFlags::PFNMAP);
        if wish.flags.contains(RemapFlags::DONTUNMAP) && is_fixed_size {
            return Err(Error::Invalid);
        }
        if wish.old_len.min(wish.new_len) > source.seen.range.end - wish.addr {
            return Err(Error::BadAddress);
        }
        if wish.new_len <= wish.old_len {
            return Ok(source);
        }
        let pgoff = source.seen.index_of(wish.addr);
        if pgoff.checked_add(wish.new_len >> PAGE_SHIFT).is_none() {
            return Err(Error::Invalid);
        }
        if is_fixed_size {
            return Err(Error::BadAddress);
        }
        self.check_memlock(flags, (wish.new_len - wish.old_len) >> PAGE_SHIFT)?;
        self.check_growth(flags, wish.new_len - wish.old_len)?;
        Ok(source)
    }

    /// Whether a mapping with these attributes may grow by so many bytes, as far as the limits go. The caller holds them.
    fn check_growth(&self, flags: VmFlags, bytes: u64) -> Result<(), Error> {
        self.check_space(flags, bytes >> PAGE_SHIFT)?;
        self.check_commit(flags, bytes >> PAGE_SHIFT)
    }

    /// Without a new address: changes the length in place; `None` when it must move for that, and may.
    fn resize(&self, cpu: &Cpu<H>, wish: Wish) -> Result<Option<u64>, Error> {
        let Wish { addr, old_len, new_len, flags, .. } = wish;
        let range = self.config().range;
        if addr >= range.end {
            return Err(Error::BadAddress);
        }
        let end = addr.saturating_add(old_len.max(new_len).max(PAGE_SIZE)).min(range.end);
        let mut change = Change::begin(self.mm(), cpu, AddrRange::new(addr, end));
        if self.has_limits() {
            change.hold_limits();
        }
        let source = self.source(cpu, &wish)?;
        if new_len == old_len {
            return Ok(Some(addr));
        }
        if new_len < old_len {
            let gone = addr.checked_add(old_len).filter(|&end| end <= range.end).ok_or(Error::Invalid)?;
            self.cut_off(cpu, &mut change, AddrRange::new(addr + new_len, gone))?;
            return Ok(Some(addr));
        }
        if source.seen.range.end == addr + old_len && self.grow_in_place(cpu, &mut change, &source, wish)? {
            return Ok(Some(addr));
        }
        if flags.contains(RemapFlags::MAYMOVE) { Ok(None) } else { Err(Error::NoMemory) }
    }

    /// Unmaps `gone`, a part of what the change holds: it may hold other mappings, and holes.
    fn cut_off(&self, cpu: &Cpu<H>, change: &mut Change<'_, H>, gone: AddrRange) -> Result<(), Error> {
        change.narrow(gone);
        change.plan_splits()?;
        change.check_seals(gone)?;
        let pin = cpu.pin();
        let removal = change.removal(&pin, gone);
        let limit = self.config().map_limit.filter(|_| removal.is_hole);
        if limit.is_some_and(|limit| self.mm().index.len() >= limit) {
            return Err(Error::NoMemory);
        }
        change.plan(&pin, removal.records)?;
        drop(pin);
        change.remove(gone, true);
        Ok(())
    }

    /// Lets the mapping reach further up, if what follows is free.
    fn grow_in_place(
        &self,
        cpu: &Cpu<H>,
        change: &mut Change<'_, H>,
        source: &Source<H>,
        wish: Wish,
    ) -> Result<bool, Error> {
        let end = source.seen.range.end;
        let Some(new_end) = wish.addr.checked_add(wish.new_len).filter(|&at| at <= self.config().range.end)
        else {
            return Ok(false);
        };
        let grown = AddrRange::new(end, new_end);
        {
            let pin = cpu.pin();
            if !change.is_free(&pin, grown) {
                return Ok(false);
            }
            change.plan(&pin, 1)?;
        }
        let with_lock = self.config().rmap_lock_on_end_move;
        // The mapping that ends there is the one of the call: that address is held.
        if !change.grow_up(grown, with_lock, |_| true) {
            return Ok(false);
        }
        change.merge_if(new_end, merge::can_take_in);
        Ok(true)
    }

    /// What a move of `asked` to `new` must hold: that; and where locked memory is left mapped, all of the mappings that reach into it, because
    /// they are unlocked as a whole, but for what is replaced.
    fn reach(&self, cpu: &Cpu<H>, wish: &Wish, asked: AddrRange, new: Option<AddrRange>) -> AddrRange {
        let mut reach = asked;
        if !wish.flags.contains(RemapFlags::DONTUNMAP) || asked.is_empty() {
            return reach;
        }
        let pin = cpu.pin();
        for addr in [asked.start, asked.end - 1] {
            let seen = self.mm().index.find(&pin, addr).and_then(Vma::read);
            if let Some(seen) = seen.filter(|seen| seen.flags.contains(VmFlags::LOCKED)) {
                let all = outside(seen.range, asked, new);
                reach = AddrRange::new(reach.start.min(all.start), reach.end.max(all.end));
            }
        }
        reach
    }

    /// To an address of the space's choice: growing beyond what there is room for, or `DONTUNMAP` (with a hint).
    fn move_anywhere(&self, cpu: &Cpu<H>, wish: Wish) -> Result<u64, Error> {
        let limits = self.config().range;
        if wish.addr >= limits.end {
            return Err(Error::BadAddress);
        }
        // A second look at what `resize` has seen, with room for it this time.
        let asked =
            AddrRange::new(wish.addr, wish.addr.saturating_add(wish.old_len.max(PAGE_SIZE)).min(limits.end));
        let held = self.reach(cpu, &wish, asked, None);
        let found = {
            let pin = cpu.pin();
            let found = self.mm().index.find_exact(&pin, wish.addr);
            found.map(|vma| (vma.snapshot(), vma.object().cloned()))
        };
        // A guess, for where to look: what counts is read again with both ranges held.
        let (flags, object, offset) = match found {
            Some((seen, object)) if seen.range.contains(wish.addr) => {
                let shared = seen.flags.contains(VmFlags::SHARED);
                let flags = if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
                (flags, object, seen.index_of(wish.addr) << PAGE_SHIFT)
            }
            _ => (MapFlags::PRIVATE, None, 0),
        };
        let hint = if wish.flags.contains(RemapFlags::DONTUNMAP) { wish.new_addr } else { 0 };
        let request = MapRequest {
            addr: hint,
            len: wish.new_len,
            prot: Prot::empty(),
            flags,
            object,
            offset,
            align: PAGE_SIZE,
        };
        let Site { range, mut old, mut new } = match self.claim_beside(cpu, &request, held) {
            Ok(site) => site,
            Err(no_room) => {
                // What is wrong with the mapping is said first.
                let mut change = Change::begin(self.mm(), cpu, held);
                if self.has_limits() {
                    change.hold_limits();
                }
                self.source(cpu, &wish)?;
                return Err(no_room);
            }
        };
        if !held.covers(self.reach(cpu, &wish, asked, None)) {
            // It has grown meanwhile.
            drop((old, new));
            return self.move_anywhere(cpu, wish);
        }
        if self.has_limits() {
            old.hold_limits();
        }
        let source = self.source(cpu, &wish)?;
        self.move_to(cpu, &mut old, &mut new, &source, wish, range, false)?;
        Ok(range.start)
    }

    /// To a given address, in place of what is there.
    fn remap_fixed(&self, cpu: &Cpu<H>, wish: Wish) -> Result<u64, Error> {
        let Wish { addr, old_len, new_len, new_addr, .. } = wish;
        let limits = self.config().range;
        let new = AddrRange::new(new_addr, new_addr + new_len);
        let end = addr.saturating_add(old_len.max(PAGE_SIZE)).min(limits.end).max(addr.min(limits.end));
        if addr >= limits.end {
            return Err(Error::BadAddress);
        }
        // What reaches beyond all addresses is refused, but only when the new place has been cleared.
        let is_wrong = addr.checked_add(old_len).is_none_or(|end| end > limits.end);
        let asked = AddrRange::new(addr, if is_wrong { addr + PAGE_SIZE } else { end });
        if asked.overlaps(new) {
            // The page where the old mapping begins, of which nothing is to be moved, is the first one of the new place.
            return self.remap_onto_itself(cpu, wish, new);
        }
        let held = self.reach(cpu, &wish, asked, Some(new));
        let [hold, other] = self.mm().exclude_both(cpu, [held, new]);
        if !held.covers(self.reach(cpu, &wish, asked, Some(new))) {
            drop((hold, other));
            return self.remap_fixed(cpu, wish);
        }
        self.mm().enter(cpu, &[&hold, &other]);
        let mut old = Change::holding(self.mm(), cpu, hold, held);
        let mut into = Change::holding(self.mm(), cpu, other, new);
        if self.has_limits() {
            old.hold_limits();
        }
        if old_len == new_len {
            return self.move_several(cpu, &mut old, &mut into, wish);
        }
        self.move_one_fixed(cpu, &mut old, &mut into, wish)
    }

    /// Each mapping in the range, one after the other.
    fn move_several(
        &self,
        cpu: &Cpu<H>,
        old: &mut Change<'_, H>,
        into: &mut Change<'_, H>,
        wish: Wish,
    ) -> Result<u64, Error> {
        let range = AddrRange::new(wish.addr, wish.addr + wish.old_len);
        let mut at = range.start;
        while at < range.end {
            let found = self.mm().next_vma(&cpu.pin(), at, range.end).map(|(_, seen)| seen);
            let Some(seen) = found else { break };
            let part = seen.range.intersection(AddrRange::new(at, range.end));
            if at == range.start && part.start > at {
                return Err(Error::BadAddress);
            }
            // As in Linux such a mapping moves alone.
            if seen.flags.intersects(VmFlags::UFFD_MODES) && (at > range.start || part.end < range.end) {
                return Err(Error::BadAddress);
            }
            let new_addr = wish.new_addr + (part.start - range.start);
            let one = Wish { addr: part.start, old_len: part.len(), new_len: part.len(), new_addr, ..wish };
            self.move_one_fixed(cpu, old, into, one)?;
            at = part.end;
        }
        if at == range.start { Err(Error::BadAddress) } else { Ok(wish.new_addr) }
    }

    fn move_one_fixed(
        &self,
        cpu: &Cpu<H>,
        old: &mut Change<'_, H>,
        into: &mut Change<'_, H>,
        wish: Wish,
    ) -> Result<u64, Error> {
        let source = self.source(cpu, &wish)?;
        let new = AddrRange::new(wish.new_addr, wish.new_addr + wish.new_len);
        if new.start < self.config().range.start {
            return Err(Error::NotPermitted);
        }
        self.move_to(cpu, old, into, &source, wish, new, true)?;
        Ok(new.start)
    }

    /// An old length of 0 and the same address: as in Linux the place is cleared first, and then there is nothing to map again.
    fn remap_onto_itself(&self, cpu: &Cpu<H>, wish: Wish, new: AddrRange) -> Result<u64, Error> {
        let mut change = Change::begin(self.mm(), cpu, new);
        if self.has_limits() {
            change.hold_limits();
        }
        self.source(cpu, &wish)?;
        self.cut_off(cpu, &mut change, new)?;
        Err(Error::BadAddress)
    }

    /// Whether `from`, the part of `source` that `wish` leaves of it, may be moved, when `freed` pages are gone from the new place. Gives what
    /// is cut off.
    fn check_move(
        &self,
        old: &mut Change<'_, H>,
        source: &Source<H>,
        wish: &Wish,
        from: AddrRange,
        freed: u64,
    ) -> Result<AddrRange, Error> {
        let end = wish.addr.checked_add(wish.old_len).filter(|&end| end <= self.config().range.end);
        let gone = match end {
            Some(end) => AddrRange::new(from.end, end),
            None => return Err(Error::Invalid),
        };
        old.narrow(gone);
        old.plan_splits()?;
        old.check_seals(gone)?;
        if wish.flags.contains(RemapFlags::DONTUNMAP) {
            // What was at the new place does not count any more.
            let more = (wish.old_len >> PAGE_SHIFT).saturating_sub(freed);
            self.check_growth(source.seen.flags, more << PAGE_SHIFT)?;
        }
        let limit = self.config().map_limit;
        if limit.is_some_and(|limit| self.mm().index.len() + SPARE_MAPPINGS >= limit) {
            return Err(Error::NoMemory);
        }
        Ok(gone)
    }
}

impl Wish {
    /// A new address is given, or one other than the old one asked for.
    fn has_place(&self) -> bool {
        self.flags.intersects(RemapFlags::FIXED | RemapFlags::DONTUNMAP)
    }

    /// What handlers of user faults are told when it is at `to`.
    fn came_to(&self, to: u64) -> Moved {
        let stays = self.old_len.min(self.new_len);
        let range = |start, end| Some(AddrRange::new(start, end)).filter(|range| !range.is_empty());
        let cut = range(self.addr + stays, self.addr + self.old_len);
        if !self.has_place() && to == self.addr {
            return Moved { gone: [cut, None], moved: None };
        }
        let left =
            range(self.addr, self.addr + stays).filter(|_| !self.flags.contains(RemapFlags::DONTUNMAP));
        Moved { gone: [cut, left], moved: Some((self.addr, to, stays)) }
    }
}

/// `range`, in which `part` lies, as far as it reaches on that side of `new`.
fn outside(range: AddrRange, part: AddrRange, new: Option<AddrRange>) -> AddrRange {
    match new {
        Some(new) if new.end <= part.start => AddrRange::new(range.start.max(new.end), range.end),
        Some(new) if new.start >= part.end => AddrRange::new(range.start, range.end.min(new.start)),
        _ => range,
    }
}
