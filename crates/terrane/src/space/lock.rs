//! Locking in memory: `mlock`, `mlock2`, `munlock`, `mlockall`, `munlockall`.
//!
//! Locked is an attribute of mappings ([`VmFlags::LOCKED`]); reclaim asks the mapping of a page. Locking fills the pages in, unless
//! they are to be locked as they are touched ([`VmFlags::LOCKONFAULT`]). A fork does not inherit it.
//!
//! # The account
//!
//! [`Mm::locked`] counts the pages of locked mappings, touched or not, as Linux does (`VmLck`). It changes with the mappings: where
//! they are made, removed and change their attributes. It is in shards, for calls side by side; in a space with a limit, calls
//! that change it hold the lock of the limits from the look to the change.

use super::change::Change;
use super::{AddressSpace, Limit};
use crate::addr::{AddrRange, PAGE_SHIFT, PAGE_SIZE, page_floor};
use crate::error::{Error, FaultError};
use crate::fault;
use crate::host::Host;
use crate::machine::Cpu;
use crate::mm::Mm;
use crate::sync::CpuId;
use crate::sync::atomic::Ordering;
use crate::vma::{Access, VmFlags};

bitflags::bitflags! {
    /// How to lock ([`mlock2`](AddressSpace::mlock2), `MLOCK_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct LockFlags: u32 {
        /// Pages are locked as they are touched.
        const ONFAULT = 1;
    }
}

bitflags::bitflags! {
    /// What to lock ([`mlockall`](AddressSpace::mlockall), `MCL_…`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct LockAllFlags: u32 {
        /// What is mapped now.
        const CURRENT = 1;
        /// What is mapped later.
        const FUTURE = 2;
        /// With one of the others: pages as they are touched.
        const ONFAULT = 4;
    }
}

impl<H: Host> Mm<H> {
    /// Counts `pages` pages of a mapping with `flags` that has come or gone, if it is locked. By the CPU that acts.
    #[inline]
    pub(crate) fn count_locked(&self, cpu: CpuId, flags: VmFlags, pages: i64) {
        if flags.contains(VmFlags::LOCKED) {
            self.locked.add(cpu, pages);
        }
    }

    /// Attributes that mappings get from now on (`MCL_FUTURE`).
    #[inline]
    pub(crate) fn future_flags(&self) -> VmFlags {
        VmFlags::from_bits_retain(self.future.load(Ordering::Relaxed))
    }
}

fn lock_flags(on_fault: bool) -> VmFlags {
    if on_fault { VmFlags::LOCKED_MASK } else { VmFlags::LOCKED }
}

impl<H: Host> AddressSpace<H> {
    /// Locks the pages that `len` bytes at `addr` touch in memory, and fills them in. O(VMAs and pages).
    ///
    /// # Errors
    /// [`Error::NotPermitted`] where nothing may be locked (a limit of 0); [`Error::NoMemory`] beyond the limit, for a hole (what
    /// lies before it is locked), when a mapping cannot be divided, or for a page that would raise a signal (all is locked
    /// then); [`Error::Again`] when memory is short for filling in; [`Error::Invalid`] for a range that wraps.
    pub fn mlock(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        self.lock_range(cpu, addr, len, VmFlags::LOCKED)
    }

    /// [`mlock`](Self::mlock); `flags` are bits of [`LockFlags`].
    ///
    /// # Errors
    /// As [`mlock`](Self::mlock); [`Error::Invalid`] for other flags, whatever the rest.
    pub fn mlock2(&self, cpu: &Cpu<H>, addr: u64, len: u64, flags: u32) -> Result<(), Error> {
        let flags = LockFlags::from_bits(flags).ok_or(Error::Invalid)?;
        self.lock_range(cpu, addr, len, lock_flags(flags.contains(LockFlags::ONFAULT)))
    }

    /// Undoes [`mlock`](Self::mlock) for the pages that `len` bytes at `addr` touch.
    ///
    /// # Errors
    /// [`Error::NoMemory`] for a hole (what lies before it is done), or when a mapping cannot be divided;
    /// [`Error::Invalid`] for a range that wraps.
    pub fn munlock(&self, cpu: &Cpu<H>, addr: u64, len: u64) -> Result<(), Error> {
        let Some(range) = touched(addr, len) else { return Err(Error::Invalid) };
        if range.is_empty() {
            return Ok(());
        }
        let mut change = self.begin_locking(cpu, range);
        let result = self.set_locked(&mut change, range, VmFlags::empty());
        drop(change);
        cpu.tidy();
        result
    }

    /// Locks all that is mapped, all that will be mapped, or both, as `flags` say, which are bits of [`LockAllFlags`]. What an earlier call said about the future is forgotten. Pages that cannot be filled in are left to
    /// faults.
    ///
    /// # Errors
    /// [`Error::Invalid`] for other flags, or [`LockAllFlags::ONFAULT`] alone; [`Error::NotPermitted`] where nothing may be locked;
    /// [`Error::NoMemory`] when more is mapped than may be locked.
    pub fn mlockall(&self, cpu: &Cpu<H>, flags: u32) -> Result<(), Error> {
        let flags = LockAllFlags::from_bits(flags).ok_or(Error::Invalid)?;
        if !flags.intersects(LockAllFlags::CURRENT | LockAllFlags::FUTURE) {
            return Err(Error::Invalid);
        }
        self.may_lock()?;
        let all = self.config().range;
        let (current, new) =
            (flags.contains(LockAllFlags::CURRENT), lock_flags(flags.contains(LockAllFlags::ONFAULT)));
        {
            let mut change = self.begin_locking(cpu, all);
            let fits = |limit: u64| self.mm().mapped.sum() as u64 <= limit >> PAGE_SHIFT;
            if current && !self.memlock_limit().is_none_or(fits) {
                return Err(Error::NoMemory);
            }
            let future = if flags.contains(LockAllFlags::FUTURE) { new } else { VmFlags::empty() };
            self.mm().future.store(future.bits(), Ordering::Relaxed);
            if current {
                self.set_all_locked(&mut change, all, new);
            }
        }
        if current {
            let _ = self.fill_in(cpu, all, true, true);
        }
        cpu.tidy();
        Ok(())
    }

    /// Undoes [`mlockall`](Self::mlockall) and every [`mlock`](Self::mlock).
    pub fn munlockall(&self, cpu: &Cpu<H>) {
        let all = self.config().range;
        let mut change = self.begin_locking(cpu, all);
        self.mm().future.store(0, Ordering::Relaxed);
        self.set_all_locked(&mut change, all, VmFlags::empty());
        drop(change);
        cpu.tidy();
    }

    /// Bytes of locked mappings (`VmLck`).
    pub fn locked_bytes(&self) -> u64 {
        (self.mm().locked.sum().max(0) as u64) << PAGE_SHIFT
    }

    /// Bytes that may be locked; `None` for any.
    fn memlock_limit(&self) -> Option<u64> {
        self.limit(Limit::Locked)
    }

    /// True when locked memory is limited, so that calls that lock some must not run side by side.
    pub(super) fn limits_locked(&self) -> bool {
        self.memlock_limit().is_some()
    }

    /// # Errors
    /// [`Error::NotPermitted`] where nothing may be locked at all.
    pub(super) fn may_lock(&self) -> Result<(), Error> {
        if self.memlock_limit() == Some(0) { Err(Error::NotPermitted) } else { Ok(()) }
    }

    /// Whether a mapping with `flags` may come, or grow by `pages`.
    ///
    /// # Errors
    /// [`Error::Again`] when it is locked and passes the limit.
    pub(super) fn check_memlock(&self, flags: VmFlags, pages: u64) -> Result<(), Error> {
        let Some(limit) = self.memlock_limit().filter(|_| flags.contains(VmFlags::LOCKED)) else {
            return Ok(());
        };
        let locked = (self.mm().locked.sum().max(0) as u64).saturating_add(pages);
        if locked > limit >> PAGE_SHIFT { Err(Error::Again) } else { Ok(()) }
    }

    fn begin_locking<'a>(&'a self, cpu: &'a Cpu<H>, range: AddrRange) -> Change<'a, H> {
        let mut change = Change::begin(self.mm(), cpu, range);
        if self.has_limits() {
            change.hold_limits();
        }
        change
    }

    fn lock_range(&self, cpu: &Cpu<H>, addr: u64, len: u64, flags: VmFlags) -> Result<(), Error> {
        self.may_lock()?;
        let Some(range) = touched(addr, len) else {
            // As in Linux, the limit is looked at before the range.
            let pages = touched_len(addr, len) >> PAGE_SHIFT;
            let locked = (self.mm().locked.sum().max(0) as u64).saturating_add(pages);
            let is_over = self.memlock_limit().is_some_and(|limit| locked > limit >> PAGE_SHIFT);
            return Err(if is_over { Error::NoMemory } else { Error::Invalid });
        };
        if range.is_empty() {
            return Ok(());
        }
        {
            let mut change = self.begin_locking(cpu, range);
            if let Some(limit) = self.memlock_limit() {
                let mut locked = self.mm().locked.sum().max(0) as u64 + range.pages();
                if locked > limit >> PAGE_SHIFT {
                    // What is locked in the range already does not count twice.
                    let pin = cpu.pin();
                    change.for_each(&pin, range, |_, seen| {
                        if seen.flags.contains(VmFlags::LOCKED) {
                            locked -= seen.range.intersection(range).pages();
                        }
                        core::ops::ControlFlow::Continue(())
                    });
                }
                if locked > limit >> PAGE_SHIFT {
                    return Err(Error::NoMemory);
                }
            }
            self.set_locked(&mut change, range, flags)?;
        }
        let result = self.fill_in(cpu, range, false, true);
        cpu.tidy();
        result
    }

    /// Gives all of `range` the `flags` of [`VmFlags::LOCKED_MASK`], up to a hole.
    fn set_locked(&self, change: &mut Change<'_, H>, range: AddrRange, flags: VmFlags) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            if change.mm.vma_at(&change.cpu.pin(), at).is_none() {
                return Err(Error::NoMemory);
            }
            let done = self.set_next_locked(change, AddrRange::new(at, range.end), flags)?;
            at = done.ok_or(Error::NoMemory)?;
        }
        Ok(())
    }

    /// The same for everything that is mapped in `range`; where there is no memory for dividing, it stays as it is.
    fn set_all_locked(&self, change: &mut Change<'_, H>, range: AddrRange, flags: VmFlags) {
        let mut at = range.start;
        while at < range.end {
            // Whole mappings: nothing is divided, so nothing fails.
            match self.set_next_locked(change, AddrRange::new(at, range.end), flags) {
                Ok(Some(end)) => at = end,
                _ => return,
            }
        }
    }

    /// Gives the first VMA in `rest` the flags; returns where it ends, or `None` when there is none.
    fn set_next_locked(
        &self,
        change: &mut Change<'_, H>,
        rest: AddrRange,
        flags: VmFlags,
    ) -> Result<Option<u64>, Error> {
        let (part, old, splits) = {
            let pin = change.cpu.pin();
            let Some((_, seen)) = change.mm.next_vma(&pin, rest.start, rest.end) else { return Ok(None) };
            let part = seen.range.intersection(rest);
            (part, seen.flags, change.splits(&pin, part))
        };
        let found = Ok(Some(part.end));
        let never = VmFlags::SPECIAL.union(VmFlags::DROPPABLE);
        if old & VmFlags::LOCKED_MASK == flags || old.intersects(never) {
            return found;
        }
        if self.config().map_limit.is_some_and(|limit| self.mm().index.len() + splits > limit) {
            return Err(Error::NoMemory);
        }
        change.plan_splits()?;
        change.plan(&change.cpu.pin(), splits)?;
        change.alter(part, |_, old| old.difference(VmFlags::LOCKED_MASK).union(flags));
        change.cut_blocks();
        let pages = part.pages() as i64;
        let cpu = change.cpu.id();
        change.mm.count_locked(cpu, old, -pages);
        change.mm.count_locked(cpu, flags, pages);
        found
    }

    /// Fills in the locked mappings of `range`, but those that are locked page by page.
    ///
    /// # Errors
    /// As [`mlock`](Self::mlock); with `ignore_errors`, goes on with the next mapping.
    pub(super) fn fill_locked(
        &self,
        cpu: &Cpu<H>,
        range: AddrRange,
        ignore_errors: bool,
    ) -> Result<(), Error> {
        self.fill_in(cpu, range, ignore_errors, false)
    }

    /// The same for a call that locks: as in Linux it fills in what may be dropped (`drops`) as well, which is never locked.
    fn fill_in(&self, cpu: &Cpu<H>, range: AddrRange, ignore_errors: bool, drops: bool) -> Result<(), Error> {
        let mut at = range.start;
        while at < range.end {
            let found = {
                let rest = AddrRange::new(at, range.end);
                let _steady = self.mm().share(cpu, rest);
                let pin = cpu.pin();
                self.mm()
                    .next_vma(&pin, at, range.end)
                    .map(|(_, seen)| (seen.range.intersection(rest), seen.flags))
            };
            let Some((part, flags)) = found else { return Ok(()) };
            at = part.end;
            let fills = flags & VmFlags::LOCKED_MASK == VmFlags::LOCKED
                || drops && flags.contains(VmFlags::DROPPABLE);
            if !fills || flags.intersects(VmFlags::IO.union(VmFlags::PFNMAP)) {
                continue;
            }
            let copies = flags & VmFlags::WRITE.union(VmFlags::SHARED) == VmFlags::WRITE;
            let access = if copies { Access::Write } else { Access::Read };
            let filled = fault::populate(self.mm(), cpu, part, access);
            if let (Err((_, error)), false) = (filled, ignore_errors) {
                return Err(match error {
                    FaultError::OutOfMemory => Error::Again,
                    _ => Error::NoMemory,
                });
            }
        }
        Ok(())
    }
}

/// The pages that `len` bytes at `addr` touch; `None` when they wrap. As Linux computes it: a length that wraps to nothing when it is
/// rounded up is nothing.
fn touched(addr: u64, len: u64) -> Option<AddrRange> {
    AddrRange::of_len(page_floor(addr), touched_len(addr, len))
}

fn touched_len(addr: u64, len: u64) -> u64 {
    len.wrapping_add(addr % PAGE_SIZE).wrapping_add(PAGE_SIZE - 1) & !(PAGE_SIZE - 1)
}
