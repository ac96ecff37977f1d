//! Mapping and unmapping.

use super::accounts::is_accountable;
use super::change::Change;
use super::place::{Beside, Claim, Fits};
use super::{AddressSpace, Limit, page_range};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_ceil};
use crate::error::Error;
use crate::fault::{self, user::events::Unmapping};
use crate::host::Host;
use crate::machine::Cpu;
use crate::object::Object;
use crate::stats::Counter;
use crate::sync::atomic::Ordering;
use crate::sync::{Pin, Shared};
use crate::vma::merge::Candidate;
use crate::vma::{Access, MapFlags, Prot, VmFlags};

/// What to map and where: the arguments of `mmap`.
pub struct MapRequest<H: Host> {
    /// The address, for `FIXED` and `FIXED_NOREPLACE`; else a hint, or 0.
    pub addr: u64,
    /// Bytes; rounded up to pages.
    pub len: u64,
    /// What is allowed.
    pub prot: Prot,
    /// Exactly one of `PRIVATE` and `SHARED`, and others.
    pub flags: MapFlags,
    /// What to map; `None` for memory: private, or (`SHARED`) an object of its own that `fork` shares.
    pub object: Option<Shared<Object<H>>>,
    /// Where in the object, in bytes, page-aligned. Ignored without an object.
    pub offset: u64,
    /// The address is to be a multiple of this power of two, for large mappings; at most a page asks for nothing.
    /// Ignored with `FIXED`.
    pub align: u64,
}

impl<H: Host> MapRequest<H> {
    /// Private memory of `len` bytes anywhere.
    pub fn anonymous(len: u64, prot: Prot) -> Self {
        Self { addr: 0, len, prot, flags: MapFlags::PRIVATE, object: None, offset: 0, align: PAGE_SIZE }
    }

    /// Memory of `len` bytes anywhere that `fork` shares.
    pub fn shared_anonymous(len: u64, prot: Prot) -> Self {
        Self { flags: MapFlags::SHARED, ..Self::anonymous(len, prot) }
    }

    /// `len` bytes of `object` from `offset`, anywhere; stores reach the object if `shared`.
    pub fn object(object: &Shared<Object<H>>, offset: u64, len: u64, prot: Prot, shared: bool) -> Self {
        let flags = if shared { MapFlags::SHARED } else { MapFlags::PRIVATE };
        Self { flags, object: Some(object.clone()), offset, ..Self::anonymous(len, prot) }
    }

    /// `len` bytes of device memory from `offset`, anywhere; `device` is an [`Object::device`]. Faults map its frames; nobody copies,
    /// counts, ages or locks them.
    pub fn device(device: &Shared<Object<H>>, offset: u64, len: u64, prot: Prot) -> Self {
        Self::object(device, offset, len, prot, true)
    }

    /// The same at exactly `addr`, in place of what is there.
    pub fn fixed(mut self, addr: u64) -> Self {
        self.addr = addr;
        self.flags |= MapFlags::FIXED;
        self
    }

    /// The same with `flags` added.
    pub fn with(mut self, flags: MapFlags) -> Self {
        self.flags |= flags;
        self
    }
}

impl<H: Host> AddressSpace<H> {
    /// Maps, and returns the address. O(log n) in the number of VMAs, but for what `FIXED` replaces and `POPULATE` fills
    /// in.
    ///
    /// # Errors
    /// As `mmap`: [`Error::Invalid`] for a length of 0, an unaligned fixed address or offset, or not exactly one of
    /// `PRIVATE` and `SHARED`; [`Error::NoMemory`] without room, memory, or within the limits; [`Error::Access`] for
    /// a writable shared mapping of a file that is not; [`Error::Exists`]; [`Error::Overflow`];
    /// [`Error::NotPermitted`] below the first address of the range.
    pub fn map(&self, cpu: &Cpu<H>, mut request: MapRequest<H>) -> Result<u64, Error> {
        // In Linux it is a kind of its own, beside the two.
        if request.flags.contains(MapFlags::DROPPABLE) {
            request.flags |= MapFlags::PRIVATE;
        }
        let replaced = Some((request.addr, request.len)).filter(|_| request.flags.contains(MapFlags::FIXED));
        let replaced = replaced.and_then(|(addr, len)| page_range(addr, len).ok());
        let told = match replaced {
            Some(range) => Some(Unmapping::announce(self.mm(), cpu, range)?),
            None => None,
        };
        let (addr, len) = self.map_only(cpu, &request)?;
        if let Some(told) = told {
            told.done(cpu);
        }
        if request.flags.contains(MapFlags::LOCKED) || self.mm().future_flags().contains(VmFlags::LOCKED) {
            let _ = self.fill_locked(cpu, AddrRange::new(addr, addr + len), true);
        }
        // As in Linux: what is locked as it is touched is not filled in before.
        let fills = request.flags & (MapFlags::POPULATE | MapFlags::NONBLOCK) == MapFlags::POPULATE;
        let future = self.mm().future_flags();
        let drops = request.flags.contains(MapFlags::DROPPABLE) && future.contains(VmFlags::LOCKED);
        if fills && !future.contains(VmFlags::LOCKONFAULT) || drops {
            // As in Linux: what cannot be filled in is left to faults, which will say why.
            let private_write =
                request.prot.contains(Prot::WRITE) && request.flags.contains(MapFlags::PRIVATE);
            let access = if private_write { Access::Write } else { Access::Read };
            if !request.prot.is_empty() {
                let _ = fault::populate(self.mm(), cpu, AddrRange::new(addr, addr + len), access);
            }
        }
        Ok(addr)
    }

    fn map_only(&self, cpu: &Cpu<H>, request: &MapRequest<H>) -> Result<(u64, u64), Error> {
        if request.len == 0 || !request.align.is_power_of_two() {
            return Err(Error::Invalid);
        }
        let len = page_ceil(request.len).ok_or(Error::NoMemory)?;
        let shared =
            match (request.flags.contains(MapFlags::SHARED), request.flags.contains(MapFlags::PRIVATE)) {
                (true, false) => true,
                (false, true) => false,
                _ => return Err(Error::Invalid),
            };
        if request.flags.contains(MapFlags::LOCKED) {
            self.may_lock()?;
        }
        if request.flags.contains(MapFlags::DROPPABLE)
            && (shared
                || request.object.is_some()
                || request.flags.intersects(MapFlags::LOCKED | MapFlags::GROWSDOWN))
        {
            return Err(Error::Invalid);
        }
        let mut flags = vm_flags(request.prot, request.flags) | self.mm().future_flags();
        if flags.contains(VmFlags::GROWSDOWN) && (shared || request.object.is_some()) {
            return Err(Error::Invalid);
        }
        if !cpu.machine().commit().allows(len >> PAGE_SHIFT) {
            // Objects that have gone hold their promises until their mappings' records are freed.
            cpu.quiesce();
        }
        let object = match &request.object {
            Some(object) => {
                Object::<H>::check_extent(request.offset, len)?;
                if shared && (!object.is_writable() || request.flags.contains(MapFlags::READ_ONLY)) {
                    if request.prot.contains(Prot::WRITE) {
                        return Err(Error::Access);
                    }
                    flags.remove(VmFlags::MAYWRITE);
                }
                if object.is_device() {
                    if !shared {
                        return Err(Error::Invalid);
                    }
                    flags =
                        flags.union(VmFlags::SPECIAL | VmFlags::DONTDUMP).difference(VmFlags::LOCKED_MASK);
                }
                Some(object.clone())
            }
            None if shared => {
                let by_page = flags.contains(VmFlags::NORESERVE) && !cpu.machine().commit().is_strict();
                let make = if by_page { Object::shared_memory } else { Object::anonymous_memory };
                Some(make(cpu.machine(), len)?)
            }
            None => None,
        };
        if cpu.machine().commit().is_strict() {
            flags.remove(VmFlags::NORESERVE);
        }
        flags.set(VmFlags::ACCOUNT, is_accountable(flags));
        let seen = match self.map_at_once(cpu, request, len, flags) {
            Ok(addr) => return Ok((addr, len)),
            Err(seen) => seen,
        };
        // As in Linux, what may be dropped is not locked by an earlier `mlockall`, and is no part of what was mapped before it.
        let (asked, alone) = (flags, flags.contains(VmFlags::DROPPABLE | VmFlags::LOCKED));
        if alone {
            flags.remove(VmFlags::LOCKED_MASK);
        }
        let pgoff_at = |addr: u64| match &request.object {
            Some(_) => request.offset >> PAGE_SHIFT,
            None if shared => 0,
            None => addr >> PAGE_SHIFT,
        };
        let Claim { range, mut change, fits, mut pin } =
            self.claim(cpu, request, len, seen, |range, beside| {
                let (pgoff, pages) = (pgoff_at(range.start), range.pages());
                if alone {
                    return Fits { up: false, down: false };
                }
                look_beside(&Candidate { flags, object: object.as_ref(), pgoff, pages }, range, beside)
            })?;
        let addr = range.start;
        let fixed = request.flags.contains(MapFlags::FIXED);
        if fixed || self.has_limits() {
            drop(pin);
            if self.has_limits() {
                change.hold_limits();
            }
            if fixed {
                change.plan_splits()?;
                change.check_seals(range)?;
            }
            pin = cpu.pin();
        }
        self.check_limits(&change, &pin, range, flags)?;
        self.check_commit(flags, range.pages())?;
        self.check_memlock(asked, range.pages())?;
        // Only a fixed address may be in use: what the search finds is free.
        let replaced = fixed.then(|| change.removal(&pin, range)).filter(|removal| removal.anything);
        change.plan(&pin, 1 + replaced.as_ref().map_or(0, |removal| removal.records))?;
        // From here on nothing fails.
        if replaced.is_some() {
            drop(pin);
            change.remove(range, false);
            pin = cpu.pin();
        }
        self.mm().ram(&pin).event(Counter::Map, addr);
        let lock = self.config().rmap_lock_on_end_move;
        let fits = if alone { Some(Fits { up: false, down: false }) } else { fits };
        change.insert_or_extend(pin, range, flags, pgoff_at(addr), object, lock, fits);
        drop(change);
        cpu.tidy();
        Ok((addr, len))
    }

    pub(super) fn check_limits(
        &self,
        change: &Change<'_, H>,
        pin: &Pin<'_>,
        range: AddrRange,
        flags: VmFlags,
    ) -> Result<(), Error> {
        let config = self.config();
        // As in Linux, what a fixed mapping replaces does not count in its favour but for the address space.
        if config.map_limit.is_some_and(|limit| self.mm().index.len() >= limit) {
            return Err(Error::NoMemory);
        }
        if self.limit(Limit::Address).is_some() || self.limit(Limit::Data).is_some() {
            let mut replaced = 0;
            change.for_each(pin, range, |_, seen| {
                replaced += seen.range.intersection(range).pages();
                core::ops::ControlFlow::Continue(())
            });
            // As in Linux, what is replaced counts in favour of the address space, and of data too.
            self.check_space(flags, range.pages().saturating_sub(replaced))?;
        }
        Ok(())
    }

    /// Unmaps `len` bytes (rounded up to pages) at `addr`, whatever is mapped there; holes are no error.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unaligned address, a length of 0 or a range beyond the space; [`Error::NoMemory`]
    /// when a VMA must be divided and there is no memory for that.
    pub fn unmap(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        let range = page_range(addr, len)?;
        if range.is_empty() || range.end > self.config().range.end {
            return Err(Error::Invalid);
        }
        let told = Unmapping::announce(self.mm(), cpu, range)?;
        if self.unmap_at_once(cpu, range) {
            told.done(cpu);
            return Ok(());
        }
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        // Even if the range is one VMA: a call next door may have yet to divide the block that is at their common end.
        change.plan_splits()?;
        change.check_seals(range)?;
        let mut pin = cpu.pin();
        // Most calls unmap exactly one VMA, and need nothing more for that.
        self.mm().ram(&pin).event(Counter::Unmap, addr);
        if !change.remove_whole(pin, range) {
            pin = cpu.pin();
            let removal = change.removal(&pin, range);
            if !removal.anything {
                return Ok(());
            }
            // As in Linux only a hole, which makes two VMAs of one, counts against the limit.
            let limit = self.config().map_limit.filter(|_| removal.is_hole);
            if limit.is_some_and(|limit| self.mm().index.len() >= limit) {
                return Err(Error::NoMemory);
            }
            change.plan(&pin, removal.records)?;
            drop(pin);
            change.remove(range, true);
        }
        if self.config().linear_search {
            // As Linux before 3.8 did: the next search begins no lower than the highest hole.
            self.mm().search_from.fetch_max(range.end, Ordering::Relaxed);
        }
        drop(change);
        told.done(cpu);
        cpu.tidy();
        Ok(())
    }
}

/// The attributes of a new VMA.
fn vm_flags(prot: Prot, map: MapFlags) -> VmFlags {
    let mut flags = (VmFlags::MAYREAD | VmFlags::MAYWRITE | VmFlags::MAYEXEC).with_prot(prot);
    flags.set(VmFlags::SHARED, map.contains(MapFlags::SHARED));
    flags.set(VmFlags::GROWSDOWN, map.contains(MapFlags::GROWSDOWN));
    flags.set(VmFlags::NORESERVE, map.contains(MapFlags::NORESERVE));
    flags.set(VmFlags::LOCKED, map.contains(MapFlags::LOCKED));
    flags.set(VmFlags::NOHUGEPAGE, map.contains(MapFlags::STACK));
    flags.set(VmFlags::SYNC, map.contains(MapFlags::SYNC));
    if map.contains(MapFlags::DROPPABLE) {
        flags |= VmFlags::DROPPABLE | VmFlags::NORESERVE | VmFlags::WIPEONFORK | VmFlags::DONTDUMP;
    }
    flags
}

/// Which of the VMAs beside `range` the mapping continues.
fn look_beside<H: Host>(candidate: &Candidate<'_, H>, range: AddrRange, beside: Beside<'_, H>) -> Fits {
    let [below, above] = beside;
    Fits {
        up: below.is_some_and(|(below, low)| below.end == range.start && candidate.extends_up(low)),
        down: above.is_some_and(|(above, high)| above.start == range.end && candidate.extends_down(high)),
    }
}

impl<H: Host> Change<'_, H> {
    /// Maps `range`, which is free: by extending the VMAs beside it where they are one mapping with it, else by a new
    /// one. `fits` is what a first look has found, if there was one.
    #[allow(clippy::too_many_arguments, reason = "what a mapping is")]
    pub(super) fn insert_or_extend(
        &mut self,
        pin: Pin<'_>,
        range: AddrRange,
        flags: VmFlags,
        pgoff: u64,
        object: Option<Shared<Object<H>>>,
        rmap_lock: bool,
        fits: Option<Fits>,
    ) {
        let candidate = Candidate { flags, object: object.as_ref(), pgoff, pages: range.pages() };
        let look = || look_beside(&candidate, range, self.mm.index.neighbours(&pin, range.start, range));
        let Fits { up, down } = fits.unwrap_or_else(look);
        // As a rule there is nothing to continue.
        if !up && !down {
            return self.insert(pin, range, flags, pgoff, object);
        }
        drop(pin);
        if up && self.grow_up(range, rmap_lock, |low| candidate.extends_up(low)) {
            if down {
                self.merge_at(range.end);
            }
        } else if !down || !self.grow_down(range, object.as_ref(), |high| candidate.extends_down(high)) {
            self.insert(self.cpu.pin(), range, flags, pgoff, object);
        }
    }
}
